#!/usr/bin/env python3
"""Stands for launchers that know nothing of MPI: starts processes with the variables that these
set, and ends all when one fails, as they do, but only after a while in which those that are left
may say what they miss.

Usage: launch.py torchrun|srun|hand PROCESSES PROGRAM [ARG...]

torchrun holds the port that it announces, for a service of its own. Signals are passed on. The
status is that of the first process that failed; 128 and the signal if one ended it, which counts
before others of the same moment.
"""

import os
import signal
import socket
import subprocess
import sys
import time
import uuid

POLL_S = 0.05
ALONE_S = 1.5  # in which the others may end by themselves, when one has failed
GRACE_S = 1.5  # from asking them to end to killing them


def common_variables(kind, processes, port):
    if kind == "srun":
        return {"SLURM_JOB_ID": str(uuid.uuid4().int % 10**9), "SLURM_STEP_ID": "0",
                "SLURM_STEP_NUM_TASKS": str(processes), "SLURM_STEP_NUM_NODES": "1",
                "SLURM_STEP_NODELIST": "localhost"}
    found = {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes),
             "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    if kind == "torchrun":
        found |= {"TORCHELASTIC_RUN_ID": uuid.uuid4().hex, "TORCHELASTIC_RESTART_COUNT": "0",
                  "TORCHELASTIC_USE_AGENT_STORE": "True", "GROUP_RANK": "0"}
    return found


def rank_variables(kind, rank):
    names = ("SLURM_PROCID", "SLURM_LOCALID") if kind == "srun" else ("RANK", "LOCAL_RANK")
    return {name: str(rank) for name in names}


def main():
    kind, processes, command = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
    agent = socket.create_server(("localhost", 0))
    common = common_variables(kind, processes, agent.getsockname()[1])
    if kind != "torchrun":
        agent.close()
    # The mark of what was started, for tests that find all of a launcher's processes.
    ranks = [subprocess.Popen(command, env={**os.environ, **common, **rank_variables(kind, rank)})
             for rank in range(processes)]

    def pass_on(number, _):
        for rank in ranks:
            rank.send_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, pass_on)
    status, failed_at, asked = 0, None, False
    while any(rank.poll() is None for rank in ranks):
        failed = [rank.returncode for rank in ranks if rank.returncode]
        if failed and failed_at is None:
            status, failed_at = min(failed), time.monotonic()
        since = 0 if failed_at is None else time.monotonic() - failed_at
        if since > ALONE_S and not asked:
            asked = True
            for rank in ranks:
                rank.terminate()
        if since > ALONE_S + GRACE_S:
            for rank in ranks:
                rank.kill()
        time.sleep(POLL_S)
    status = status or min([rank.returncode for rank in ranks if rank.returncode], default=0)
    sys.exit(status if status >= 0 else 128 - status)


if __name__ == "__main__":
    main()
