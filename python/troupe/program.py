"""The program as functions: options in, dictionaries out."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any, Dict, Iterator, List, Optional, Union

# Where a wheel has the tree that `make install` writes.
_IN_WHEEL = pathlib.Path(__file__).parent / "program" / "bin" / "troupe"

_POLL_S = 0.05  # between looks at metrics.jsonl

_Program = Optional[Union[str, "os.PathLike[str]"]]


class TroupeError(RuntimeError):
    """The program has failed. `status` is its exit status (2: the request was wrong, 3: it does not
    fit, 1: anything else); the text is what it said."""

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status


def program_path() -> str:
    """The program that is run unless a function is given another: the one that came with this
    package, or `troupe` in PATH."""
    if _IN_WHEEL.exists():
        return str(_IN_WHEEL)
    found = shutil.which("troupe")
    if found is None:
        raise FileNotFoundError("There is no program troupe: neither in this package nor in PATH. "
                                "Install it (make install), or name it: program=PATH.")
    return found


def _flags(options: Dict[str, Any]) -> List[str]:
    """{"train_iters": 10, "bf16": True, "data_path": [0.7, "a"]} as arguments."""
    arguments: List[str] = []
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if value is None:
            continue
        if isinstance(value, bool):
            if value:
                arguments.append(flag)
            continue
        if isinstance(value, (list, tuple)):
            arguments.append(flag)
            arguments += [str(each) for each in value]
            continue
        arguments.append(f"{flag}={value}")
    return arguments


def _error(status: int, said: str) -> TroupeError:
    said = said.strip()
    return TroupeError(said or f"troupe ended with status {status} and said nothing.", status)


def run_command(command: str, *arguments: Any, program: _Program = None,
                **options: Any) -> Dict[str, Any]:
    """Runs any command to its end, with --json, and returns its result.

    A status other than 0 is a TroupeError.
    """
    words = [str(program or program_path()), command, *map(str, arguments), "--json", "--quiet",
             *_flags(options)]
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                          errors="replace", check=False)
    if done.returncode != 0:
        raise _error(done.returncode, done.stderr)
    return json.loads(done.stdout)


def plan(*, program: _Program = None, **options: Any) -> Dict[str, Any]:
    """`troupe plan`: the memory that a run needs, and whether it fits here.

    A plan that does not fit is a result, too: `fits` is False.
    """
    words = [str(program or program_path()), "plan", "--json", "--quiet", *_flags(options)]
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                          errors="replace", check=False)
    if done.returncode not in (0, 3) or not done.stdout.strip():
        raise _error(done.returncode, done.stderr)
    return json.loads(done.stdout)


def inspect(*, program: _Program = None, **options: Any) -> Dict[str, Any]:
    """`troupe inspect`: the program of a training step, its operations and values."""
    return run_command("inspect", program=program, **options)


def verify(folder: Union[str, "os.PathLike[str]"], *, program: _Program = None,
           **options: Any) -> Dict[str, Any]:
    """`troupe verify`: the numbers of a Hugging Face folder beside its reference's."""
    return run_command("verify", folder, program=program, **options)


def tokenize(*, program: _Program = None, **options: Any) -> Dict[str, Any]:
    """`troupe tokenize`: text files to a data set."""
    return run_command("tokenize", program=program, **options)


def convert(*, load: Union[str, "os.PathLike[str]"], save: Union[str, "os.PathLike[str]"],
            program: _Program = None, **options: Any) -> pathlib.Path:
    """`troupe convert`: a trained model as a Hugging Face folder, whose path is returned."""
    run_command("convert", program=program, load=load, save=save, **options)
    return pathlib.Path(save)


def _lines_after(path: pathlib.Path, offset: int) -> "tuple[List[Dict[str, Any]], int]":
    """The whole lines of metrics.jsonl behind `offset` that are no headers, and where they end."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            # A run that goes on first drops the lines of steps that it does again.
            offset = min(offset, size)
            file.seek(offset)
            text = file.read()
    except FileNotFoundError:
        return [], offset
    whole = text[:text.rfind(b"\n") + 1]
    lines = [json.loads(line) for line in whole.splitlines()]
    return [line for line in lines if "header" not in line], offset + len(whole)


def train(*, save: Union[str, "os.PathLike[str]"], program: _Program = None,
          **options: Any) -> Iterator[Dict[str, Any]]:
    """`troupe train`: runs it with the first `next`, and iterates over what it measures as it does: a
    dictionary for each logged step (`loss`, ...) and each evaluation (`val_loss`, ...), as
    metrics.jsonl holds them.

    Ctrl-C here (KeyboardInterrupt), and leaving the loop early, interrupt the run as Ctrl-C does on
    its terminal: it finishes the step, saves, and ends, which is waited for. What the program warns
    of goes to standard error. A run that fails raises TroupeError after its last metrics.
    """
    words = [str(program or program_path()), "train", "--quiet", f"--save={os.fspath(save)}",
             *_flags(options)]
    return _watch(words, pathlib.Path(save) / "metrics.jsonl")


def _watch(words: List[str], metrics: pathlib.Path) -> Iterator[Dict[str, Any]]:
    offset = metrics.stat().st_size if metrics.exists() else 0
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        # In a group of its own: a terminal sends Ctrl-C to the whole group, and it must come once.
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                   stderr=said, start_new_session=True)
        try:
            ended = False
            while not ended:
                ended = process.poll() is not None
                lines, offset = _lines_after(metrics, offset)
                yield from lines
                if not lines and not ended:
                    time.sleep(_POLL_S)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                process.wait()
            said.seek(0)
            text = said.read()
            if process.returncode in (0, 130):
                sys.stderr.write(text)
        if process.returncode == 130:
            raise KeyboardInterrupt
        if process.returncode != 0:
            raise _error(process.returncode, text)
