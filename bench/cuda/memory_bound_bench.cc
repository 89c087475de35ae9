// Memory-bound operations on a GPU at the sizes of models, in bf16, against the GPU's own copying:
// 8192 tokens, or the experts' rows of as many. Bytes are those of the operations' costs. Each
// launch finds nothing of its operands in the cache.
#include <cstdio>
#include <cstdlib>
#include <string>

#include "cuda/device_run.h"
#include "ops/attention/rope/rope.h"
#include "ops/elementwise/activation/activation.h"
#include "ops/elementwise/add/add.h"
#include "ops/elementwise/split_columns/split_columns.h"
#include "ops/experts/combine/combine.h"
#include "ops/experts/permute/permute.h"
#include "ops/losses/cross_entropy/cross_entropy.h"
#include "ops/norms/qk_norm/qk_norm.h"
#include "ops/norms/rms_norm/rms_norm.h"
#include "ops/optimizer/adamw/adamw.h"
#include "ops/optimizer/gradient_norm/gradient_norm.h"
#include "ops/products/embedding/embedding.h"
#include "ops/routing/count_experts/count_experts.h"
#include "ops/routing/route/route.h"
#include "ops/routing/router_topk/router_topk.h"
#include "passes/autodiff.h"
#include "runtime/device_limits.h"

namespace troupe {
namespace {

constexpr int64_t kTokens = 8192;
constexpr DType kDType = DType::bf16;

// The forward operations of a case; returns the results at which gradients enter.
using Emit = std::function<std::vector<ValueId>(Builder&)>;

Emit norm(int64_t hidden) {
  return [=](Builder& builder) -> std::vector<ValueId> {
    const ValueId x = builder.input("x", kDType, {kTokens, hidden});
    const ValueId delta = builder.input("delta", kDType, {kTokens, hidden});
    const ValueId gamma = builder.input("gamma", DType::f32, {hidden});
    const RmsNormResult result = add_rms_norm(builder, x, delta, gamma, {}, "normed");
    return {result.normalized, result.sum};
  };
}

Emit heads(int32_t heads, int32_t groups, int32_t head_dim, QkNormScope scope) {
  return [=](Builder& builder) -> std::vector<ValueId> {
    const bool per_head = scope == QkNormScope::head;
    const ValueId qkv =
        builder.input("qkv", kDType, {kTokens, int64_t{heads + 2 * groups} * head_dim});
    const ValueId gamma_q =
        builder.input("gamma_q", DType::f32, {int64_t{per_head ? 1 : heads} * head_dim});
    const ValueId gamma_k =
        builder.input("gamma_k", DType::f32, {int64_t{per_head ? 1 : groups} * head_dim});
    const ValueId table = rope_table(
        builder, {.positions = 4096, .rotary_dim = head_dim, .base = 10000}, DType::f32, "table");
    return {qk_norm_rope(builder,
                         {.qkv = qkv, .gamma_q = gamma_q, .gamma_k = gamma_k, .table = table},
                         {.heads = heads,
                          .groups = groups,
                          .head_dim = head_dim,
                          .scope = scope,
                          .rotary_dim = head_dim,
                          .sequence = 4096},
                         "rotated")};
  };
}

// Rows to the experts and back, without the products; and, as these would make the activation's
// rows, others of its width, which go there and back for that alone.
Emit experts(int64_t hidden, int64_t inner, int32_t count, int32_t top_k) {
  return [=](Builder& builder) -> std::vector<ValueId> {
    const ValueId logits = builder.input("logits", DType::f32, {kTokens, count});
    const RouterTopkResult chosen =
        router_topk(builder, {.logits = logits}, {.top_k = top_k}, "chosen");
    count_experts(builder, chosen.indices, {}, {.experts = count, .sequences = 2}, "counts");
    const Routing routing = route(builder, chosen.indices, {.experts = count}, "routing");
    const ValueId x = builder.input("x", kDType, {kTokens, hidden});
    const ValueId y = combine(builder, permute(builder, x, routing, "rows"), routing, "y");
    const ValueId wide = builder.input("wide", kDType, {kTokens, 2 * inner});
    const ValueId active = activation(builder, permute(builder, wide, routing, "wide_rows"),
                                      chosen.probabilities, routing.row_slot, {}, "active");
    return {y, combine(builder, active, routing, "wide_y")};
  };
}

Emit vocabulary(int64_t hidden, int64_t words) {
  return [=](Builder& builder) -> std::vector<ValueId> {
    const ValueId tokens = builder.input("tokens", DType::i32, {kTokens});
    const ValueId weight = builder.input("weight", kDType, {words, hidden});
    const ValueId embedded = embedding(builder, tokens, weight, {}, "embedded");
    const ValueId logits = builder.input("logits", kDType, {kTokens, words});
    const ValueId labels = builder.input("labels", DType::i32, {kTokens});
    const ValueId mask = builder.input("mask", DType::f32, {kTokens});
    const CrossEntropyResult loss = cross_entropy(
        builder, {.logits = logits, .labels = labels, .mask = mask, .tokens = {}}, "loss");
    return {embedded, loss.loss};
  };
}

Emit columns(int64_t first, int64_t rest) {
  return [=](Builder& builder) -> std::vector<ValueId> {
    const ValueId x = builder.input("x", kDType, {kTokens, first + rest});
    const SplitColumnsResult parts = split_columns(builder, x, {.columns = first}, "first");
    return {add(builder, parts.first, parts.first, "sum"), parts.rest};
  };
}

void emit_with_gradients(Builder& builder, const Emit& emit) {
  Program& program = builder.program();
  std::vector<GradientSeed> seeds;
  const std::vector<ValueId> results = emit(builder);
  const int32_t forward_ops = program.op_count();
  std::vector<ValueId> inputs;
  for (int32_t i = 0; i < program.value_count(); ++i) {
    const Value& value = program.value(ValueId{i});
    if (value.role == Role::input && is_float(value.dtype) && value.name != "mask") {
      inputs.push_back(ValueId{i});
    }
  }
  for (const ValueId result : results) {
    const Value value = program.value(result);
    seeds.push_back({result, builder.input("d_" + value.name, value.dtype, value.shape)});
  }
  MainGradients main_gradients(program.state());
  append_backward(builder, 0, forward_ops, seeds, inputs, main_gradients);
}

void print(const char* name, DeviceRun& run, double copy_limit) {
  run.run();
  std::printf("%s\n", name);
  for (int32_t i = 0; i < run.program().op_count(); ++i) {
    const Op& op = run.program().op(i);
    const double seconds = run.seconds(i);
    const double rate = run.cost(i).bytes / seconds;
    std::printf("  %-28s %-16s %8.1f us %7.0f GB/s %4.0f%%\n", op.spec->name,
                run.program().value(run.program().outputs(op)[0]).shape.to_string().c_str(),
                seconds * 1e6, rate * 1e-9, 100 * rate / copy_limit);
  }
}

void measure(const char* name, const Emit& emit, double copy_limit) {
  DeviceRun run([&](Builder& builder) { emit_with_gradients(builder, emit); },
                /*integers=*/8192);
  print(name, run, copy_limit);
}

// The norm of one gradient, and the update of its parameter.
void measure_update(int64_t elements, double copy_limit) {
  StateTable table;
  const auto add = [&](const char* name, DType dtype, Role role) {
    return table.add({.name = name, .dtype = dtype, .shape = {elements}, .role = role});
  };
  const StateId parameter = add("parameter", kDType, Role::parameter);
  const StateId gradient = add("gradient", DType::f32, Role::gradient);
  const StateId mean = add("mean", DType::f32, Role::optimizer);
  const StateId square = add("square", DType::f32, Role::optimizer);
  const StateId master = add("master", DType::f32, Role::optimizer);
  DeviceRun run(
      [&](Builder& builder) {
        const ValueId gradients[] = {builder.state(gradient)};
        const ValueId squares = squared_norm(builder, gradients, {}, "squares");
        const ClipResult clip = clip_coefficient(builder, squares, {}, "clip");
        adamw(builder,
              {.parameter = builder.state(parameter),
               .gradient = gradients[0],
               .exp_avg = builder.state(mean),
               .exp_avg_sq = builder.state(square),
               .master = builder.state(master)},
              {.learning_rate = builder.input("learning_rate", DType::f64, {1}),
               .weight_decay = builder.input("weight_decay", DType::f64, {1}),
               .step = builder.input("step", DType::i64, {1}),
               .coefficient = clip.coefficient,
               .skip = clip.skip},
              {}, "updated");
      },
      /*integers=*/8192, std::make_shared<const StateTable>(table));
  print("update", run, copy_limit);
}

void measure_all() {
  const double limit = measure_device_copy_limit();
  std::printf("copying: %.0f GB/s\n", limit * 1e-9);
  measure("OLMoE norms", norm(2048), limit);
  measure("Mixtral-8x7B norms", norm(4096), limit);
  measure("OLMoE heads", heads(16, 16, 128, QkNormScope::projection), limit);
  measure("Qwen3-30B heads", heads(32, 4, 128, QkNormScope::head), limit);
  measure("OLMoE rows", experts(2048, 1024, 64, 8), limit);
  measure("Qwen3-30B rows", experts(2048, 768, 128, 8), limit);
  measure("Mixtral-8x7B rows", experts(4096, 14336, 8, 2), limit);
  measure("OLMoE vocabulary", vocabulary(2048, 50304), limit);
  measure("columns", columns(1536, 512), limit);
  measure_update(int64_t{128} << 20, limit);
}

}  // namespace
}  // namespace troupe

int main() {
  try {
    troupe::measure_all();
    return EXIT_SUCCESS;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return EXIT_FAILURE;
  }
}
