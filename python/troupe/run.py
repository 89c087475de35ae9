"""The folder of a run: its metrics as columns, its checkpoints."""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any, Dict, List, Optional, Union

from .checkpoint import Checkpoint, is_complete, load_checkpoint

try:
    import numpy
except ImportError:
    numpy = None  # type: ignore[assignment]


class Run:
    """A folder that `troupe train --save` has written or is writing. Reads only; what is read is
    read anew each time."""

    def __init__(self, path: Union[str, "os.PathLike[str]"]):
        self.path = pathlib.Path(path)
        if not self.path.is_dir():
            raise FileNotFoundError(f"{self.path} is no folder of a run.")

    def __repr__(self) -> str:
        return f"troupe.Run({str(self.path)!r})"

    def _lines(self) -> List[Dict[str, Any]]:
        try:
            text = (self.path / "metrics.jsonl").read_text(encoding="utf-8")
        except FileNotFoundError:
            return []
        # The last line may be in the middle of being written.
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def starts(self) -> List[Dict[str, Any]]:
        """What each start of the run says of itself: version, host, ranks, ..."""
        return [line for line in self._lines() if "header" in line]

    def metrics(self, kind: str = "loss") -> List[Dict[str, Any]]:
        """The lines that have this field: `loss` those of training steps, `val_loss` those of
        evaluations."""
        return [line for line in self._lines() if "header" not in line and kind in line]

    def columns(self, kind: str = "loss") -> Dict[str, Any]:
        """The same as a table: for each field that holds numbers one column, in the order of the
        steps; a field that a line lacks is NaN there. numpy arrays; lists where there is no numpy.
        """
        lines = self.metrics(kind)
        names: Dict[str, None] = {}
        for line in lines:
            names.update((name, None) for name, value in line.items()
                         if isinstance(value, (bool, int, float)))
        columns: Dict[str, Any] = {}
        for name in names:
            column = [line.get(name, float("nan")) for line in lines]
            columns[name] = column if numpy is None else numpy.array(column)
        return columns

    def steps(self) -> List[int]:
        """The steps of which there is a complete checkpoint, lowest first."""
        folders = (self.path / "checkpoints").glob("step_*")
        return sorted(int(each.name[5:]) for each in folders if is_complete(each))

    def checkpoint(self, step: Optional[int] = None) -> Checkpoint:
        """The checkpoint of a step; of the newest if none is named."""
        if step is None:
            steps = self.steps()
            if not steps:
                raise FileNotFoundError(f"{self.path} holds no complete checkpoint.")
            step = steps[-1]
        return load_checkpoint(self.path / "checkpoints" / f"step_{step:08d}")
