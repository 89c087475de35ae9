#include "train/foreign_flags.h"

#include <algorithm>

namespace troupe {
namespace {

constexpr std::string_view kKernels =
    "it chooses between kernels of Megatron; here there is one of each. Leave it out.";
constexpr std::string_view kLayers =
    "all layers here are like this already. Leave it out; --model gives the model's shape.";
constexpr std::string_view kProcesses =
    "there are no processes to bring together here. Leave it out.";
constexpr std::string_view kHalf =
    "half precision with loss scaling is not available. Use --compute-dtype bf16 or fp32.";
constexpr std::string_view kAlways = "this is always so here. Leave it out.";
constexpr std::string_view kSamePart =
    "a checkpoint here is always whole: weights, optimizer and position. --finetune loads the "
    "weights alone.";
constexpr std::string_view kSeeMetrics =
    "metrics.jsonl in --save holds what a run measures, and --tensorboard-dir makes curves of it.";

struct ForeignFlag {
  std::string_view name;
  std::string_view answer;
};

constexpr ForeignFlag kForeignFlags[] = {
    {"no-masked-softmax-fusion", kKernels},
    {"no-bias-gelu-fusion", kKernels},
    {"no-bias-swiglu-fusion", kKernels},
    {"no-bias-dropout-fusion", kKernels},
    {"no-rope-fusion", kKernels},
    {"no-persist-layer-norm", kKernels},
    {"no-gradient-accumulation-fusion", kKernels},
    {"cross-entropy-loss-fusion", kKernels},
    {"cross-entropy-fusion-impl", kKernels},
    {"apply-rope-fusion", kKernels},
    {"use-flash-attn", kKernels},
    {"attention-backend", kKernels},
    {"transformer-impl", kKernels},
    {"moe-grouped-gemm", kKernels},
    {"moe-permute-fusion", kKernels},
    {"moe-router-fusion", kKernels},
    {"reset-position-ids",
     "the rotary embedding turns by the place in the sample, whatever the position ids are (in "
     "Megatron, too), so the flag would change nothing. Leave it out."},
    {"reset-attention-mask",
     "attention within single documents is not available in this version: tokens see all that "
     "stand before them in the sample. Leave it out, or train on samples of one document each."},
    {"use-mcore-models", kLayers},
    {"use-legacy-models", kLayers},
    {"distributed-backend", kProcesses},
    {"distributed-timeout-minutes", kProcesses},
    {"local-rank", kProcesses},
    {"lazy-mpu-init", kProcesses},
    {"fp16", kHalf},
    {"loss-scale", kHalf},
    {"initial-loss-scale", kHalf},
    {"min-loss-scale", kHalf},
    {"loss-scale-window", kHalf},
    {"hysteresis", kHalf},
    {"deterministic-mode", kAlways},
    {"accumulate-allreduce-grads-in-fp32", "gradients are always summed in fp32. Leave it out."},
    {"check-for-nan-in-loss-and-grad",
     "a step whose gradients are not finite is skipped; "
     "--max-skipped-steps says when to give up."},
    {"no-check-for-nan-in-loss-and-grad",
     "a step whose gradients are not finite is skipped; "
     "--max-skipped-steps says when to give up."},
    {"no-load-optim", kSamePart},
    {"no-load-rng", kSamePart},
    {"no-save-optim", kSamePart},
    {"no-save-rng", kSamePart},
    {"ckpt-format",
     "checkpoints have one format here (docs/checkpoint_format.md), which every "
     "layout can load. Leave it out."},
    {"dist-ckpt-format",
     "checkpoints have one format here (docs/checkpoint_format.md), which "
     "every layout can load. Leave it out."},
    {"use-checkpoint-args", "give --config DIR/options.toml, which a run writes into its --save."},
    {"num-workers", "samples are read where they are needed, without workers. Leave it out."},
    {"dataloader-type",
     "samples are always read in Megatron's shuffled order (docs/data_format.md). Leave it out."},
    {"data-cache-path", "there is no cache: the order of samples is computed. Leave it out."},
    {"no-mmap-bin-files", "data sets are always mapped into memory. Leave it out."},
    {"tensorboard-log-interval", "--log-interval counts for TensorBoard, too."},
    {"log-throughput", kSeeMetrics},
    {"log-timers-to-tensorboard", kSeeMetrics},
    {"log-batch-size-to-tensorboard", kSeeMetrics},
    {"log-validation-ppl-to-tensorboard", kSeeMetrics},
    {"log-memory-to-tensorboard", kSeeMetrics},
    {"timing-log-level", "`troupe bench` measures the operations of a step."},
    {"profile", "`troupe bench` measures the operations of a step."},
    {"optimizer", "there is one optimizer here, AdamW (Megatron's adam). Leave it out."},
    {"no-async-tensor-model-parallel-allreduce", kProcesses},
    {"yaml-cfg", "give --config FILE with a TOML file (docs/options.md)."},
};

}  // namespace

std::string_view answer_to_foreign_flag(std::string_view name) {
  const auto same = [](char a, char b) { return (a == '_' ? '-' : a) == (b == '_' ? '-' : b); };
  for (const ForeignFlag& flag : kForeignFlags) {
    if (std::equal(flag.name.begin(), flag.name.end(), name.begin(), name.end(), same)) {
      return flag.answer;
    }
  }
  return {};
}

}  // namespace troupe
