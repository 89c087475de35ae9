// What the page of a program shows of its memory and operations, and what it takes of measurements.
#include "report/step_page.h"

#include <algorithm>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "passes/memory_plan.h"
#include "program/toy_operations.h"
#include "support/errors.h"
#include "support/files.h"

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

std::string dumped(const nlohmann::ordered_json& document) {
  std::string text;
  for (const auto& [name, value] : document.items()) text += name + ": " + value.dump() + "\n";
  return text;
}

// Three layers of values of one name, two micro-batches, and names of one size, of which two are
// too many to be listed.
TEST(StepPage, HoldsTheWholeProgram) {
  const ToyState state = make_toy_state(2);
  Program program{state.table};
  Builder builder{program};
  std::vector<ValueId> kept;
  for (int16_t i = 0; i < 3; ++i) {
    builder.place = {.queue = Queue::compute, .layer = i, .micro_batch = i % 2};
    const ValueId a = toy_make(builder, 64 + 16 * i, "a");
    kept.push_back(toy_scale(builder, a, builder.state(state.parameters[0]), "b"));
  }
  for (int i = 0; i < 12; ++i) {
    kept.push_back(toy_make(builder, 16, "small" + std::to_string(i)));
  }
  builder.place = {.phase = Phase::optimizer, .queue = Queue::communication};
  for (const ValueId id : kept) toy_halve(builder, id, "end");
  const MemoryPlan plan = plan_memory(program, 1, Device::cuda);
  nlohmann::ordered_json document = step_json({.program = program,
                                               .plan = plan,
                                               .title = "of toys",
                                               .command = "troupe inspect",
                                               .text = "one\n\nthree\nlast"});
  document.erase("version");
  EXPECT_EQ(
      dumped(document),
      R"(title: "of toys")"
      "\n"
      R"(command: "troupe inspect")"
      "\n"
      R"(plan: {"bytes":{"parameters":768,"gradients":512,"optimizer":0,"router_state":0,)"
      R"("inputs":0,"metrics":0,"activations":13568,"workspace":0,"communication":0,"stash":0,)"
      R"("offloaded":0},"host_bytes":{"parameters":0,"gradients":0,"optimizer":0,)"
      R"("router_state":0,"inputs":0,"metrics":0,"activations":0,"workspace":0,)"
      R"("communication":0,"stash":0,"offloaded":0},"state_bytes":1280,"persistent_bytes":0,)"
      R"("transient_bytes":13568,"largest_live_bytes":13568,"scratch_bytes":0,)"
      R"("total_bytes":14848})"
      "\n"
      R"(memory: {"operations":[0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,)"
      R"(24,25,26,27,28,29,30,31,32],"bytes":{"activations":[1024,2048,2304,3584,3840,5376,)"
      R"(4096,4352,4608,4864,5120,5376,5632,5888,6144,6400,6656,6912,7936,9216,10752,11008,)"
      R"(11264,11520,11776,12032,12288,12544,12800,13056,13312,13568,13568],"workspace":[0,0,0,)"
      R"(0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0],"communication":[0,0,0,0,)"
      R"(0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0],"stash":[0,0,0,0,0,0,0,0,0,)"
      R"(0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0]}})"
      "\n"
      R"(peak: {"operation":31,"kind":"halve","phase":"optimizer","layer":-1,"micro_batch":-1,)"
      R"("bytes":13568,"names":14,"values":[{"name":"end","role":"activations","count":14,)"
      R"("bytes":6656,"first":18,"last":32},{"name":"b","role":"activations","count":3,)"
      R"("bytes":3840,"first":1,"last":32},{"name":"small0","role":"activations","count":1,)"
      R"("bytes":256,"first":6,"last":32},{"name":"small1","role":"activations","count":1,)"
      R"("bytes":256,"first":7,"last":32},{"name":"small2","role":"activations","count":1,)"
      R"("bytes":256,"first":8,"last":32},{"name":"small3","role":"activations","count":1,)"
      R"("bytes":256,"first":9,"last":32},{"name":"small4","role":"activations","count":1,)"
      R"("bytes":256,"first":10,"last":32},{"name":"small5","role":"activations","count":1,)"
      R"("bytes":256,"first":11,"last":32},{"name":"small6","role":"activations","count":1,)"
      R"("bytes":256,"first":12,"last":32},{"name":"small7","role":"activations","count":1,)"
      R"("bytes":256,"first":13,"last":32},{"name":"small8","role":"activations","count":1,)"
      R"("bytes":256,"first":14,"last":32},{"name":"small9","role":"activations","count":1,)"
      R"("bytes":256,"first":15,"last":32}]})"
      "\n"
      R"(phases: ["forward","dgrad","wgrad","recompute","optimizer"])"
      "\n"
      R"(queues: ["compute","copy","comm","tokens","network","pipe","replica"])"
      "\n"
      R"(operations: {"kinds":["make","scale","halve"],"kind":[0,1,0,1,0,1,0,0,0,0,0,0,0,0,0,0,)"
      R"(0,0,2,2,2,2,2,2,2,2,2,2,2,2,2,2,2],"phase":[0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,4,4,4,)"
      R"(4,4,4,4,4,4,4,4,4,4,4,4],"queue":[0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,2,2,2,2,2,2,2,2,)"
      R"(2,2,2,2,2,2,2],"layer":[0,0,1,1,2,2,2,2,2,2,2,2,2,2,2,2,2,2,-1,-1,-1,-1,-1,-1,-1,-1,)"
      R"(-1,-1,-1,-1,-1,-1,-1],"micro_batch":[0,0,1,1,0,0,0,0,0,0,0,0,0,0,0,0,0,0,-1,-1,-1,-1,)"
      R"(-1,-1,-1,-1,-1,-1,-1,-1,-1,-1,-1]})"
      "\n"
      R"(waits: [[1,18],[3,19],[5,20],[6,21],[7,22],[8,23],[9,24],[10,25],[11,26],[12,27],[13,)"
      R"(28],[14,29],[15,30],[16,31],[17,32]])"
      "\n"
      R"(kinds: [{"kind":"halve","count":15,"flops":0.0,"traffic_bytes":0.0},{"kind":"make",)"
      R"("count":15,"flops":0.0,"traffic_bytes":0.0},{"kind":"scale","count":3,"flops":960.0,)"
      R"("traffic_bytes":7680.0}])"
      "\n"
      R"(lines: ["one","","three","last"])"
      "\n"
      R"(lines_left_out: 0)"
      "\n");
}

// Of a chart of 600 columns: programs of as many operations, and of one more.
TEST(StepPage, AColumnOfTheChartStandsForAtLeastOneOperation) {
  for (const int32_t operations : {599, 600, 601}) {
    const ToyState state = make_toy_state(2);
    Program program{state.table};
    Builder builder{program};
    for (int32_t i = 0; i < operations; ++i) toy_make(builder, i == 300 ? 32 : 16, "a");
    const MemoryPlan plan = plan_memory(program, 1, Device::cpu);
    const auto shown =
        step_json({.program = program, .plan = plan, .title = {}, .command = {}, .text = {}});
    const auto& columns = shown["memory"]["operations"];
    EXPECT_EQ(columns.size(), static_cast<size_t>(std::min(operations, 600)));
    EXPECT_EQ(columns.front(), 0);
    EXPECT_EQ(columns[300], 300);
    EXPECT_EQ(shown["peak"]["operation"], 300);
    EXPECT_EQ(shown["peak"]["values"].size(), 1U) << "it is used nowhere else";
  }
}

TEST(StepPage, TextsOfTooManyLinesAreCut) {
  const ToyState state = make_toy_state(2);
  Program program{state.table};
  Builder builder{program};
  toy_make(builder, 4, "a");
  const MemoryPlan plan = plan_memory(program, 1, Device::cpu);
  for (const int lines : {19'999, 20'000, 20'002}) {
    std::string text;
    for (int i = 0; i < lines; ++i) text += "x\n";
    const auto shown =
        step_json({.program = program, .plan = plan, .title = {}, .command = {}, .text = text});
    EXPECT_EQ(shown["lines"].size(), static_cast<size_t>(std::min(lines, 20'000)));
    EXPECT_EQ(shown["lines_left_out"], std::max(0, lines - 20'000));
  }
}

class Measured : public ::testing::Test {
 protected:
  Measured() : state(make_toy_state(2)), program(state.table) {
    Builder builder{program};
    toy_halve(builder, toy_make(builder, 4, "a"), "b");
  }
  std::string write(const std::string& text) const {
    put_file(folder / "measured.json", text);
    return folder / "measured.json";
  }
  std::string shown_of(const std::string& text) const {
    return measured_json(program, write(text), 1).dump();
  }
  std::string refusal_of(const std::string& text) const {
    const std::string message = message_of(ExitStatus::bad_request, [&] { shown_of(text); });
    const std::string beginning = "--measured " + (folder / "measured.json") + ": ";
    EXPECT_TRUE(message.starts_with(beginning)) << message;
    return message.substr(std::min(message.size(), beginning.size()));
  }
  std::string of_events(const std::string& events) const {
    return R"({"traceEvents": [)" + events + "]}";
  }
  static std::string event(const std::string& phase, int rank, const std::string& operation,
                           const std::string& name) {
    return R"({"ph": ")" + phase + R"(", "pid": )" + std::to_string(rank) + R"(, "name": ")" +
           name + R"(", "ts": 2.5, "dur": 4, "args": {)" + operation + "}}";
  }

  ToyState state;
  Program program;
  TempFolder folder;
};

constexpr const char* kOtherProgram =
    "this was measured with another program than the one that these flags describe. Give the flags "
    "that bench or train had (--config RUN/options.toml).";

// Of timelines: the operations of the rank alone.
TEST_F(Measured, OperationsOfTheRankAreTaken) {
  const std::string second = event("X", 1, R"("operation": 1)", "halve");
  EXPECT_EQ(shown_of(of_events(event("X", 1, R"("operation": 0)", "make") + "," + second)),
            R"({"spans":[[0,2.5,4],[1,2.5,4]]})");
  for (const std::string& other :
       {event("M", 1, R"("operation": 0)", "make"), event("X", 0, R"("operation": 0)", "make"),
        event("X", 1, "", "make"), std::string(R"({"ph": "X", "pid": 1, "name": "make"})"),
        std::string("{}")}) {
    EXPECT_EQ(shown_of(of_events(other + "," + second)), R"({"spans":[[1,2.5,4]]})") << other;
  }
  EXPECT_EQ(refusal_of(of_events("")), "the timeline has no operations of rank 1.");
  EXPECT_EQ(refusal_of(of_events(event("X", 1, R"("operation": 2)", "halve"))), kOtherProgram);
  EXPECT_EQ(refusal_of(of_events(event("X", 1, R"("operation": 1)", "make"))), kOtherProgram);
}

TEST_F(Measured, OfABenchIsTakenWhatIsShown) {
  EXPECT_EQ(shown_of(R"({"operations": 2, "allocated_bytes": 7, "tokens_per_s": 3.5,
                         "step_time_s": 0.5, "tflops_per_gpu": 1, "matmul_limit_share": 0.25,
                         "matmul_limit_flops_per_s": 8, "copy_limit_bytes_per_s": 9,
                         "planned_bytes": 6, "other_device_bytes": 5, "kinds": [], "threads": 1})"),
            R"({"bench":{"step_time_s":0.5,"tokens_per_s":3.5,"tflops_per_gpu":1,)"
            R"("matmul_limit_share":0.25,"matmul_limit_flops_per_s":8,"copy_limit_bytes_per_s":9,)"
            R"("planned_bytes":6,"allocated_bytes":7,"other_device_bytes":5,"kinds":[]}})");
  EXPECT_EQ(shown_of(R"({"operations": 2, "allocated_bytes": 7})"),
            R"({"bench":{"allocated_bytes":7}})");
  for (const char* operations : {"1", "3", "null"}) {
    EXPECT_EQ(
        refusal_of(std::string(R"({"allocated_bytes": 7, "operations": )") + operations + "}"),
        kOtherProgram);
  }
  const std::string neither =
      "this is neither what bench --json printed nor a timeline of --profile.";
  EXPECT_EQ(refusal_of(R"({"operations": 2})"), neither);
  EXPECT_EQ(refusal_of(R"(["allocated_bytes", "traceEvents"])"), neither);
}

}  // namespace
}  // namespace troupe
