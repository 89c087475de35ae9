"""Times the training step of a Hugging Face model in PyTorch eager mode, for comparison with
`troupe bench` on the same model, batch, dtype and cores.

Forward, backward, gradient clipping at norm 1 and an AdamW update of a randomly initialised model on
random tokens, in fp32 (or bf16 weights with --bf16). Prints one JSON line: the median time of a step
and tokens per second.

Usage: taskset -c 0,1 python3 bench/pytorch_step.py configs/quickstart.json 8 256 [--bf16]
       needs torch and transformers
"""

import json
import os
import statistics
import sys
import time

import torch
import transformers


def main():
    path, batch, sequence = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    fields = json.load(open(path))
    architecture = fields.pop("architectures")[0]
    config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    config.use_cache = False
    torch.manual_seed(1)
    dtype = torch.bfloat16 if "--bf16" in sys.argv else torch.float32
    results = {}
    # Not "batched_mm", which copies an expert's weights for each token: a step takes minutes.
    for experts in ["eager", "grouped_mm"]:
        for attention in ["sdpa", "eager"]:
            try:
                model = getattr(transformers, architecture)._from_config(
                    config, attn_implementation=attention, experts_implementation=experts,
                    dtype=dtype)
                model.train()
                optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
                ids = torch.randint(0, config.vocab_size, (batch, sequence + 1))
                tokens, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

                def step():
                    optimizer.zero_grad()
                    logits = model(input_ids=tokens).logits
                    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(),
                                                             labels.flatten())
                    loss.backward()
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()

                step()
                step()
                times = []
                for _ in range(5):
                    start = time.perf_counter()
                    step()
                    times.append(time.perf_counter() - start)
                results[f"{experts} experts, {attention} attention"] = statistics.median(times)
                print(f"{experts}, {attention}: {statistics.median(times):.3f} s", file=sys.stderr,
                      flush=True)
            except Exception as error:  # an implementation that this version or dtype lacks
                print(f"{experts}, {attention}: {error}", file=sys.stderr)
    best = min(results, key=results.get)
    print(json.dumps({"torch": torch.__version__, "transformers": transformers.__version__,
                      "threads": torch.get_num_threads(), "step_time_s": results[best],
                      "tokens_per_s": batch * sequence / results[best], "fastest": best,
                      "all": results}))


if __name__ == "__main__":
    main()
