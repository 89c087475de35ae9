// How much of the experts' exchanges overlaps with computation, beside a plain count of it.
#include "plan/exposure.h"

#include <gtest/gtest.h>
#include <set>
#include <string>
#include <vector>

#include "passes/overlap.h"
#include "plan/plan_test_support.h"
#include "program/op_spec.h"

namespace troupe {
namespace {

// What an operation reads, and what says how many rows of that there are.
std::set<int32_t> read_by(const Program& program, const Op& op) {
  std::set<int32_t> read;
  for (const ValueId id : program.inputs(op)) {
    if (!id.valid()) continue;
    read.insert(id.index);
    if (program.value(id).rows.valid()) read.insert(program.value(id).rows.counter.index);
  }
  return read;
}

Exposure count_plainly(const Program& program) {
  const Program expected = program.with_expected_rows();
  Exposure exposure;
  for (int32_t index = 0; index < program.op_count(); ++index) {
    if (!is_expert_exchange(program.op(index))) continue;
    std::set<int32_t> awaited;
    double flops = 0;
    for (int32_t other = index; other < program.op_count(); ++other) {
      const Op& op = program.op(other);
      bool waits = other == index;
      for (const int32_t id : read_by(program, op)) waits = waits || awaited.contains(id);
      if (!is_communication(op.place.queue)) {
        if (waits) break;
        flops += op.spec->cost(OpView{expected, op}).flops;
      } else if (waits) {
        for (const ValueId id : program.outputs(op)) awaited.insert(id.index);
      }
    }
    ++exposure.exchanges;
    exposure.covered += flops > 0 ? 1 : 0;
    exposure.flops += flops;
  }
  return exposure;
}

TEST(Exposure, CountsWhatRunsBesideExchanges) {
  const std::string model =
      "--model mixtral-tiny --num-layers 2 --seq-length 16 --global-batch-size 8 ";
  const std::string experts = model + "--ranks 4 --expert-model-parallel-size 4 ";
  for (const std::string& flags :
       {experts + "--moe-token-dispatcher-type alltoall",
        experts + "--moe-token-dispatcher-type flex --delay-wgrad-compute",
        experts + "--moe-token-dispatcher-type allgather --recompute-granularity selective "
                  "--recompute-modules moe"}) {
    SCOPED_TRACE(flags);
    const auto program = testing::program_of(flags);
    const Exposure expected = count_plainly(*program);
    const Exposure found = measure_exposure(*program);
    EXPECT_GT(expected.covered, 0);
    EXPECT_LT(expected.covered, expected.exchanges);
    EXPECT_EQ(found.exchanges, expected.exchanges);
    EXPECT_EQ(found.covered, expected.covered);
    EXPECT_DOUBLE_EQ(found.flops, expected.flops);
  }
  EXPECT_EQ(measure_exposure(*testing::program_of(model)).exchanges, 0);
}

TEST(Exposure, Text) {
  EXPECT_EQ(text_of(Exposure{24, 22, 1.53e9}),
            "24 operations, 22 overlap with compute (1.5 G flops)");
  EXPECT_EQ(text_of(Exposure{}), "");
}

}  // namespace
}  // namespace troupe
