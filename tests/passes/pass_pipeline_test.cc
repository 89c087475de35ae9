// The pipeline of passes: names, what it runs and skips, and what it refuses.
#include "passes/pass_pipeline.h"

#include <gtest/gtest.h>
#include <memory>
#include <string>
#include <vector>

#include "ops/elementwise/add/add.h"
#include "ops/elementwise/fill/fill.h"
#include "program/builder.h"

namespace troupe {
namespace {

class PassPipelineTest : public ::testing::Test {
 protected:
  // 0: a, 1: b, 2: c = a + a, 3: a copy of b that nothing reads
  PassPipelineTest() : program(std::make_shared<StateTable>()) {
    Builder builder(program);
    const ValueId a = fill(builder, 1, DType::f64, {2}, "a");
    const ValueId b = fill(builder, 2, DType::f64, {2}, "b");
    program.add_result(add(builder, a, a, "c"));
    add(builder, b, b, "unread");
    controls.watch = [&](const PassRecord& record, const Program&) { records.push_back(record); };
  }

  void run(PassId id, const std::vector<int32_t>& order) {
    PassPipeline(program, controls, 0).run(id, [&](const Program&) { return order; });
  }

  Program program;
  PassControls controls;
  std::vector<PassRecord> records;
};

TEST(Passes, HaveNames) {
  for (const PassInfo& pass : all_passes()) {
    EXPECT_EQ(name_of(pass.id), pass.name);
    EXPECT_FALSE(pass.purpose.empty());
  }
}

TEST_F(PassPipelineTest, MovesAndDrops) {
  run(PassId::schedule, {1, 0, 2});
  ASSERT_EQ(records.size(), 2U);
  EXPECT_EQ(records[0].id, PassId::emission);
  EXPECT_EQ(records[0].ops_after, 4);
  EXPECT_EQ(records[1].id, PassId::schedule);
  EXPECT_EQ(records[1].ops_before, 4);
  EXPECT_EQ(records[1].ops_after, 3);
  EXPECT_EQ(records[1].ops_moved, 3);
  EXPECT_EQ(program.value(program.outputs(program.op(0)).front()).name, "b");
}

TEST_F(PassPipelineTest, PutsWhatAPassAddsWhereItBelongs) {
  PassPipeline(program, controls, 0).run(PassId::recompute, [](Program& own) {
    Builder builder(own);
    fill(builder, 3, DType::f64, {2}, "added");
    return std::vector<int32_t>{0, 4, 1, 2, 3};
  });
  EXPECT_EQ(records.back().ops_before, 4);
  EXPECT_EQ(records.back().ops_after, 5);
  EXPECT_EQ(records.back().ops_moved, 0);
  EXPECT_EQ(program.value(program.outputs(program.op(1)).front()).name, "added");
}

TEST_F(PassPipelineTest, LeavesAProgramThatIsInOrder) {
  run(PassId::copies, {0, 1, 2, 3});
  EXPECT_EQ(records.back().ops_moved, 0);
  EXPECT_EQ(program.op_count(), 4);
}

TEST_F(PassPipelineTest, DropsTheLast) {
  run(PassId::schedule, {0, 1, 2});
  EXPECT_EQ(records.back().ops_moved, 0);
  EXPECT_EQ(program.op_count(), 3);
}

TEST_F(PassPipelineTest, SkipsWhatItIsTold) {
  controls.skipped = {PassId::gathers, PassId::schedule};
  run(PassId::schedule, {1, 0, 2});
  EXPECT_EQ(records.size(), 1U);
  EXPECT_EQ(program.op_count(), 4);
}

TEST_F(PassPipelineTest, RefusesAnOrderThatBreaksADependency) {
  EXPECT_DEATH(run(PassId::schedule, {2, 0, 1}), "was moved across an operation");
}

}  // namespace
}  // namespace troupe
