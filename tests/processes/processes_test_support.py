"""What the tests of several processes share: the launcher, who must be gone afterwards, and a
small run. Scripts are called with TROUPE SOURCE_FOLDER PROGRAM_FOLDER LAUNCHER [TEST...]; LAUNCHER
is mpirun, or one that launch.py stands for: torchrun, srun, hand."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
import unittest
import uuid

PROCESSES = 4
FOLDED = ["--tensor-model-parallel-size", 2, "--expert-model-parallel-size", 2]
PIPELINE = ["--pipeline-model-parallel-size", 2, "--tensor-model-parallel-size", 2]

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "support"))
from program_runs import HERE, metrics, run
from rank_runs import make_corpus, train_arguments

# It puts NUL bytes between lines, and warns of networks that it cannot use.
NOISE_OF_OPEN_MPI_5 = re.compile(
    r"^\0*\[.*btl_tcp_proc\.c:.*Unable to find reachable pairing.*\n|\0", re.MULTILINE)


class Launcher:
    """Runs programs on several processes, all of which carry a mark of their own."""

    def __init__(self, command):
        self.name = pathlib.Path(command).name
        self.is_mpi = self.name.startswith("mpi")
        self.killed_status = 9 if self.name == "mpirun.mpich" else 128 + 9
        if self.name == "mpirun.mpich":
            self.command = [command, "-np"]
            self.rank_variable = "PMI_RANK"
        elif self.is_mpi:
            # For test machines: containers with few cores.
            self.command = [command, "--allow-run-as-root", "--oversubscribe", "-np"]
            self.rank_variable = "OMPI_COMM_WORLD_RANK"
        else:
            self.command = [sys.executable, pathlib.Path(__file__).with_name("launch.py"), command]
            self.rank_variable = "SLURM_PROCID" if command == "srun" else "RANK"

    def start(self, processes, program, *arguments, **options):
        environment = {**os.environ, "TROUPE_TEST_MARK": uuid.uuid4().hex}
        process = subprocess.Popen(
            [*self.command, str(processes), str(program), *map(str, arguments)],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=environment, **options)
        process.mark = environment["TROUPE_TEST_MARK"]
        return process

    def run(self, processes, program, *arguments, timeout=60):
        process = self.start(processes, program, *arguments)
        try:
            process.stdout_text, process.stderr_text = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            for pid in marked(process.mark):
                os.kill(pid, signal.SIGKILL)
            process.stdout_text, process.stderr_text = process.communicate()
            process.stderr_text += "\n(did not end)"
        if self.is_mpi:
            process.stderr_text = NOISE_OF_OPEN_MPI_5.sub("", process.stderr_text)
        return process


def marked(mark):
    """The processes that carry the mark in their environment, the launcher among them."""
    found = []
    for folder in pathlib.Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:  # it has ended, or belongs to somebody else
            pass
    return found


def left_behind(mark, seconds=10):
    """Those that still carry the mark after a while in which they may come to their end."""
    deadline = time.monotonic() + seconds
    while (found := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def signals_of(mark):
    """What the processes that carry the mark do about signals, for messages."""
    lines = []
    for pid in marked(mark):
        try:
            folder = pathlib.Path(f"/proc/{pid}")
            name = (folder / "comm").read_text().strip()
            lines.append(f"{pid} {name}: " + " ".join(
                line.replace("\t", "") for line in (folder / "status").read_text().splitlines()
                if line.startswith(("ShdPnd", "SigPnd", "SigBlk", "SigIgn", "SigCgt"))))
        except OSError:  # it has ended
            pass
    return "\n".join(lines)


def numbers(save):
    """What must not depend on how ranks run."""
    return [{name: line[name] for name in ("step", "loss", "grad_norm", "val_loss") if name in line}
            for line in metrics(save)]


def tensors(save, step):
    folder = save / "checkpoints" / f"step_{step:08}"
    return {file.name: file.read_bytes() for file in sorted(folder.glob("*.safetensors"))}


class ProcessesTest(unittest.TestCase):
    def launch(self, status, *arguments, processes=PROCESSES):
        result = HERE.launcher.run(processes, HERE.troupe, *arguments)
        self.assertEqual(result.returncode, status, result.stderr_text)
        self.assertEqual(left_behind(result.mark), [], "processes are left behind")
        return result


def main():
    """As program_runs.main(); HERE also gets the launcher and the folder of test programs."""
    # As in a terminal, whatever has started this: mpirun passes on no signal that it was started with
    # blocked.
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    HERE.troupe, HERE.source = sys.argv[1], pathlib.Path(sys.argv[2])
    HERE.programs, HERE.launcher = pathlib.Path(sys.argv[3]), Launcher(sys.argv[4])
    with tempfile.TemporaryDirectory(prefix="troupe_processes_") as folder:
        HERE.folder = pathlib.Path(folder)
        make_corpus()
        unittest.main(argv=[sys.argv[0], *sys.argv[5:]])
