#!/usr/bin/env python3
"""The example notebooks (docs/examples) run from their first cell to their last with this program.

Cells are run as Jupyter does, one after the other in one namespace, without Jupyter; where nbclient
and a kernel are installed, by them as well. numpy comes with the transformers that the tests of
readers use (scripts/install_dependencies.sh); without it the cells with the tag `numpy` are left out.

Usage: notebook_test.py TROUPE SOURCE_FOLDER
"""

import contextlib
import io
import json
import math
import os
import pathlib
import shutil
import sys
import tempfile
import unittest

PYTHON = str(pathlib.Path(__file__).parents[2] / "python")
READERS = str(pathlib.Path(__file__).parents[2] / "build-dependencies/transformers-5")
sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "support"))
sys.path.insert(0, PYTHON)
sys.path.append(READERS)
from program_runs import HERE, main

try:
    import numpy
except ImportError:
    numpy = None
try:
    import ipykernel
    import nbclient
    import nbformat
except ImportError:
    nbclient = None

EXAMPLES = pathlib.Path(__file__).parents[2] / "docs/examples"
FIRST_RUN = EXAMPLES / "first_run.ipynb"


def cells(path):
    """Numbers and texts of the cells of code that can be run here."""
    for number, cell in enumerate(json.loads(path.read_text())["cells"], 1):
        needs_numpy = "numpy" in cell["metadata"].get("tags", [])
        if cell["cell_type"] == "code" and (numpy is not None or not needs_numpy):
            yield number, "".join(cell["source"])


def setUpModule():
    """The notebook finds the program in PATH, leaves its files in our folder, and shows no window."""
    commands = HERE.folder / "commands"
    commands.mkdir()
    (commands / "troupe").symlink_to(pathlib.Path(HERE.troupe).resolve())
    os.environ["PATH"] = f"{commands}:{os.environ['PATH']}"
    os.environ["PYTHONPATH"] = f"{PYTHON}:{READERS}"
    os.environ["TMPDIR"] = str(HERE.folder)
    os.environ["MPLBACKEND"] = "Agg"
    tempfile.tempdir = None  # asks TMPDIR again


class Notebooks(unittest.TestCase):
    def run_cells(self, path):
        """The names that the notebook leaves, and what it prints."""
        names, printed = {"__name__": "__main__"}, io.StringIO()
        with contextlib.redirect_stdout(printed):
            for number, text in cells(path):
                try:
                    exec(compile(text, f"{path.name}, cell {number}", "exec"), names)
                except Exception as error:
                    raise AssertionError(f"{path.name}, cell {number}: {error}\n{text}") from error
        return names, printed.getvalue()

    def test_the_first_run_shows_what_it_says(self):
        names, printed = self.run_cells(FIRST_RUN)
        self.assertTrue(names["plan"]["fits"])
        self.assertIn("it fits", printed)
        self.assertEqual(list(names["table"]["step"]), list(range(1, 11)))
        self.assertLess(names["table"]["loss"][-1], names["table"]["loss"][0])
        self.assertRegex(printed, r"(?m)^ +10 +\d")  # the last row of the table
        self.assertTrue((names["exported"] / "config.json").exists())
        if numpy is not None:
            router = names["router"]
            self.assertEqual(router.shape, names["checkpoint"].shape("layers.0.w_router"))
            self.assertTrue(0 < math.sqrt((router**2).sum()) < math.inf)

    def test_nothing_that_was_printed_is_kept(self):
        for path in EXAMPLES.glob("*.ipynb"):
            for number, cell in enumerate(json.loads(path.read_text())["cells"], 1):
                if cell["cell_type"] == "code":
                    self.assertEqual((cell["outputs"], cell["execution_count"]), ([], None),
                                     f"{path.name}, cell {number}")

    @unittest.skipIf(nbclient is None or numpy is None, "needs nbclient, ipykernel and numpy")
    def test_jupyter_runs_it(self):
        for path in EXAMPLES.glob("*.ipynb"):
            folder = HERE.folder / path.stem
            folder.mkdir()
            shutil.copy(path, folder)
            notebook = nbformat.read(folder / path.name, as_version=4)
            nbformat.validate(notebook)
            nbclient.NotebookClient(notebook, timeout=100,
                                    resources={"metadata": {"path": str(folder)}}).execute()


if __name__ == "__main__":
    main()
