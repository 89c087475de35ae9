// Tensor parallelism, with and without sequence parallelism, computes what one rank computes.
#include <gtest/gtest.h>

#include "layout/layout_run.h"
#include "program/test_models.h"

namespace troupe::testing {
namespace {

ModelConfig dense() {
  ModelConfig config = dense_model(2);
  return config;
}

std::vector<LayoutCase> cases() {
  std::vector<LayoutCase> all;
  for (const bool sequence_parallel : {false, true}) {
    for (const int32_t ranks : {2, 4}) {
      LayoutCase each;
      each.name = std::string("dense_tp2_of") + std::to_string(ranks) +
                  (sequence_parallel ? "_sp" : "");
      each.model = dense();
      each.layout.world_size = ranks;
      each.layout.tensor_parallel = 2;
      each.layout.sequence_parallel = sequence_parallel;
      each.micro_batches = 2;
      all.push_back(each);
    }
  }
  return all;
}

class TensorParallelLayout : public ::testing::TestWithParam<LayoutCase> {};

TEST_P(TensorParallelLayout, EqualsOneRank) {
  expect_same_outcome(run_one_rank(GetParam()), run_layout(GetParam()));
}

INSTANTIATE_TEST_SUITE_P(Layouts, TensorParallelLayout, ::testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace troupe::testing
