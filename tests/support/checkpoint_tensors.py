"""Reads the f32 tensors of a checkpoint of Troupe (docs/checkpoint_format.md), whatever the layout
of its ranks, with nothing that Python has not.
"""
import itertools
import json
import math
import struct


def read_f32(folder):
    """The f32 tensors of a checkpoint, whole: name -> (shape, numbers in row-major order)."""
    headers = {}
    tensors = {}
    for tensor in json.loads((folder / "index.json").read_text())["tensors"]:
        if tensor["dtype"] != "f32":
            continue
        shape = tensor["shape"]
        numbers = [None] * math.prod(shape)
        for piece in tensor["slices"]:
            if piece["file"] not in headers:
                headers[piece["file"]] = _open(folder / piece["file"])
            header, data = headers[piece["file"]]
            begin, end = header[piece["tensor"]]["data_offsets"]
            values = struct.unpack(f"<{(end - begin) // 4}f", data[begin:end])
            _place(numbers, shape, piece["offset"], piece["shape"], values)
        tensors[tensor["name"]] = (shape, numbers)
    return tensors


def _open(file):
    """The header of a safetensors file, and what its offsets count in."""
    data = file.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8:8 + size]), data[8 + size:]


def _place(numbers, shape, offset, box, values):
    """Copies a box of a tensor, row by row of its last dimension."""
    row = box[-1]
    starts = itertools.product(*(range(first, first + extent)
                                 for first, extent in zip(offset[:-1], box[:-1])))
    for i, start in enumerate(starts):
        at = 0
        for index, extent in zip((*start, offset[-1]), shape):
            at = at * extent + index
        numbers[at:at + row] = values[i * row:(i + 1) * row]
