// What the CPU interpreter itself costs per operation: a program of many additions of one element
// each, so that hardly anything but the interpreter is left. The bound is 2 us per operation.
#include <benchmark/benchmark.h>

#include "ops/elementwise/add/add.h"
#include "passes/memory_plan.h"
#include "program/builder.h"
#include "runtime/cpu/cpu_interpreter.h"

namespace troupe {
namespace {

void interpreter_overhead(benchmark::State& state) {
  const auto table = std::make_shared<const StateTable>();
  Program program(table);
  Builder builder(program);
  const auto operations = static_cast<int32_t>(state.range(0));
  ValueId sum = builder.input("x", DType::f32, {1});
  for (int32_t i = 0; i < operations; ++i) sum = add(builder, sum, sum, "sum");
  ThreadPool pool(2);
  const StateStorage storage(table);
  CpuInterpreter interpreter(program, plan_memory(program, pool.threads()), storage, pool);
  for (auto _ : state) interpreter.run();
  state.counters["per_operation"] = benchmark::Counter(
      static_cast<double>(operations),
      benchmark::Counter::kIsIterationInvariantRate | benchmark::Counter::kInvert);
}
BENCHMARK(interpreter_overhead)->Arg(1000)->Arg(100000);

}  // namespace
}  // namespace troupe
