#include "options/foreign_flags.h"

#include <algorithm>
#include <fmt/format.h>
#include <optional>

#include "base/error.h"
#include "base/text.h"
#include "options/read_number.h"

namespace troupe {
namespace {

constexpr std::string_view kKernels =
    "it chooses between kernels of Megatron; here there is one of each.";
constexpr std::string_view kSpeed =
    "it makes Megatron faster and changes no number; here it has no effect.";
constexpr std::string_view kSavesMemory =
    "it saves memory in Megatron and changes no number; here activations and states stay where "
    "they are (`troupe plan` says what they take).";
constexpr std::string_view kStash =
    "nothing of the stash goes to the host: a step for which it is too small runs again in rounds "
    "of tokens (docs/memory.md).";
constexpr std::string_view kTransport =
    "it chooses how Megatron moves tokens between ranks; here there is one way.";
constexpr std::string_view kProcesses =
    "it sets up Megatron's processes; here ranks are threads, or what mpirun, srun or torchrun "
    "starts.";
constexpr std::string_view kAlways = "this is always so here.";
constexpr std::string_view kRope = "positions are always rotary here.";
constexpr std::string_view kRopeKind = "this kind of rotary embedding is not available.";
constexpr std::string_view kFp32State = "master weights are kept in fp32.";
constexpr std::string_view kNotFinite =
    "a step whose gradients are not finite is skipped; --max-skipped-steps says when to give up.";
constexpr std::string_view kFormat =
    "checkpoints have one format (docs/checkpoint_format.md), which every layout can load.";
constexpr std::string_view kNoAsyncSave =
    "saving in the background is not available: training waits until a checkpoint is complete.";
constexpr std::string_view kSeeMetrics =
    "metrics.jsonl in --save holds what a run measures, and --tensorboard-dir makes curves of it.";
constexpr std::string_view kSeeBench =
    "`troupe bench` measures the operations of a step, and --profile writes timelines.";
constexpr std::string_view kNotMeasured = "this is not measured here.";
constexpr std::string_view kStraggler =
    "slow ranks are not looked for while a run goes on; --profile with --profile-ranks shows for "
    "each rank how long it waits for the others.";
constexpr std::string_view kNoService =
    "runs report to files alone (metrics.jsonl, --tensorboard-dir).";
constexpr std::string_view kImport =
    "runs report to files alone; scripts/import_metrics.py sends a run's metrics.jsonl to Weights "
    "& "
    "Biases or MLflow (docs/reports.md), and troupe report draws it.";
constexpr std::string_view kNoCollector = "there is no garbage collector here.";
constexpr std::string_view kMtp =
    "each depth of multi-token prediction goes on from the one before, and all gradients reach the "
    "model.";
constexpr std::string_view kAttention = "this kind of attention is not available in this version.";
constexpr std::string_view kRotation =
    "a rotation of the indexer's queries and keys together changes none of its scores.";
constexpr std::string_view kShapeOf = "models of this shape are not available in this version.";
constexpr std::string_view kOtherModels =
    "Troupe trains decoder-only language models; leave it out.";
constexpr std::string_view kRouting =
    "this way of routing is not available (docs/routing.md lists those that are).";
constexpr std::string_view kPartition =
    "say what each stage holds with --pipeline-model-parallel-layout.";
constexpr std::string_view kSharding =
    "say --use-megatron-fsdp: parameters, gradients and optimizer state are sharded.";
constexpr std::string_view kLayerWise =
    "say --optimizer dist_muon: each matrix is updated by one data-parallel rank.";
constexpr std::string_view kRestart =
    "start the same command again: with --load and --save of one folder it goes on from its newest "
    "checkpoint.";
constexpr std::string_view kTokenizerFiles =
    "special tokens are those of the tokenizer's file; TikTokenizer has Megatron's own.";
constexpr ForeignFlag refused(std::string_view name, std::string_view reason) {
  return {.name = name, .reason = reason};
}
constexpr ForeignFlag accepted(std::string_view name, std::string_view reason) {
  return {.name = name, .accepted = true, .reason = reason};
}
// Takes one value: one of `only`, or any where that is empty.
constexpr ForeignFlag accepted_value(std::string_view name, std::string_view only,
                                     std::string_view reason) {
  return {
      .name = name, .accepted = true, .values = ForeignValues::one, .only = only, .reason = reason};
}
// Takes one of the values that Megatron has for it.
constexpr ForeignFlag accepted_choice(std::string_view name, std::string_view choices,
                                      std::string_view reason) {
  return {.name = name,
          .accepted = true,
          .values = ForeignValues::one,
          .choices = choices,
          .reason = reason};
}
constexpr ForeignFlag accepted_values(std::string_view name, std::string_view reason) {
  return {.name = name, .accepted = true, .values = ForeignValues::many, .reason = reason};
}

constexpr ForeignFlag kForeignFlags[] = {
    // Model.
    accepted("use-rotary-position-embeddings", kRope),
    accepted("no-position-embedding", kRope),
    refused("rotary-interleaved",
            "pairs are halves of a head, and neighbours with --multi-latent-attention, as there."),
    refused("no-rope-freq", kRopeKind),
    refused("mrope-section", kRopeKind),
    accepted("use-mcore-models", "all layers are of this kind."),
    refused("spec", "layers are described by flags here, or by a config.json (--model)."),
    refused("use-legacy-models", "there are no legacy models here."),
    refused("apply-residual-connection-post-layernorm", kShapeOf),
    refused("heterogeneous-layers-config-path", kShapeOf),
    refused("hybrid-layer-pattern", kShapeOf),
    refused("use-mup", kShapeOf),
    refused("enable-gpt-oss",
            "flags say what the model is: here --position-embedding-type yarn "
            "--rotary-scaling-factor 32 --yarn-original-max-position-embeddings 131072 "
            "--no-yarn-correction-range-round-to-int, or --model with a config.json."),
    refused("moe-latent-size", kShapeOf),
    refused("mtp-detach-heads", kMtp),
    refused("mtp-hsm", kMtp),
    refused("softmax-scale", kAttention),
    refused("dsa-indexer-rope-interleaved", kAttention),
    refused("no-dsa-indexer-scoring-relu", kAttention),
    refused("disable-dsa-indexer-scoring-relu", kAttention),
    accepted_value("dsa-indexer-topk-freq", "1", "each layer chooses its own keys."),
    accepted_value("dsa-indexer-skip-topk-offset", "0", "each layer chooses its own keys."),
    accepted("no-dsa-indexer-rotate-activation", kRotation),
    accepted("disable-dsa-indexer-rotate-activation", kRotation),
    accepted_value("dsa-kernel-backend", "", kKernels),
    accepted("dsa-indexer-k-norm-fp32", "norms compute in fp32 here."),
    refused("qk-clip", kAttention),
    refused("encoder-num-layers", kOtherModels),
    refused("encoder-seq-length", kOtherModels),
    refused("decoder-seq-length", kOtherModels),
    refused("decoder-num-layers", kOtherModels),
    refused("bert-no-binary-head", kOtherModels),
    refused("mask-prob", kOtherModels),
    refused("padded-vocab-size",
            "--vocab-size and --make-vocab-size-divisible-by give the vocabulary."),
    refused("pad-vocab-size",
            "--vocab-size and --make-vocab-size-divisible-by give the vocabulary."),
    accepted_value("vocab-extra-ids", "0", "the tokenizer's file says which ids there are."),
    refused("data-parallel-random-init", "replicas always begin with the same weights."),
    accepted("use-cpu-initialization",
             "initial weights depend on --seed alone, not on the layout."),
    accepted("init-model-with-meta-device",
             "initial weights depend on --seed alone, not on the layout."),

    // Kernels.
    accepted("no-masked-softmax-fusion", kKernels),
    accepted("no-bias-gelu-fusion", kKernels),
    accepted("no-bias-swiglu-fusion", kKernels),
    accepted("no-bias-dropout-fusion", kKernels),
    accepted("no-rope-fusion", kKernels),
    accepted("apply-rope-fusion", kKernels),
    accepted("mla-down-proj-fusion", kKernels),
    accepted("no-persist-layer-norm", kKernels),
    accepted("no-gradient-accumulation-fusion", kKernels),
    accepted("cross-entropy-loss-fusion", kKernels),
    accepted("use-flash-attn", kKernels),
    accepted("moe-grouped-gemm", kKernels),
    accepted("moe-use-legacy-grouped-gemm", kKernels),
    accepted("moe-permute-fusion", kKernels),
    accepted("moe-router-fusion", kKernels),
    accepted("moe-use-grouped-tensor", kKernels),
    accepted("moe-single-grouped-weight", kKernels),
    accepted("moe-single-grouped-bias", kKernels),
    accepted("use-transformer-engine-op-fuser", kKernels),
    accepted("use-fused-weighted-squared-relu", kKernels),
    accepted("use-te-activation-func", kKernels),
    accepted("disable-jit-fuser", kKernels),
    accepted("export-force-local-attention", kKernels),
    accepted("disable-bf16-reduced-precision-matmul",
             "products of bf16 numbers are always summed in fp32."),
    accepted_choice("cross-entropy-fusion-impl", "native te", kKernels),
    accepted_choice("attention-backend", "flash fused unfused local auto", kKernels),
    accepted_choice("transformer-impl", "local transformer_engine inference_optimized", kKernels),
    accepted("attention-softmax-in-fp32", kAlways),
    accepted("deterministic-mode", kAlways),
    accepted("no-query-key-layer-scaling", kAlways),
    refused("apply-query-key-layer-scaling",
            "it rescales logits for half precision, which is not available. Leave it out."),

    // Mixture of Experts.
    accepted("moe-enable-deepep", kTransport),
    accepted("moe-permute-fusion-into-hybridep", kTransport),
    accepted("moe-ncclep-zero-copy", kTransport),
    accepted_choice("moe-flex-dispatcher-backend", "deepep hybridep ncclep", kTransport),
    accepted("moe-per-layer-logging", kSeeMetrics),
    accepted_value("moe-paged-stash-buffer-size-factor-cpu", "", kStash),
    refused("moe-enable-routing-replay", kRouting),
    refused("moe-apply-probs-on-input", kRouting),
    refused("moe-router-topk-limited-devices",
            "use --moe-router-num-groups and --moe-router-group-topk."),
    refused("moe-token-dropping", "use --moe-expert-capacity-factor."),
    refused("moe-extended-tp", "use --expert-tensor-parallel-size."),

    // Precision.
    accepted("reuse-grad-buf-for-mxfp8-param-ag",
             "gathered codes lie in memory that the plan shares among all tensors."),
    accepted_value("fp8-interval", "", "scales follow every step (in Megatron, too)."),
    accepted("tp-only-amax-red",
             "largest elements are those of all ranks that share a tensor, exchanged once a step."),
    refused("fp4-param-gather",
            "weights of products in 4 bits keep their bf16 copy. Leave it out."),
    accepted("accumulate-allreduce-grads-in-fp32", "gradients are always summed in fp32."),
    refused("fp32-residual-connection",
            "the residual stream has the type of --compute-dtype. Use fp32 for all of it."),
    refused("fp16-lm-cross-entropy", "the loss is always computed in fp32. Leave it out."),
    accepted_value("main-params-dtype", "fp32", kFp32State),

    // Ranks and communication.
    accepted_choice("distributed-backend", "nccl gloo", kProcesses),
    accepted_value("distributed-timeout-minutes", "", kProcesses),
    accepted_value("local-rank", "", kProcesses),
    accepted_value("lazy-mpu-init", "", kProcesses),
    accepted_value("nccl-communicator-config-path", "", kProcesses),
    accepted_values("high-priority-stream-groups", kProcesses),
    accepted("use-sharp", kProcesses),
    accepted("use-nccl-ub", kProcesses),
    accepted("disable-symmetric-registration", kProcesses),
    accepted("enable-gloo-process-groups", kProcesses),
    accepted("disable-gloo-process-groups", kProcesses),
    accepted("create-all-gather-group", kProcesses),
    accepted("no-async-tensor-model-parallel-allreduce", kSpeed),
    accepted("no-overlap-p2p-communication", kSpeed),
    accepted("overlap-p2p-communication-warmup-flush", kSpeed),
    accepted("tp-comm-overlap", kSpeed),
    accepted("tp-comm-overlap-rs-dgrad", kSpeed),
    accepted("overlap-param-gather-with-optimizer-step", kSpeed),
    accepted("no-align-param-gather", kSpeed),
    accepted("fsdp-double-buffer", kSpeed),
    accepted("fsdp-manual-registration", kSpeed),
    accepted("ddp-pad-buckets-for-high-nccl-busbw", kSpeed),
    accepted("ddp-average-in-collective", kSpeed),
    accepted("defer-embedding-wgrad-compute", kSpeed),
    accepted("high-priority-a2a-comm-stream", kSpeed),
    accepted("enable-cuda-graph", kSpeed),
    accepted("external-cuda-graph", kSpeed),
    accepted("te-rng-tracker", kSpeed),
    accepted("optimizer-cuda-graph", kSpeed),
    accepted_value("tp-comm-overlap-cfg", "", kSpeed),
    accepted_value("tp-comm-bootstrap-backend", "", kSpeed),
    accepted_value("ddp-num-buckets", "", kSpeed),
    accepted_value("wgrad-deferral-limit", "", kSpeed),
    accepted_value("cuda-graph-warmup-steps", "", kSpeed),
    accepted_values("cuda-graph-scope", kSpeed),
    accepted_values("cuda-graph-modules", kSpeed),
    refused("pipeline-model-parallel-split-rank", kPartition),
    refused("use-torch-fsdp2", kSharding),
    refused("use-custom-fsdp", kSharding),
    refused("hierarchical-context-parallel-sizes",
            "say --context-parallel-size and --cp-comm-type."),
    refused("hybrid-context-parallel", "say --context-parallel-size and --cp-comm-type."),

    // Memory.
    accepted("distribute-saved-activations", kSavesMemory),
    accepted("delay-offload-until-cuda-graph", kSavesMemory),
    accepted("overlap-cpu-optimizer-d2h-h2d", kSavesMemory),
    accepted("no-pin-cpu-grads", kSavesMemory),
    accepted("offload-optimizer-states", kSavesMemory),
    accepted("no-pin-cpu-params", kSavesMemory),
    accepted_value("cpu-offloading-num-layers", "", kSavesMemory),
    accepted_value("delta-offload-bytes-across-pp-ranks", "", kSavesMemory),
    accepted_value("fine-grained-offloading-max-inflight-offloads", "", kSavesMemory),
    accepted_value("empty-unused-memory-level", "", kSavesMemory),

    // Data.
    accepted_value("num-workers", "", "samples are read where they are needed, without workers."),
    accepted_value("num-dataset-builder-threads", "",
                   "samples are read where they are needed, without workers."),
    accepted_value("dataloader-type", "single",
                   "samples are always read in Megatron's shuffled order (docs/data_format.md)."),
    accepted_value("data-cache-path", "", "there is no cache: the order of samples is computed."),
    accepted("no-mmap-bin-files", "data sets are always mapped into memory."),
    accepted("defer-npy-index-mmap", "data sets are always mapped into memory."),
    accepted("no-create-attention-mask-in-dataloader",
             "attention is causal without a mask in memory."),
    accepted("reset-position-ids",
             "the rotary embedding turns by the place in the sample, whatever the position ids are "
             "(in Megatron, too)."),
    refused("dataloader-inter-document-masking",
            "give --reset-attention-mask: it keeps attention within documents."),
    accepted_value("mid-level-dataset-surplus", "",
                   "no data set is built in advance, and every sample that a run needs exists."),
    refused("fim-data", "training on parts of documents in another order is not available."),
    refused(
        "sft",
        "fine-tuning on conversations, where only the answers count in the loss, is not available "
        "in this version."),
    refused("special-tokens", kTokenizerFiles),
    refused("tiktoken-special-tokens", kTokenizerFiles),
    accepted("trust-remote-code", "tokenizers are files here, and no code is run."),

    // Training.
    refused("use-layer-wise-distributed-optimizer", kLayerWise),
    accepted_value("muon-scalar-optimizer", "adam", "AdamW updates what Muon does not."),
    accepted("muon-use-syrk", kSpeed),
    accepted("check-for-nan-in-loss-and-grad", kNotFinite),
    accepted("no-check-for-nan-in-loss-and-grad", kNotFinite),
    refused("check-for-spiky-loss", kNotFinite),
    accepted("manual-gc", kNoCollector),
    accepted("no-manual-gc-eval", kNoCollector),
    accepted_value("manual-gc-interval", "", kNoCollector),
    accepted_value("rerun-mode", "disabled", "steps are not run twice."),
    refused("validation-set-names", "write NAME=PREFIX in --valid-data-path."),
    refused("skip-train", "use `troupe eval`."),
    refused("full-validation", "use `troupe eval`."),
    accepted("enable-experimental", "nothing here is marked as experimental."),

    // Checkpoints.
    accepted_choice("ckpt-format", "torch torch_dist torch_dcp fsdp_dtensor zarr", kFormat),
    accepted_choice("dist-ckpt-format", "torch torch_dist torch_dcp fsdp_dtensor zarr", kFormat),
    accepted_value("dist-ckpt-strictness", "", kFormat),
    accepted("auto-detect-ckpt-format", kFormat),
    accepted("use-dist-ckpt", kFormat),
    accepted("ckpt-fully-parallel-save", kFormat),
    accepted("no-ckpt-fully-parallel-save", kFormat),
    accepted("ckpt-fully-parallel-load", kFormat),
    accepted("ckpt-assume-constant-structure", kFormat),
    accepted("dist-ckpt-optim-fully-reshardable", kFormat),
    accepted("distrib-optim-fully-reshardable-mem-efficient", kFormat),
    accepted("async-save", kNoAsyncSave),
    accepted("use-persistent-ckpt-worker", kNoAsyncSave),
    refused("use-mp-args-from-checkpoint-args",
            "any layout loads any checkpoint; give the layout's flags, or --config "
            "DIR/options.toml, which a run writes into its --save."),
    refused("non-persistent-save-interval", "use --save-interval with --keep-checkpoints."),
    refused("non-persistent-ckpt-type", "use --save-interval with --keep-checkpoints."),
    refused("adlr-autoresume", kRestart),
    refused("enable-ft-package", kRestart),
    refused("inprocess-restart", kRestart),

    // Reports.
    accepted_value("tensorboard-log-interval", "", "--log-interval counts for TensorBoard, too."),
    accepted("log-throughput", kSeeMetrics),
    accepted("log-batch-size-to-tensorboard", kSeeMetrics),
    accepted("log-validation-ppl-to-tensorboard", kSeeMetrics),
    accepted("log-learning-rate-to-tensorboard", kSeeMetrics),
    accepted("no-log-learning-rate-to-tensorboard", kSeeMetrics),
    accepted("log-loss-scale-to-tensorboard", kSeeMetrics),
    accepted("no-log-loss-scale-to-tensorboard", kSeeMetrics),
    accepted("log-world-size-to-tensorboard", kSeeMetrics),
    accepted("log-progress", kSeeMetrics),
    accepted_value("tensorboard-queue-size", "", kSeeMetrics),
    accepted_value("log-memory-interval", "", kSeeMetrics),
    accepted("log-straggler", kStraggler),
    accepted_value("straggler-ctrlr-port", "", kStraggler),
    accepted_value("straggler-minmax-count", "", kStraggler),
    accepted("disable-straggler-on-startup", kStraggler),
    accepted("log-energy", kNotMeasured),
    accepted("log-max-attention-logit", kNotMeasured),
    accepted("use-pytorch-profiler", kSeeBench),
    accepted("use-nsys-profiler", kSeeBench),
    accepted("record-memory-history", kSeeBench),
    accepted("barrier-with-L1-time", kSeeBench),
    accepted("no-barrier-with-level-1-timing", kSeeBench),
    accepted_choice("timing-log-level", "0 1 2", kSeeBench),
    accepted_choice("timing-log-option", "max minmax all", kSeeBench),
    accepted_value("wandb-project", "", kImport),
    accepted_value("wandb-entity", "", kImport),
    accepted_value("wandb-exp-name", "", kImport),
    accepted_value("wandb-save-dir", "", kImport),
    accepted_value("logging-level", "", kNoService),
    accepted("no-one-logger", kNoService),
    accepted("otel-enabled", kNoService),
    refused("yaml-cfg", "give --config FILE with a TOML file (docs/options.md)."),
};

bool same_name(std::string_view left, std::string_view right) {
  const auto same = [](char a, char b) { return (a == '_' ? '-' : a) == (b == '_' ? '-' : b); };
  return std::equal(left.begin(), left.end(), right.begin(), right.end(), same);
}

// "1" is "1.0".
bool same_value(std::string_view left, std::string_view right) {
  const std::optional<double> number = read_number<double>(left);
  return left == right || (number && number == read_number<double>(right));
}

bool is_among(std::string_view value, std::string_view words) {
  while (!words.empty()) {
    const size_t end = std::min(words.find(' '), words.size());
    if (same_value(value, words.substr(0, end))) return true;
    words.remove_prefix(std::min(end + 1, words.size()));
  }
  return false;
}

}  // namespace

std::span<const ForeignFlag> foreign_flags() {
  return kForeignFlags;
}

const ForeignFlag* find_foreign_flag(std::string_view name) {
  for (const ForeignFlag& flag : kForeignFlags) {
    if (same_name(flag.name, name)) return &flag;
  }
  return nullptr;
}

bool takes_foreign_flags(Command command) {
  return command == Command::train || command == Command::inspect || command == Command::plan ||
         command == Command::bench;
}

namespace {

// "a, b, c" of "a b c".
std::string with_commas(std::string_view words) {
  std::string text;
  for (const char c : words) text += c == ' ' ? std::string(", ") : std::string(1, c);
  return text;
}

}  // namespace

std::string accept_foreign_flag(const ForeignFlag& flag, std::string_view value) {
  if (!flag.accepted) throw_bad_request(fmt::format("--{}: {}", flag.name, flag.reason));
  if (!flag.only.empty() && !is_among(value, flag.only)) {
    throw_bad_request(fmt::format("--{} {}: only {} is available: {}", flag.name, printable(value),
                                  flag.only, flag.reason));
  }
  if (!flag.choices.empty() && !is_among(value, flag.choices)) {
    throw_bad_request(fmt::format("--{} {}: Megatron's values are {}.", flag.name, printable(value),
                                  with_commas(flag.choices)));
  }
  return fmt::format("--{}{}{} is accepted and changes nothing: {}", flag.name,
                     value.empty() ? "" : " ", printable(value), flag.reason);
}

}  // namespace troupe
