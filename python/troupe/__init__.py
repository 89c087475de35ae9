"""Troupe from Python: plan, train, look at runs and read checkpoints.

    import troupe

    print(troupe.plan(model="quickstart", seq_length=256)["bytes"]["total"])
    for metrics in troupe.train(model="quickstart", data_path="runs/data", lr=3e-3,
                                train_iters=100, seq_length=256, save="runs/first"):
        print(metrics["step"], metrics.get("loss"))
    run = troupe.Run("runs/first")
    losses = run.columns()["loss"]
    weights = run.checkpoint()
    print(weights["embedding"].shape)

Every function runs the program `troupe` as a process of its own and reads what it writes; numbers are
computed by it alone. Options are those of the command line (`troupe COMMAND --help`), with
underscores: --train-iters 10 is train_iters=10, a flag without a value is True, a flag with several
values is a list. numpy is needed to read checkpoints only.
"""

from .checkpoint import Checkpoint, CheckpointError, load_checkpoint
from .program import (TroupeError, convert, inspect, plan, program_path, run_command, tokenize,
                      train, verify)
from .run import Run

__all__ = ["Checkpoint", "CheckpointError", "Run", "TroupeError", "convert", "inspect",
           "load_checkpoint", "plan", "program_path", "run_command", "tokenize", "train", "verify"]
