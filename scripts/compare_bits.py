"""Shows that two builds of Troupe train the same model bit for bit: runs five steps of the
quickstart's model with both in each of 32 configurations (fp32 and bf16; every kind of parallelism,
sharding, dispatcher and pipeline schedule, recompute and offload), and compares all tensors of the
last checkpoint and all metrics but times, rates and bytes. For changes that must change no bit.

Usage: python3 scripts/compare_bits.py OLD NEW DATA_PREFIX
  OLD, NEW     the programs
  DATA_PREFIX  as of `troupe tokenize --output-prefix`, bytes as tokens
Prints a line for each configuration. Status 1 where something differs or a run fails.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

COMMON = ("train --model quickstart --split 95,5,0 --seq-length 64 --micro-batch-size 1 "
          "--global-batch-size 8 --train-iters 5 --lr 1e-3 --num-layers 4 --seed 3 "
          "--log-interval 1 --save-interval 5").split()
EP2 = "--ranks 2 --expert-model-parallel-size 2 --moe-token-dispatcher-type "
PP2 = "--ranks 2 --pipeline-model-parallel-size 2 "
# A step is merged where experts are in one group of ranks and overlap is asked for.
MERGED = EP2 + "alltoall --overlap-moe-expert-parallel-comm"
LAYOUTS = {
    "one rank": "",
    "DP2, distributed optimizer": "--ranks 2 --use-distributed-optimizer",
    "FSDP2": "--ranks 2 --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params",
    "TP2, sequence parallel": "--ranks 2 --tensor-model-parallel-size 2 --sequence-parallel",
    "CP2": "--ranks 2 --context-parallel-size 2",
    "EP2 alltoall": EP2 + "alltoall",
    "EP2 allgather": EP2 + "allgather",
    "PP2": PP2,
    "PP2 interleaved": PP2 + "--num-layers-per-virtual-pipeline-stage 1",
    "PP2 zb-h1": PP2 + "--pipeline-schedule zb-h1",
    "EP2 merged": MERGED,
    "EP2 merged, delayed weight gradients": MERGED + " --delay-wgrad-compute",
    "full recompute": "--recompute-granularity full --recompute-method uniform "
                      "--recompute-num-layers 1",
    "selective recompute": "--recompute-granularity selective "
                           "--recompute-modules core_attn moe_act layernorm",
    "offload": "--fine-grained-activation-offloading --offload-modules qkv_linear moe_act "
               "--min-offloaded-tensor-size 1",
    "TP2 x EP2 x PP2": "--ranks 4 --tensor-model-parallel-size 2 --expert-model-parallel-size 2 "
                       "--expert-tensor-parallel-size 1 --pipeline-model-parallel-size 2",
}
# What depends on the machine, or says which program it was.
UNCOMPARED = ("time", "per_s", "bytes", "tflops", "options", "version", "date", "host", "started")


def train(program, flags, data, folder):
    """None, or how the run failed."""
    command = [program, *COMMON, "--data-path", data, "--save", folder, "--quiet", *flags]
    # The builds may choose other kernels of BLAS, which is none of their bits.
    environment = {"OPENBLAS_CORETYPE": "Haswell", **os.environ}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    return None if done.returncode == 0 else f"status {done.returncode}: {done.stderr[-300:]}"


def tensors(folder):
    """The bytes of each tensor of each file of the checkpoint."""
    found = {}
    for path in sorted(pathlib.Path(folder).glob("checkpoints/step_00000005/*.safetensors")):
        content = path.read_bytes()
        length = int.from_bytes(content[:8], "little")
        for name, entry in json.loads(content[8:8 + length]).items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                found[path.name, name] = content[8 + length + begin:8 + length + end]
    return found


def metrics(folder):
    """The values of all steps, without those that say nothing about the model."""
    lines = [json.loads(line) for line in (pathlib.Path(folder) / "metrics.jsonl").open()]
    return [{name: value for name, value in line.items()
             if not any(word in name for word in UNCOMPARED)}
            for line in lines if "loss" in line or "val_loss" in line]


def compare(old, new, flags, data):
    """What the two runs have in common, and what differs."""
    with tempfile.TemporaryDirectory() as folder:
        folders = []
        for program in (old, new):
            folders.append(f"{folder}/{len(folders)}")
            failure = train(program, flags, data, folders[-1])
            if failure:
                return "", [f"{program}: {failure}"]
        (tensors_a, metrics_a), (tensors_b, metrics_b) = ((tensors(f), metrics(f)) for f in folders)
    different = [f"{name} of {file}" for file, name in sorted(tensors_a.keys() | tensors_b.keys())
                 if tensors_a.get((file, name)) != tensors_b.get((file, name))]
    steps = len(metrics_a)
    if len(metrics_b) != steps:
        different.append(f"{steps} and {len(metrics_b)} lines of metrics")
    for a, b in zip(metrics_a, metrics_b):
        different += [f"{name} of step {a.get('step')}: {a[name]} and {b[name]}"
                      for name in a.keys() & b.keys() if a[name] != b[name]]
    if not tensors_a or not steps:
        different.append("nothing to compare")
    return f"{len(tensors_a)} tensors, {steps} lines of metrics", different


def main():
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    failed = 0
    for dtype in ("fp32", "bf16"):
        for name, flags in LAYOUTS.items():
            words = flags.split() + (["--bf16"] if dtype == "bf16" else [])
            common, different = compare(*sys.argv[1:3], words, sys.argv[3])
            failed += bool(different)
            verdict = "; ".join(different[:3]) + (f"; {len(different)} in all" if different else "")
            print(f"{dtype}, {name}: {verdict or 'the same bits: ' + common}", flush=True)
    print(f"{2 * len(LAYOUTS) - failed} of {2 * len(LAYOUTS)} configurations have the same bits")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
