"""Checkpoints (docs/checkpoint_format.md, version 1) as a mapping from names to tensors."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any, Dict, Iterator, List, Optional, Union

# Types of numpy. It has neither bf16 nor fp8: their bits are integers there.
_NUMPY_TYPES = {"f64": "<f8", "f32": "<f4", "i64": "<i8", "i32": "<i4", "u8": "u1",
                "bf16": "<u2", "f8e4m3": "u1"}
_TORCH_VIEWS = {"bf16": "bfloat16", "f8e4m3": "float8_e4m3fn"}


class CheckpointError(ValueError):
    """A checkpoint that is incomplete, damaged, or of another version."""


def _index(folder: pathlib.Path) -> Dict[str, Any]:
    try:
        commit = (folder / "COMMIT").read_text(encoding="ascii")
        index = json.loads((folder / "index.json").read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} is no complete checkpoint: there is no "
                              f"{pathlib.Path(error.filename).name}.") from None
    except ValueError as error:
        raise CheckpointError(f"{folder}: {error}") from None
    if len(commit) != 17:
        raise CheckpointError(f"{folder}: COMMIT is damaged.")
    if index.get("format") != "troupe-checkpoint" or index.get("version") != 1:
        raise CheckpointError(f"{folder} is no checkpoint of version 1, the only one that is read "
                              "here.")
    for shard in index["shards"]:
        path = folder / shard["file"]
        size = path.stat().st_size if path.is_file() else -1
        if size != shard["bytes"]:
            raise CheckpointError(f"{path} is missing or has not the {shard['bytes']} bytes that "
                                  "the index says.")
    return index


def is_complete(folder: pathlib.Path) -> bool:
    """Whether the folder's index can be read and all its shards have their sizes."""
    try:
        _index(folder)
    except CheckpointError:
        return False
    return True


class Checkpoint(Mapping):
    """A checkpoint: `checkpoint["layers.0.w_router"]` is the whole tensor as a numpy array, joined
    from the slices of all ranks when it is asked for, and not kept.

    Tensors of bf16 and fp8 become f32 unless `exact`, which gives their bits as integers; `torch()`
    gives any tensor in its own type. Hashes are not verified where the package xxhash is missing.
    """

    def __init__(self, path: Union[str, "os.PathLike[str]"], exact: bool = False):
        self.path = pathlib.Path(path)
        self.exact = exact
        index = _index(self.path)
        self.step: int = index["step"]
        self.training: Dict[str, Any] = index["training"]
        self._tensors: Dict[str, Dict[str, Any]] = {each["name"]: each
                                                    for each in index["tensors"]}
        self._headers: Dict[str, Dict[str, Any]] = {}

    def __repr__(self) -> str:
        return f"<troupe checkpoint {str(self.path)!r}: step {self.step}, {len(self)} tensors>"

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def names(self, role: Optional[str] = None) -> List[str]:
        """All names, or those of one role: parameter, optimizer, state."""
        return [name for name, each in self._tensors.items() if role in (None, each["role"])]

    def dtype(self, name: str) -> str:
        """As the format names it: f32, bf16, ..."""
        return self._tensors[name]["dtype"]

    def shape(self, name: str) -> "tuple[int, ...]":
        """Of the whole tensor, without reading it."""
        return tuple(self._tensors[name]["shape"])

    def __getitem__(self, name: str) -> Any:
        bits = self._bits(name)
        dtype = self.dtype(name)
        if self.exact:
            return bits
        if dtype == "bf16":
            return _bf16_to_f32(bits)
        return _f8e4m3_to_f32(bits) if dtype == "f8e4m3" else bits

    def torch(self, name: str) -> Any:
        """The tensor as torch's, in its own type."""
        import torch  # pylint: disable=import-outside-toplevel

        dtype = self.dtype(name)
        bits = self._bits(name)
        if dtype not in _TORCH_VIEWS:
            return torch.from_numpy(bits)
        bits = bits.view("<i2") if dtype == "bf16" else bits
        return torch.from_numpy(bits).view(getattr(torch, _TORCH_VIEWS[dtype]))

    def _bits(self, name: str) -> Any:
        import numpy  # pylint: disable=import-outside-toplevel

        tensor = self._tensors[name]
        whole = numpy.empty(tensor["shape"], dtype=_NUMPY_TYPES[tensor["dtype"]])
        for each in tensor["slices"]:
            box = tuple(slice(begin, begin + extent)
                        for begin, extent in zip(each["offset"], each["shape"]))
            data = self._slice_bytes(name, each)
            whole[box] = numpy.frombuffer(data, dtype=whole.dtype).reshape(each["shape"])
        return whole

    def _slice_bytes(self, name: str, each: Dict[str, Any]) -> bytes:
        path = self.path / each["file"]
        with path.open("rb") as file:
            header = self._headers.get(each["file"])
            if header is None:
                size = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(size))
                header["__begin__"] = 8 + size
                self._headers[each["file"]] = header
            begin, end = header[each["tensor"]]["data_offsets"]
            file.seek(header["__begin__"] + begin)
            data = file.read(end - begin)
        if not _has_hash(data, each["xxh3"]):
            raise CheckpointError(f"{path}: the bytes of {name} are not those that were saved; the "
                                  "file is damaged.")
        return data


def load_checkpoint(path: Union[str, "os.PathLike[str]"], exact: bool = False) -> Checkpoint:
    """Opens a checkpoint, a folder step_N. Nothing but its index is read before a tensor is asked
    for."""
    return Checkpoint(path, exact)


def _has_hash(data: bytes, expected: str) -> bool:
    try:
        import xxhash  # pylint: disable=import-outside-toplevel
    except ImportError:
        return True
    return xxhash.xxh3_64_hexdigest(data) == expected


def _bf16_to_f32(bits: Any) -> Any:
    return (bits.astype("<u4") << 16).view("<f4")


def _f8e4m3_to_f32(bits: Any) -> Any:
    import numpy  # pylint: disable=import-outside-toplevel

    codes = numpy.arange(256)
    exponents, fractions = (codes >> 3) & 15, codes & 7
    values = numpy.where(exponents == 0, fractions / 8 * 2.0**-6,
                         (1 + fractions / 8) * 2.0**(exponents - 7.0))
    values[(codes & 127) == 127] = numpy.nan
    values[codes >= 128] *= -1
    return values.astype("<f4")[bits]
