// What the page of a program shows of its memory.
#include "report/step_page.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "passes/memory_plan.h"
#include "program/toy_operations.h"

namespace troupe {
namespace {

using namespace testing;

// Roles together at every operation, on a GPU also what waits there for another queue.
TEST(StepPage, MemoryOverTimeIsThatOfThePlan) {
  const ToyState state = make_toy_state(2);
  Program program{state.table};
  Builder builder{program};
  builder.place = {.queue = Queue::compute, .layer = 0};
  const ValueId a = toy_make(builder, 64, "a");
  builder.place.queue = Queue::communication;
  const ValueId b = toy_halve(builder, a, "b");
  builder.place.queue = Queue::compute;
  toy_make(builder, 32, "c");
  toy_make(builder, 32, "d");
  toy_halve(builder, b, "e");
  std::vector<nlohmann::ordered_json> pages;
  for (const Device device : {Device::cpu, Device::cuda}) {
    const MemoryPlan plan = plan_memory(program, 1, device);
    const StepOnPage step{.program = program, .plan = plan, .title = {}, .command = {}, .text = {}};
    pages.push_back(step_json(step)["memory"]);
    const nlohmann::ordered_json& memory = pages.back();
    ASSERT_EQ(memory["operations"].size(), static_cast<size_t>(program.op_count()));
    for (size_t i = 0; i < memory["operations"].size(); ++i) {
      uint64_t bytes = 0;
      for (const auto& [role, values] : memory["bytes"].items()) bytes += values[i].get<uint64_t>();
      EXPECT_EQ(bytes, plan.live_bytes[i])
          << (device == Device::cuda ? "GPU" : "CPU") << ", operation " << i;
    }
  }
  EXPECT_NE(pages[0], pages[1]) << "on a GPU a is kept while the other queue may read it";
}

}  // namespace
}  // namespace troupe
