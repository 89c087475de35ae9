// Flops and bytes of the operations of training steps: plan, bench and inspect report them, overlap
// is ordered by them, and no trained number shows that one is wrong. The golden text has a line for
// the first operation of each kind in each layout, to be read with the formulas of src/ops.
#include <algorithm>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <map>
#include <set>
#include <string>
#include <vector>

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

TEST(Costs, OfEveryKindInTrainingSteps) {
  std::map<std::string, std::set<std::string>> lines;  // by kind
  for (const char* flags : kSteps) {
    const auto program = testing::program_of(std::string(kCommon) + flags);
    const Program expected = program->with_expected_rows();
    std::set<const OpSpec*> seen;
    for (int32_t index = 0; index < expected.op_count(); ++index) {
      const Op& op = expected.op(index);
      if (!seen.insert(op.spec).second) continue;
      const Cost cost = op.spec->cost(OpView{expected, op});
      lines[op.spec->name].insert(
          fmt::format("  {} -> {}: {} flops, {} bytes\n", types_of(expected, expected.inputs(op)),
                      types_of(expected, expected.outputs(op)), cost.flops, cost.bytes));
    }
  }
  std::string text;
  for (const auto& [kind, of_kind] : lines) {
    text += kind + "\n";
    for (const std::string& line : of_kind) text += line;
  }
  testing::expect_golden(text, "operation_costs.txt");
}

}  // namespace
}  // namespace troupe
