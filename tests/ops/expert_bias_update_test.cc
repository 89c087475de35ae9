// The update of the expert bias: direction, balance, the skip flag. (The generic tests cannot run
// it: it changes state.)
#include "ops/routing/expert_bias_update/expert_bias_update.h"

#include <algorithm>
#include <gtest/gtest.h>
#include <memory>
#include <vector>

#include "program/verify.h"
#include "runtime/cpu/cpu_interpreter.h"

namespace troupe::testing {
namespace {

// The bias after one update of `bias`.
std::vector<float> update(const std::vector<float>& bias, const std::vector<double>& counts,
                          double rate, int32_t skip = 0) {
  const auto experts = static_cast<int64_t>(bias.size());
  auto table = std::make_shared<StateTable>();
  const StateId state = table->add(
      {.name = "expert_bias", .dtype = DType::f32, .shape = {experts}, .role = Role::router_state});
  Program program(table);
  Builder builder(program);
  const ValueId bias_id = builder.state(state);
  const ValueId counts_id = builder.input("counts", DType::f64, {experts});
  const ValueId skip_id = builder.input("skip", DType::i32, {1});
  expert_bias_update(builder, bias_id, counts_id, skip_id, {.rate = rate});
  verify_program(program);
  ThreadPool pool(1);
  StateStorage storage(table);
  CpuInterpreter interpreter(program, plan_memory(program, 1), storage, pool);
  auto* data = interpreter.view(bias_id).as<float>();
  std::copy(bias.begin(), bias.end(), data);
  std::copy(counts.begin(), counts.end(), interpreter.view(counts_id).as<double>());
  *interpreter.view(skip_id).as<int32_t>() = skip;
  interpreter.run();
  return {data, data + experts};
}

TEST(ExpertBiasUpdate, MovesTowardsBalanceByTheRate) {
  // The mean is 5: the first expert is below, the second at, the third above it.
  EXPECT_EQ(update({0.5F, -1.0F, 0.25F, 0.0F}, {2, 5, 9, 4}, 0.125),
            (std::vector<float>{0.625F, -1.0F, 0.125F, 0.125F}));
}

TEST(ExpertBiasUpdate, HasNoBalancedExpertWhenTheMeanIsNoInteger) {
  EXPECT_EQ(update({0, 0, 0}, {3, 3, 4}, 1), (std::vector<float>{1, 1, -1}));
}

TEST(ExpertBiasUpdate, LeavesBalancedExpertsAlone) {
  const std::vector<float> bias = {0.5F, -0.5F, 0.125F};
  EXPECT_EQ(update(bias, {7, 7, 7}, 1), bias);
  EXPECT_EQ(update(bias, {0, 0, 0}, 1), bias);
  // Sums and products below 2^53 are exact.
  EXPECT_EQ(update(bias, {1e15 + 1, 1e15 + 1, 1e15 + 1}, 1), bias);
}

TEST(ExpertBiasUpdate, DoesNothingInASkippedStep) {
  const std::vector<float> bias = {0.5F, -0.5F};
  EXPECT_EQ(update(bias, {0, 9}, 1, /*skip=*/1), bias);
}

}  // namespace
}  // namespace troupe::testing
