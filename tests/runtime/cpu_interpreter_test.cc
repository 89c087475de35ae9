// The CPU interpreter on a small program of real operations: binding, memory, order, and what the
// oracle does with the dead.
#include "runtime/cpu/cpu_interpreter.h"

#include <algorithm>
#include <cmath>
#include <gtest/gtest.h>
#include <memory>
#include <vector>

#include "ops/elementwise/add/add.h"
#include "ops/elementwise/fill/fill.h"
#include "ops/optimizer/accumulate/accumulate.h"
#include "program/builder.h"
#include "program/verify.h"
#include "runtime/state_storage.h"

namespace troupe {
namespace {

// sum = x + one; twice = sum + sum; total += twice (state); seen += twice (metric);
// result = twice + weight.
class ToyProgram : public ::testing::Test {
 protected:
  ToyProgram() {
    auto states = std::make_shared<StateTable>();
    weight = states->add({.name = "weight", .dtype = DType::f64, .shape = {4}});
    total = states->add(
        {.name = "total", .dtype = DType::f64, .shape = {4}, .role = Role::router_state});
    table = states;
    program = std::make_unique<Program>(table);
    Builder builder(*program);
    x = builder.input("x", DType::f64, {4});
    seen = builder.metric("seen", DType::f64, {4});
    one = fill(builder, 1.0, DType::f64, {4}, "one");
    sum = add(builder, x, one, "sum");
    twice = add(builder, sum, sum, "twice");
    accumulate(builder, builder.state(total), twice, 1.0, /*overwrite=*/false);
    accumulate(builder, seen, twice, 0.5, /*overwrite=*/true);
    result = add(builder, twice, builder.state(weight), "result");
    program->add_result(result);
    verify_program(*program);
  }
  void set(const TensorView& view, const std::vector<double>& values) {
    std::copy(values.begin(), values.end(), view.as<double>());
  }
  static std::vector<double> get(const TensorView& view) {
    return {view.as<double>(), view.as<double>() + view.shape.elements()};
  }
  void expect_one_run(CpuInterpreter& interpreter, const StateStorage& storage) {
    set(storage.view(weight), {100, 200, 300, 400});
    set(storage.view(total), {1, 1, 1, 1});
    set(interpreter.view(x), {0, 1, 2, 3});
    interpreter.run();
    EXPECT_EQ(get(interpreter.view(result)), (std::vector<double>{102, 204, 306, 408}));
    EXPECT_EQ(get(interpreter.view(seen)), (std::vector<double>{1, 2, 3, 4}));
    EXPECT_EQ(get(storage.view(total)), (std::vector<double>{3, 5, 7, 9}));
    EXPECT_EQ(get(storage.view(weight)), (std::vector<double>{100, 200, 300, 400}));
  }

  std::shared_ptr<const StateTable> table;
  std::unique_ptr<Program> program;
  StateId weight;
  StateId total;
  ValueId x;
  ValueId seen;
  ValueId one;
  ValueId sum;
  ValueId twice;
  ValueId result;
};

TEST_F(ToyProgram, Runs) {
  for (const int threads : {1, 3}) {
    ThreadPool pool(threads);
    const StateStorage storage(table);
    CpuInterpreter planned(*program, plan_memory(*program, threads), storage, pool);
    expect_one_run(planned, storage);
    CpuInterpreter oracle(*program, plan_oracle(*program, threads), storage, pool);
    expect_one_run(oracle, storage);
  }
}

TEST_F(ToyProgram, StateOutlivesRunsAndInputsStay) {
  ThreadPool pool(1);
  const StateStorage storage(table);
  CpuInterpreter interpreter(*program, plan_memory(*program, 1), storage, pool);
  expect_one_run(interpreter, storage);
  interpreter.run();
  EXPECT_EQ(get(storage.view(total)), (std::vector<double>{5, 9, 13, 17}));
  EXPECT_EQ(get(interpreter.view(seen)), (std::vector<double>{1, 2, 3, 4})) << "overwritten";
  EXPECT_EQ(get(interpreter.view(x)), (std::vector<double>{0, 1, 2, 3}));
}

TEST_F(ToyProgram, ProgramsShareTheState) {
  ThreadPool pool(1);
  const StateStorage storage(table);
  CpuInterpreter first(*program, plan_memory(*program, 1), storage, pool);
  CpuInterpreter second(*program, plan_memory(*program, 1), storage, pool);
  set(first.view(x), {1, 1, 1, 1});
  set(second.view(x), {2, 2, 2, 2});
  first.run();
  second.run();
  EXPECT_EQ(get(storage.view(total)), std::vector<double>(4, 4 + 6));
  EXPECT_EQ(get(first.view(result)), std::vector<double>(4, 4)) << "values are private";
}

TEST_F(ToyProgram, HoldsWhatIsPlanned) {
  ThreadPool pool(2);
  for (const bool oracle : {false, true}) {
    const uint64_t before = Arena::allocated_bytes();
    const StateStorage storage(table);
    const MemoryPlan plan = oracle ? plan_oracle(*program, 2) : plan_memory(*program, 2);
    const CpuInterpreter interpreter(*program, plan, storage, pool);
    EXPECT_EQ(interpreter.allocated_bytes(),
              plan.persistent_bytes + plan.transient_bytes + plan.scratch_bytes());
    EXPECT_EQ(storage.bytes(), plan.state_bytes);
    EXPECT_EQ(Arena::allocated_bytes() - before, plan.total_bytes());
  }
}

TEST_F(ToyProgram, ObserverSeesEveryOperationInOrder) {
  ThreadPool pool(1);
  const StateStorage storage(table);
  CpuInterpreter interpreter(*program, plan_memory(*program, 1), storage, pool);
  set(interpreter.view(x), {0, 1, 2, 3});
  std::vector<int32_t> order;
  std::vector<std::vector<double>> outputs;
  interpreter.run_observed([&](int32_t index) {
    order.push_back(index);
    outputs.push_back(get(interpreter.view(program->outputs(program->op(index))[0])));
  });
  EXPECT_EQ(order, (std::vector<int32_t>{0, 1, 2, 3, 4, 5}));
  EXPECT_EQ(outputs[0], (std::vector<double>{1, 1, 1, 1}));
  EXPECT_EQ(outputs[1], (std::vector<double>{1, 2, 3, 4}));
  EXPECT_EQ(outputs[2], (std::vector<double>{2, 4, 6, 8}));
}

TEST_F(ToyProgram, ProfiledRunSaysWhenEachOperationRan) {
  ThreadPool pool(1);
  const StateStorage storage(table);
  CpuInterpreter interpreter(*program, plan_memory(*program, 1), storage, pool);
  set(interpreter.view(x), {0, 1, 2, 3});
  const std::vector<WorkSpan> spans = interpreter.run_profiled();
  ASSERT_EQ(spans.size(), 6U);
  double end = 0;
  for (size_t i = 0; i < spans.size(); ++i) {
    EXPECT_EQ(spans[i].op, static_cast<int32_t>(i));
    EXPECT_GE(spans[i].begin_s, end) << "operations run one after the other";
    EXPECT_GE(spans[i].duration_s, 0);
    end = spans[i].begin_s + spans[i].duration_s;
  }
  EXPECT_EQ(spans[0].name, "fill");
  EXPECT_EQ(get(interpreter.view(seen)), (std::vector<double>{1, 2, 3, 4})) << "it is a run";
}

TEST_F(ToyProgram, OraclePoisonsTheDead) {
  ThreadPool pool(1);
  const StateStorage storage(table);
  CpuInterpreter oracle(*program, plan_oracle(*program, 1), storage, pool);
  const auto dead = [&](ValueId id) {
    for (const double value : get(oracle.view(id))) {
      if (!std::isnan(value)) return false;
    }
    return true;
  };
  EXPECT_TRUE(dead(one) && dead(sum) && dead(twice) && dead(result)) << "before the first run";
  set(oracle.view(x), {0, 1, 2, 3});
  oracle.run_observed([&](int32_t index) {
    // The observer comes before the poison of its own operation.
    EXPECT_EQ(dead(one), index < 0 || index > 1) << index;
    EXPECT_EQ(dead(sum), index < 1 || index > 2) << index;
    EXPECT_EQ(dead(twice), index < 2) << index;
  });
  EXPECT_TRUE(dead(twice));
  EXPECT_FALSE(dead(result)) << "a result stays";
  EXPECT_FALSE(dead(seen));
}

TEST_F(ToyProgram, PlannedMemoryIsReused) {
  const MemoryPlan plan = plan_memory(*program, 1);
  const MemoryPlan oracle = plan_oracle(*program, 1);
  EXPECT_LT(plan.transient_bytes, oracle.transient_bytes);
  EXPECT_EQ(oracle.transient_bytes, 4 * MemoryPlan::kAlignment) << "one, sum, twice, result";
}

using ToyProgramDeathTest = ToyProgram;

TEST_F(ToyProgramDeathTest, RefusesStrangers) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  ThreadPool pool(1);
  const StateStorage storage(table);
  EXPECT_DEATH(CpuInterpreter(*program, plan_memory(*program, 2), storage, pool),
               "another number of threads");
  const StateStorage other(std::make_shared<StateTable>());
  EXPECT_DEATH(CpuInterpreter(*program, plan_memory(*program, 1), other, pool), "different states");
  CpuInterpreter interpreter(*program, plan_memory(*program, 1), storage, pool);
  EXPECT_DEATH(interpreter.view(x).as<float>(), "read as another dtype");
}

TEST(StateStorage, StartsAsZerosAndDoesNotOverlap) {
  auto states = std::make_shared<StateTable>();
  std::vector<StateId> ids;
  for (int i = 0; i < 5; ++i) {
    ids.push_back(states->add({.name = "s", .dtype = DType::bf16, .shape = {7, i + 1}}));
  }
  const StateStorage storage(states);
  for (size_t i = 0; i < ids.size(); ++i) {
    const TensorView view = storage.view(ids[i]);
    EXPECT_EQ(view.shape, (*states)[ids[i]].shape);
    EXPECT_EQ(view.dtype, DType::bf16);
    for (int64_t j = 0; j < view.shape.elements(); ++j) {
      ASSERT_EQ(view.as<bf16>()[j].bits, 0) << "tensor " << i;
      view.as<bf16>()[j] = bf16(1.0F);
    }
  }
  EXPECT_EQ(storage.bytes(), StateLayout(*states).bytes);
}

}  // namespace
}  // namespace troupe
