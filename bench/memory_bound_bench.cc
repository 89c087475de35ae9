// Memory-bound operations far out of cache against the machine's own copying. Each benchmark runs a
// program of one operation on tensors of some 100 MiB; "GB/s" counts the bytes of the operation's
// cost, "of_copy" is the share of what copying reaches (read and write counted), measured at the
// start.
#include <benchmark/benchmark.h>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/machine.h"
#include "base/random.h"
#include "ops/activation/activation.h"
#include "ops/add/add.h"
#include "ops/combine/combine.h"
#include "ops/cross_entropy/cross_entropy.h"
#include "ops/permute/permute.h"
#include "ops/rms_norm/rms_norm.h"
#include "ops/rope/rope.h"
#include "ops/route/route.h"
#include "passes/memory_plan.h"
#include "program/builder.h"
#include "runtime/cpu/cpu_interpreter.h"

namespace troupe {
namespace {

double measure_copy(ThreadPool& pool) {
  constexpr int64_t kBytes = int64_t{256} << 20;
  std::vector<std::byte> source(kBytes, std::byte{1});
  std::vector<std::byte> target(kBytes);
  double best = 0;
  for (int run = 0; run < 5; ++run) {
    const auto start = std::chrono::steady_clock::now();
    pool.parallel_ranges(kBytes, int64_t{1} << 20, [&](int64_t begin, int64_t end, int) {
      std::memcpy(target.data() + begin, source.data() + begin, static_cast<size_t>(end - begin));
    });
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    best = std::max(best, 2.0 * kBytes / seconds.count());
  }
  return best;
}

// Emits what is measured; every operation from the returned number on counts.
using Emit = std::function<int32_t(Builder&)>;

void fill_inputs(const CpuInterpreter& interpreter, const Program& program) {
  for (int32_t i = 0; i < program.value_count(); ++i) {
    const Value& value = program.value(ValueId{i});
    if (value.role != Role::input) continue;
    const TensorView view = interpreter.view(ValueId{i});
    for (int64_t e = 0; e < view.shape.elements(); ++e) {
      const auto index = static_cast<uint64_t>(e);
      if (value.dtype == DType::i32) {
        // Ids below 8 serve as experts and as labels.
        view.as<int32_t>()[e] =
            static_cast<int32_t>(random_below(8, 1, RandomStream::test, 0, index));
      } else {
        view.as<float>()[e] = static_cast<float>(e % 19) * 0.1F - 0.9F;
      }
    }
  }
}

void memory_bound(benchmark::State& state, const Emit& emit) {
  const auto table = std::make_shared<const StateTable>();
  Program program(table);
  Builder builder(program);
  const int32_t first = emit(builder);
  program.add_result(program.op(program.op_count() - 1).outputs[0]);
  ThreadPool pool(usable_cores());
  const StateStorage storage(table);
  CpuInterpreter interpreter(program, plan_memory(program, pool.threads()), storage, pool);
  fill_inputs(interpreter, program);
  double bytes = 0;
  for (int32_t i = first; i < program.op_count(); ++i) {
    const Op& op = program.op(i);
    bytes += op.spec->cost(OpView{program, op}).bytes;
  }
  interpreter.run();  // touches all memory
  double best = 1e30;
  for (auto _ : state) {
    double seconds = 0;
    auto last = std::chrono::steady_clock::now();
    interpreter.run_observed([&](int32_t op) {
      const auto now = std::chrono::steady_clock::now();
      if (op >= first) seconds += std::chrono::duration<double>(now - last).count();
      last = std::chrono::steady_clock::now();
    });
    state.SetIterationTime(seconds);
    best = std::min(best, seconds);
  }
  static const double copy = measure_copy(pool);
  state.counters["GB/s"] = bytes / best / 1e9;
  state.counters["of_copy"] = bytes / best / copy;
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
  cross_entropy(builder, logits, labels, tensor(builder, "mask", {2048}), "loss");
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
      {"add", emit_add},         {"rms_norm", emit_rms_norm}, {"add_rms_norm", emit_add_rms_norm},
      {"swiglu", emit_swiglu},   {"rope", emit_rope},         {"cross_entropy", emit_cross_entropy},
      {"permute", emit_permute}, {"combine", emit_combine},
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
