// What the operations of training steps say of themselves: attributes, flops and bytes, what they
// send to others of their group, the memory and the kernels that they choose. plan, bench and
// inspect report it, overlap and memory plans go by it, and no trained number shows that one is
// wrong. The golden text has a line for the first operation of each kind in each layout, to be read
// with the formulas of src/ops.
#include <algorithm>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "ops/products/shift_ids/shift_ids.h"
#include "ops/registry.h"
#include "plan/plan_test_support.h"
#include "program/golden.h"
#include "program/op_spec.h"

namespace troupe {
namespace {

constexpr const char* kCommon =
    "--seq-length 16 --max-position-embeddings 16 --global-batch-size 4 ";
constexpr const char* kSteps[] = {
    "--model mixtral-tiny",
    "--model olmoe-tiny --bf16",
    "--model qwen2-moe-tiny --moe-z-loss-coeff 0.1 --moe-input-jitter-eps 0.1 "
    "--hidden-dropout 0.1 --attention-dropout 0.1",
    "--num-layers 1 --hidden-size 32 --num-attention-heads 4 --num-experts 4 --ffn-hidden-size 48 "
    "--vocab-size 64 --moe-router-load-balancing-type sinkhorn --moe-router-topk 1 "
    "--add-bias-linear",
    // Everything that has an attribute of its own, on sizes of which no two are the same.
    "--num-layers 2 --hidden-size 24 --num-attention-heads 6 --num-query-groups 2 --kv-channels 10 "
    "--num-experts 12 --moe-ffn-hidden-size 14 --vocab-size 77 --normalization LayerNorm "
    "--apply-layernorm-1p --qk-layernorm --activation geglu-tanh --add-qkv-bias "
    "--moe-router-topk 3 --moe-router-num-groups 3 --moe-router-group-topk 2 "
    "--moe-expert-capacity-factor 1.5 --moe-token-drop-policy position --micro-batch-size 2 "
    "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.1 "
    "--log-num-zeros-in-grad "
    "--moe-shared-expert-intermediate-size 20 --moe-shared-expert-gate --log-params-norm "
    "--clip-grad 0.5 --grad-norm-skip-threshold 7",
    "--num-layers 1 --hidden-size 24 --num-attention-heads 6 --kv-channels 10 --vocab-size 77 "
    "--ffn-hidden-size 34 --activation relu --qk-l2-norm --embedding-init-method-std 0.1 "
    "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype fp8 --bf16 "
    "--reset-attention-mask --disable-bias-linear",
    "--num-layers 1 --hidden-size 24 --num-attention-heads 6 --kv-channels 10 --vocab-size 77 "
    "--ffn-hidden-size 34 --activation squared-relu --optimizer muon --muon-coefficient-type "
    "simple "
    "--muon-num-ns-steps 3 --muon-fp32-matmul-prec high --muon-nesterov --disable-bias-linear",
    "--num-layers 1 --hidden-size 24 --num-attention-heads 6 --kv-channels 10 --vocab-size 77 "
    "--ffn-hidden-size 34 --activation quick-geglu --activation-func-clamp-value 7 "
    "--glu-linear-offset 1 --disable-bias-linear --compute-dtype fp64",
    "--model mixtral-tiny --ranks 4 --use-distributed-optimizer --bf16 --grad-reduce-in-bf16 "
    "--num-distributed-optimizer-instances 2 --expert-model-parallel-size 2 --overlap-grad-reduce "
    "--overlap-param-gather --moe-router-padding-for-quantization",
    "--model qwen2-moe-tiny --ranks 4 --context-parallel-size 2 --tensor-model-parallel-size 2 "
    "--attention-dropout 0.1 --micro-batch-size 2 --moe-router-force-biased 0.5",
    "--model mixtral-tiny --ranks 4 --tensor-model-parallel-size 2 --expert-model-parallel-size 2 "
    "--moe-expert-capacity-factor 1 --moe-token-drop-policy position --moe-token-dispatcher-type "
    "flex --expert-tensor-parallel-size 1 --moe-router-dtype fp64",
    "--model mixtral-tiny --ranks 4 --use-megatron-fsdp --bf16 --expert-model-parallel-size 2 "
    "--moe-pad-expert-input-to-capacity --moe-expert-capacity-factor 2 --optimizer-cpu-offload",
    "--model mixtral-tiny --optimizer muon",
    "--num-layers 1 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 48 --vocab-size 64 "
    "--add-bias-linear --ranks 2 --tensor-model-parallel-size 2",
    "--model olmoe-tiny --ranks 2 --tensor-model-parallel-size 2 --calculate-per-token-loss",
    "--model mixtral-tiny --moe-expert-capacity-factor 1 --ranks 2 --expert-model-parallel-size 2",
    "--model mixtral-tiny --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--loss-chunk-tokens 8",
    "--model mixtral-tiny --moe-router-force-load-balancing",
    "--model mixtral-tiny --ranks 4 --tensor-model-parallel-size 2 --sequence-parallel "
    "--expert-model-parallel-size 2 --expert-tensor-parallel-size 1 "
    "--moe-token-dispatcher-type alltoall",
    "--model mixtral-tiny --ranks 4 --tensor-model-parallel-size 2 --expert-model-parallel-size 2",
    "--model mixtral-tiny --ranks 4 --expert-model-parallel-size 4 "
    "--moe-token-dispatcher-type flex",
    "--model mixtral-tiny --ranks 4 --use-megatron-fsdp",
    "--model mixtral-tiny --ranks 4 --use-distributed-optimizer",
    "--model mixtral-tiny --ranks 2 --context-parallel-size 2 --cp-comm-type p2p",
    "--model mixtral-tiny --ranks 2 --context-parallel-size 2 --cp-comm-type allgather",
    "--model mixtral-tiny --ranks 2 --context-parallel-size 2 --cp-comm-type a2a",
    "--model mixtral-tiny --ranks 2 --pipeline-model-parallel-size 2",
    "--num-layers 1 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 48 --vocab-size 64 "
    "--disable-bias-linear --qk-layernorm --multi-latent-attention --q-lora-rank 12 --kv-lora-rank "
    "20 --qk-head-dim 8 --qk-pos-emb-head-dim 6 --v-head-dim 10",
    "--model mixtral-tiny --softmax-type learnable --window-size 7,0 --window-attn-skip-freq 2",
    "--model mixtral-tiny --fine-grained-activation-offloading --offload-modules core_attn "
    "--min-offloaded-tensor-size 1",
    "--num-layers 2 --hidden-size 24 --num-attention-heads 6 --num-query-groups 2 --kv-channels 10 "
    "--ffn-hidden-size 34 --vocab-size 77 --disable-bias-linear --qk-layernorm "
    "--experimental-attention-variant gated_delta_net --linear-attention-freq 2 "
    "--attention-output-gate --linear-conv-kernel-dim 3 --linear-key-head-dim 8 "
    "--linear-value-head-dim 12 --linear-num-key-heads 2 --linear-num-value-heads 6",
    "--num-layers 2 --hidden-size 24 --num-attention-heads 6 --num-query-groups 2 --kv-channels 10 "
    "--ffn-hidden-size 34 --vocab-size 77 --disable-bias-linear --qk-layernorm "
    "--experimental-attention-variant gated_delta_net --linear-attention-freq 2 "
    "--attention-output-gate --linear-conv-kernel-dim 3 --linear-key-head-dim 8 "
    "--linear-value-head-dim 12 --linear-num-key-heads 2 --linear-num-value-heads 6 "
    "--ranks 2 --context-parallel-size 2 --cp-comm-type a2a",
    "--num-layers 2 --hidden-size 24 --num-attention-heads 6 --num-query-groups 2 --kv-channels 10 "
    "--ffn-hidden-size 34 --vocab-size 77 --disable-bias-linear --qk-layernorm "
    "--experimental-attention-variant gated_delta_net --linear-attention-freq 2 "
    "--attention-output-gate --linear-conv-kernel-dim 3 --linear-key-head-dim 8 "
    "--linear-value-head-dim 12 --linear-num-key-heads 3 --linear-num-value-heads 6 "
    "--ranks 2 --context-parallel-size 2 --reset-attention-mask",
    "--num-layers 1 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 48 --vocab-size 64 "
    "--disable-bias-linear --qk-layernorm --multi-latent-attention --q-lora-rank 12 --kv-lora-rank "
    "20 --qk-head-dim 8 --qk-pos-emb-head-dim 6 --v-head-dim 10 --attention-dropout 0 "
    "--experimental-attention-variant dsa --dsa-indexer-topk 5 --dsa-indexer-n-heads 3 "
    "--dsa-indexer-head-dim 14 --dsa-indexer-loss-coeff 0.01",
    "--model mixtral-tiny --mtp-num-layers 1",
    "--model mixtral-tiny --ranks 2 --expert-model-parallel-size 2 --moe-token-dispatcher-type "
    "alltoall --moe-expert-rank-capacity-factor 1.5",
    "--model mixtral-tiny --ranks 2 --tensor-model-parallel-size 2 --optimizer muon",
    "--model mixtral-tiny --ranks 2 --tensor-model-parallel-size 2 --sequence-parallel --bf16 "
    "--fp8-format e4m3 --fp8-recipe tensorwise",
    "--model mixtral-tiny --ranks 2 --moe-router-load-balancing-type global_aux_loss "
    "--moe-aux-loss-coeff 0.1 --global-batch-size 8",
    "--model mixtral-tiny --bf16 --fp8-format hybrid --fp8-recipe tensorwise "
    "--log-fp8-saturation",
    "--model mixtral-tiny --bf16 --fp8-format hybrid --fp8-amax-history-len 16 --ranks 2 "
    "--expert-model-parallel-size 2",
    "--model mixtral-tiny --bf16 --fp8-format e4m3 --fp8-recipe blockwise",
    "--model mixtral-tiny --bf16 --fp8-format e4m3 --fp8-recipe mxfp8",
    "--model mixtral-tiny --bf16 --fp8-format e4m3 --fp8-recipe tensorwise --fp8-param-gather "
    "--ranks 4 --use-distributed-optimizer",
    "--model mixtral-tiny --bf16 --fp8-format e4m3 --fp8-recipe mxfp8 --fp8-param-gather --ranks 2 "
    "--use-megatron-fsdp",
    "--model mixtral-tiny --bf16 --fp8-format hybrid --fp8-param-gather --optimizer muon",
    "--model mixtral-tiny --bf16 --fp4-format e2m1 --ranks 2 --tensor-model-parallel-size 2",
    "--model mixtral-tiny --bf16 --moe-dispatch-fwd-dtype mxfp8",
    "--model mixtral-tiny --bf16 --activation-func-fp8-input-store",
    "--model mixtral-tiny --bf16 --moe-dispatch-fwd-dtype mxfp8 --moe-combine-bwd-dtype mxfp8 "
    "--ranks 2 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall",
    "--model mixtral-tiny --bf16 --moe-dispatch-fwd-dtype mxfp8 --ranks 2 "
    "--expert-model-parallel-size 2 --moe-token-dispatcher-type flex",
    "--model mixtral-tiny --bf16 --ranks 2 --expert-model-parallel-size 2 --moe-paged-stash",
    "--model mixtral-tiny --bf16 --ranks 4 --expert-model-parallel-size 2 --moe-expert-clones 1",
};

std::string types_of(const Program& program, std::span<const ValueId> ids) {
  constexpr size_t kMostShown = 10;
  std::string text;
  for (const ValueId id : ids.first(std::min(ids.size(), kMostShown))) {
    if (!text.empty()) text += " ";
    if (!id.valid()) {
      text += "-";
      continue;
    }
    const Value& value = program.value(id);
    text += name_of(value.dtype);
    for (int i = 0; i < value.shape.rank(); ++i) {
      text += fmt::format("{}{}", i == 0 ? ":" : "x", value.shape[i]);
    }
  }
  if (ids.size() > kMostShown) text += fmt::format(" and {} more", ids.size() - kMostShown);
  return text;
}

// Of an operation whose group, if it has one, has four members; on a Hopper GPU.
std::string describe(const OpView& op) {
  const OpSpec& spec = *op.op.spec;
  std::string text;
  if (spec.print_attributes != nullptr) {
    text += fmt::format(" {{{}}}", spec.print_attributes(op.op.attributes));
  }
  const Cost cost = spec.cost(op);
  text += fmt::format(": {} flops, {} bytes", cost.flops, cost.bytes);
  if (cost.product_flops > 0) {
    text += fmt::format(", {} of products in {}", cost.product_flops, name_of(cost.product_dtype));
  }
  if (spec.links != nullptr) {
    const LinkTraffic sent = spec.links(op, 4);
    text += fmt::format(", sends {} bytes in {} messages", sent.bytes, sent.messages);
  }
  if (spec.cpu.workspace != nullptr) {
    text += fmt::format(", workspace {}", spec.cpu.workspace(op));
  }
  if (spec.cpu.scratch != nullptr) text += fmt::format(", scratch {}", spec.cpu.scratch(op));
  if (spec.cuda != nullptr) {
    const KernelChoice kernel = spec.cuda(op, {.compute_capability = 90, .multiprocessors = 132});
    text += fmt::format("; cuda {}", kernel.variant != nullptr ? kernel.variant : "the only one");
    if (kernel.slow != SlowKernel::no) {
      text += fmt::format(" slow for reason {}", static_cast<int>(kernel.slow));
    }
    if (kernel.needs.scratch > 0) text += fmt::format(", scratch {}", kernel.needs.scratch);
    if (kernel.needs.staging > 0) text += fmt::format(", staging {}", kernel.needs.staging);
  }
  return text + "\n";
}

TEST(Costs, OfEveryKindInTrainingSteps) {
  std::map<std::string, std::set<std::string>> lines;  // by kind
  for (const char* flags : kSteps) {
    const auto program = testing::program_of(std::string(kCommon) + flags);
    const Program expected = program->with_expected_rows();
    std::set<const OpSpec*> seen;
    for (int32_t index = 0; index < expected.op_count(); ++index) {
      const Op& op = expected.op(index);
      if (!seen.insert(op.spec).second) continue;
      lines[op.spec->name].insert(
          fmt::format("  {} -> {}{}", types_of(expected, expected.inputs(op)),
                      types_of(expected, expected.outputs(op)), describe(OpView{expected, op})));
    }
  }
  // In steps that run again in rounds, on ranks whose vocabulary begins later, and in steps without
  // the pass that sends codes; of fp16.
  const std::set<std::string> elsewhere = {"keep_tokens", "round_gradient", "scale_gradient",
                                           "shift_ids"};
  for (const OpSpec* spec : all_operations()) {
    EXPECT_NE(lines.contains(spec->name), elsewhere.contains(spec->name)) << spec->name;
  }
  EXPECT_EQ(lines.size() + elsewhere.size(), all_operations().size()) << "unregistered";
  std::string text;
  for (const auto& [kind, of_kind] : lines) {
    text += kind + "\n";
    for (const std::string& line : of_kind) text += line;
  }
  testing::expect_golden(text, "operation_costs.txt");
}

// Of a rank whose vocabulary begins later.
TEST(Costs, ShiftedIdsAreReadAndWritten) {
  const auto program = testing::program_of(
      "--model mixtral-tiny --ranks 2 --tensor-model-parallel-size 2", /*rank=*/1);
  int shifts = 0;
  for (int32_t index = 0; index < program->op_count(); ++index) {
    const OpView op{*program, program->op(index)};
    if (op.op.spec != &kShiftIds) continue;
    ++shifts;
    EXPECT_EQ(kShiftIds.cost(op).bytes, op.input(0).bytes() + op.output(0).bytes());
  }
  EXPECT_GT(shifts, 0);
}

}  // namespace
}  // namespace troupe
