// Memory-bound operations far out of cache against the machine's own copying. Each benchmark runs a
// program of one operation on tensors of some 100 MiB; "GB/s" counts the bytes of the operation's
// cost, "of_copy" is the share of what copying reaches (read and write counted), measured at the
// start.
#include <algorithm>
#include <benchmark/benchmark.h>
#include <string>

#include "operation_run.h"
#include "ops/attention/rope/rope.h"
#include "ops/elementwise/activation/activation.h"
#include "ops/elementwise/add/add.h"
#include "ops/experts/combine/combine.h"
#include "ops/experts/permute/permute.h"
#include "ops/losses/cross_entropy/cross_entropy.h"
#include "ops/norms/rms_norm/rms_norm.h"
#include "ops/routing/route/route.h"
#include "runtime/copy_limit.h"

namespace troupe {
namespace {

void memory_bound(benchmark::State& state, int32_t (*emit)(Builder&)) {
  OperationRun operation(emit, /*integers=*/8);  // they serve as experts and as labels
  operation.run();                               // touches all memory
  double best = 1e30;
  for (auto _ : state) {
    const double seconds = operation.run();
    state.SetIterationTime(seconds);
    best = std::min(best, seconds);
  }
  static const double copy = measure_copy_limit(operation.pool());
  const double rate = operation.cost().bytes / best;
  state.counters["GB/s"] = rate / 1e9;
  state.counters["of_copy"] = rate / copy;
}

constexpr int64_t kTokens = 16384;
constexpr int64_t kHidden = 2048;

ValueId tensor(Builder& builder, const char* name, const Shape& shape) {
  return builder.input(name, DType::f32, shape);
}

int32_t emit_add(Builder& builder) {
  const ValueId x = tensor(builder, "x", {kTokens, kHidden});
  const ValueId y = tensor(builder, "y", {kTokens, kHidden});
  add(builder, x, y, "sum");
  return 0;
}
int32_t emit_rms_norm(Builder& builder) {
  const ValueId x = tensor(builder, "x", {kTokens, kHidden});
  rms_norm(builder, x, tensor(builder, "gamma", {kHidden}), {}, "normed");
  return 0;
}
int32_t emit_add_rms_norm(Builder& builder) {
  const ValueId x = tensor(builder, "x", {kTokens, kHidden});
  const ValueId y = tensor(builder, "y", {kTokens, kHidden});
  add_rms_norm(builder, x, y, tensor(builder, "gamma", {kHidden}), {}, "normed");
  return 0;
}
int32_t emit_swiglu(Builder& builder) {
  const ValueId x = tensor(builder, "gate_up", {kTokens, 2 * kHidden});
  activation(builder, x, {}, {}, {.function = ActivationFunction::silu}, "activated");
  return 0;
}
int32_t emit_rope(Builder& builder) {
  const ValueId table = rope_table(builder, {.positions = 4096, .rotary_dim = 128, .base = 10000},
                                   DType::f32, "table");
  const ValueId qkv = tensor(builder, "qkv", {kTokens, 24 * 128});
  rope(builder, qkv, table,
       {.heads = 16,
        .groups = 4,
        .head_dim = 128,
        .rotary_dim = 128,
        .sequence = 4096,
        .inverse = false},
       "rotated");
  return 1;
}
int32_t emit_cross_entropy(Builder& builder) {
  const ValueId logits = tensor(builder, "logits", {2048, 32000});
  const ValueId labels = builder.input("labels", DType::i32, {2048});
  cross_entropy(
      builder,
      {.logits = logits, .labels = labels, .mask = tensor(builder, "mask", {2048}), .tokens = {}},
      "loss");
  return 0;
}
int32_t emit_cross_entropy_gradient(Builder& builder) {
  const Shape tokens{2048};
  builder.emit(kCrossEntropyGradient, Attributes(NoAttributes()),
               {tensor(builder, "logits", {2048, 32000}),
                builder.input("labels", DType::i32, tokens), tensor(builder, "mask", tokens),
                tensor(builder, "lse", tokens), tensor(builder, "d_loss", {1}), ValueId{}},
               "d_logits");
  return 0;
}
Routing emit_routing(Builder& builder) {
  // One of eight experts for each token: top-1 keeps chosen experts distinct.
  const ValueId indices = builder.input("indices", DType::i32, {kTokens, 1});
  return route(builder, indices, {.experts = 8}, "routing");
}
int32_t emit_permute(Builder& builder) {
  const Routing routing = emit_routing(builder);
  permute(builder, tensor(builder, "x", {kTokens, kHidden}), routing, "rows");
  return 1;
}
int32_t emit_combine(Builder& builder) {
  const Routing routing = emit_routing(builder);
  const ValueId rows = permute(builder, tensor(builder, "x", {kTokens, kHidden}), routing, "rows");
  combine(builder, rows, routing, "sums");
  return 2;
}

const bool registered = [] {
  const std::pair<const char*, int32_t (*)(Builder&)> all[] = {
      {"add", emit_add},
      {"rms_norm", emit_rms_norm},
      {"add_rms_norm", emit_add_rms_norm},
      {"swiglu", emit_swiglu},
      {"rope", emit_rope},
      {"cross_entropy", emit_cross_entropy},
      {"cross_entropy_gradient", emit_cross_entropy_gradient},
      {"permute", emit_permute},
      {"combine", emit_combine},
  };
  for (const auto& [name, emit] : all) {
    benchmark::RegisterBenchmark(
        name, [emit = emit](benchmark::State& state) { memory_bound(state, emit); })
        ->UseManualTime()
        ->MinTime(1);
  }
  return true;
}();

}  // namespace
}  // namespace troupe
