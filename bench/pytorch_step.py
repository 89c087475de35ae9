"""Times the training step of a Hugging Face model in PyTorch eager mode, for comparison with
`troupe bench` on the same model, batch, dtype and cores or GPU.

Forward, backward, gradient clipping at norm 1 and an AdamW update of a randomly initialised model on
random tokens, in fp32 (or bf16 weights, gradients and moments with --bf16: less state than Troupe,
which keeps master weights, gradients and moments in fp32). No recompute, no torch.compile. Tries the
implementations of experts and of attention that the library has, and prints one JSON line: of the
fastest the median time of a step and tokens per second, and the times of all.

Usage: taskset -c 0,1 python3 bench/pytorch_step.py configs/quickstart.json 8 256 [--bf16]
       python3 bench/pytorch_step.py configs/glm-4.5-air.json 2 4096 --bf16 --device cuda \\
           --micro-batches 4 --layers 2 [--experts N] [--set KEY=VALUE ...]
       needs torch and transformers
"""

import argparse
import gc
import json
import os
import statistics
import sys
import time

import torch
import transformers

WARM_UP_STEPS = 2
STEPS = 5


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="a config.json")
    parser.add_argument("batch", type=int, help="sequences of a micro-batch")
    parser.add_argument("sequence", type=int, help="tokens of a sequence")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--micro-batches", type=int, default=1, help="of a step")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--experts", type=int)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE",
                        help="an entry of the config, in JSON")
    return parser.parse_args()


def load_config(arguments):
    """The configuration and the name of its class."""
    with open(arguments.config, encoding="utf-8") as file:
        fields = json.load(file)
    if arguments.layers is not None:
        fields["num_hidden_layers"] = arguments.layers
        if "layer_types" in fields:
            fields["layer_types"] = fields["layer_types"][:arguments.layers]
    if arguments.experts is not None:
        names = ("n_routed_experts", "num_experts", "num_local_experts")
        fields[next(name for name in names if name in fields)] = arguments.experts
    for setting in arguments.set:
        key, value = setting.split("=", 1)
        fields[key] = json.loads(value)
    architecture = fields.pop("architectures")[0]
    config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    config.use_cache = False
    return config, architecture


def time_steps(arguments, model, vocabulary):
    """The median of the steps' seconds."""
    on_gpu = arguments.device == "cuda"
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=not on_gpu, fused=on_gpu)
    shape = (arguments.batch, arguments.sequence + 1)
    ids = torch.randint(0, vocabulary, shape, device=arguments.device)
    tokens, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    times = []
    for _ in range(WARM_UP_STEPS + STEPS):
        start = time.perf_counter()
        optimizer.zero_grad()
        for _ in range(arguments.micro_batches):
            logits = model(input_ids=tokens).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(),
                                                     labels.flatten())
            (loss / arguments.micro_batches).backward()
            del logits
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if on_gpu:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[WARM_UP_STEPS:])


def main():
    arguments = parse_arguments()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    config, architecture = load_config(arguments)
    dtype = torch.bfloat16 if arguments.bf16 else torch.float32
    results = {}
    # Not "batched_mm", which copies an expert's weights for each token: a step takes minutes.
    for experts in ["grouped_mm", "eager"]:
        for attention in ["sdpa", "eager"]:
            name = f"{experts} experts, {attention} attention"
            model = None
            try:
                torch.manual_seed(1)
                with torch.device(arguments.device):
                    model = getattr(transformers, architecture)._from_config(
                        config, attn_implementation=attention, experts_implementation=experts,
                        dtype=dtype)
                results[name] = time_steps(arguments, model, config.vocab_size)
                print(f"{name}: {results[name]:.3f} s", file=sys.stderr, flush=True)
            except Exception as error:  # an implementation that this version or dtype lacks
                print(f"{name}: {str(error)[:300]}", file=sys.stderr, flush=True)
            del model
            gc.collect()
            if arguments.device == "cuda":
                torch.cuda.empty_cache()
        if arguments.device == "cuda" and results:
            break  # loops over experts only where there are no grouped products
    if not results:
        sys.exit("no implementation could train the model")
    best = min(results, key=results.get)
    tokens = arguments.batch * arguments.sequence * arguments.micro_batches
    print(json.dumps({"torch": torch.__version__, "transformers": transformers.__version__,
                      "threads": torch.get_num_threads(), "step_time_s": results[best],
                      "tokens_per_s": tokens / results[best], "fastest": best, "all": results}))


if __name__ == "__main__":
    main()
