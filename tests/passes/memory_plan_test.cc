// Memory plan: checked against a second, simple-minded account of lifetimes (written here, not
// shared with the planner) on random programs and on the programs of real models.
#include "passes/memory_plan.h"

#include <algorithm>
#include <gtest/gtest.h>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "ops/exchange/offload/offload.h"
#include "passes/step_programs.h"
#include "program/test_models.h"
#include "program/toy_operations.h"
#include "program/verify.h"

namespace troupe {
namespace {

using namespace testing;

uint64_t aligned(uint64_t bytes) {
  return (bytes + 255) / 256 * 256;
}

bool is_transient(const Program& program, ValueId id) {
  return !is_persistent(program.value(id).role);
}

// First and last operation that touches each value, by the definition: operands, workspaces, row
// counters of operands, and results to the end.
struct Life {
  int32_t first = -1;
  int32_t last = -1;
};
std::vector<Life> lives_of(const Program& program) {
  std::vector<Life> lives(static_cast<size_t>(program.value_count()));
  const auto touch = [&](ValueId id, int32_t index) {
    if (!id.valid()) return;
    Life& life = lives[static_cast<size_t>(id.index)];
    if (life.first < 0) life.first = index;
    life.last = index;
  };
  for (int32_t index = 0; index < program.op_count(); ++index) {
    const Op& op = program.op(index);
    std::vector<ValueId> operands(program.inputs(op).begin(), program.inputs(op).end());
    operands.insert(operands.end(), program.outputs(op).begin(), program.outputs(op).end());
    for (const ValueId id : operands) {
      touch(id, index);
      if (id.valid()) touch(program.value(id).rows.counter, index);
    }
    touch(op.workspace, index);
  }
  for (const ValueId id : program.results()) {
    touch(id, program.op_count() - 1);
    touch(program.value(id).rows.counter, program.op_count() - 1);
  }
  return lives;
}

// Is `output` the result of `op` that its kind allows to be stored over `input`?
bool is_in_place_pair(const Program& program, const Op& op, ValueId input, ValueId output) {
  const OpSpec::InPlace pair = op.spec->in_place;
  return pair.output >= 0 && program.inputs(op)[static_cast<size_t>(pair.input)] == input &&
         program.outputs(op)[static_cast<size_t>(pair.output)] == output;
}

// Checks everything that the plan promises about transient values in one of the arenas. Quadratic.
void expect_sound_arena(const Program& program, const MemoryPlan& plan, bool on_host) {
  const std::vector<Life> lives = lives_of(program);
  std::vector<ValueId> transients;
  for (int32_t i = 0; i < program.value_count(); ++i) {
    if (is_transient(program, ValueId{i}) && lives[static_cast<size_t>(i)].first >= 0 &&
        (program.value(ValueId{i}).role == Role::offloaded) == on_host) {
      transients.push_back(ValueId{i});
    }
  }
  const uint64_t arena = on_host ? plan.host_transient_bytes : plan.transient_bytes;
  const auto begin = [&](ValueId id) { return plan.offset[static_cast<size_t>(id.index)]; };
  const auto end = [&](ValueId id) { return begin(id) + program.value(id).bytes(); };
  for (const ValueId a : transients) {
    ASSERT_EQ(begin(a) % MemoryPlan::kAlignment, 0U) << program.value(a).name;
    ASSERT_LE(end(a), arena) << program.value(a).name;
  }
  // Values that overlap in time must not overlap in memory, except a result that is stored over an
  // operand which dies in the same operation.
  for (size_t i = 0; i < transients.size(); ++i) {
    for (size_t j = i + 1; j < transients.size(); ++j) {
      ValueId a = transients[i];
      ValueId b = transients[j];
      const auto life = [&](ValueId id) { return lives[static_cast<size_t>(id.index)]; };
      if (life(b).first < life(a).first) std::swap(a, b);
      if (life(a).last < life(b).first || end(a) <= begin(b) || end(b) <= begin(a)) continue;
      ASSERT_TRUE(life(a).last == life(b).first &&
                  is_in_place_pair(program, program.op(life(b).first), a, b) &&
                  begin(a) == begin(b))
          << program.value(a).name << " and " << program.value(b).name;
    }
  }
  // Bytes that are live while an operation runs: the union of the live address ranges.
  uint64_t largest = 0;
  for (int32_t index = 0; index < program.op_count(); ++index) {
    std::vector<std::pair<uint64_t, uint64_t>> ranges;
    for (const ValueId id : transients) {
      const Life& life = lives[static_cast<size_t>(id.index)];
      if (life.first <= index && index <= life.last) {
        ranges.emplace_back(begin(id), begin(id) + aligned(program.value(id).bytes()));
      }
    }
    std::sort(ranges.begin(), ranges.end());
    ranges.erase(std::unique(ranges.begin(), ranges.end()), ranges.end());
    uint64_t live = 0;
    for (const auto& [from, to] : ranges) live += to - from;
    if (!on_host) {
      ASSERT_EQ(live, plan.live_bytes[static_cast<size_t>(index)]) << "operation " << index;
    }
    largest = std::max(largest, live);
  }
  EXPECT_LE(largest, arena);
  if (on_host) return;
  EXPECT_EQ(plan.largest_live_bytes, largest);
}

void expect_sound(const Program& program, const MemoryPlan& plan) {
  expect_sound_arena(program, plan, /*on_host=*/false);
  expect_sound_arena(program, plan, /*on_host=*/true);
  const auto sum = [](const auto& by_role) {
    return std::accumulate(by_role.begin(), by_role.end(), uint64_t{0});
  };
  EXPECT_EQ(sum(plan.bytes_by_role), plan.device_bytes()) << "roles must add up to the total";
  EXPECT_EQ(sum(plan.host_bytes_by_role), plan.host_bytes());
}

// A random program: sources of random sizes, results of random earlier values, several
// micro-batches, ragged values, weight gradients with workspace, copies to the host that come back
// sooner or later, and a few results.
std::unique_ptr<Program> make_random_program(uint32_t seed, const ToyState& state) {
  std::mt19937 random(seed);
  const auto draw = [&](uint32_t bound) { return random() % bound; };
  auto program = std::make_unique<Program>(state.table);
  Builder builder(*program);
  std::vector<ValueId> values = {toy_make(builder, 3, "shared")};
  std::vector<ValueId> on_host;
  const uint32_t micro_batches = 1 + draw(3);
  for (uint32_t micro_batch = 0; micro_batch < micro_batches; ++micro_batch) {
    builder.place.micro_batch = static_cast<int32_t>(micro_batch);
    const uint32_t ops = 5 + draw(60);
    for (uint32_t i = 0; i < ops; ++i) {
      // Mostly recent values, sometimes one from long ago.
      const size_t back = draw(4) == 0
                              ? draw(static_cast<uint32_t>(values.size()))
                              : draw(std::min<uint32_t>(4, static_cast<uint32_t>(values.size())));
      const ValueId x = values[values.size() - 1 - back];
      const bool ragged = program->value(x).rows.valid();
      switch (draw(7)) {
        case 0:
          values.push_back(toy_make(builder, 1 + draw(200), "make"));
          break;
        case 1:
        case 2:
          values.push_back(toy_halve(builder, x, "half"));
          break;
        case 3:
          if (!ragged) values.push_back(toy_mix(builder, x, x, "mix")[draw(2)]);
          break;
        case 4: {
          const ValueId counts = builder.emit(kToyCount, Attributes(NoAttributes()), {x}, "n")[0];
          values.push_back(
              builder.emit(kToyChoose, Attributes(NoAttributes()), {x, counts}, "some")[0]);
          break;
        }
        case 5:
          builder.emit(kToyScaleWeightGradient, Attributes(ToyAccumulate{}),
                       {x, x, builder.state(state.gradients[0])}, "dw");
          break;
        case 6:
          if (on_host.empty() || draw(2) == 0) {
            on_host.push_back(offload(builder, x, "host"));
          } else {
            const size_t which = draw(static_cast<uint32_t>(on_host.size()));
            values.push_back(reload(builder, on_host[which], "back"));
          }
          break;
      }
    }
  }
  for (int i = 0; i < 2; ++i) {
    program->add_result(values[draw(static_cast<uint32_t>(values.size()))]);
  }
  verify_program(*program);
  return program;
}

TEST(MemoryPlan, RandomPrograms) {
  const ToyState state = make_toy_state(1);
  for (uint32_t seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const auto program = make_random_program(seed, state);
    const MemoryPlan plan = plan_memory(*program, 2);
    verify_memory_plan(*program, plan);
    expect_sound(*program, plan);
    if (HasFatalFailure()) return;
  }
}

TEST(MemoryPlan, IsAFunctionOfTheProgram) {
  const ToyState state = make_toy_state(1);
  const auto program = make_random_program(7, state);
  EXPECT_EQ(plan_memory(*program, 2).offset, plan_memory(*program, 2).offset);
}

TEST(MemoryPlan, OracleReusesNothing) {
  const ToyState state = make_toy_state(1);
  for (uint32_t seed = 0; seed < 20; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const auto program = make_random_program(seed, state);
    const MemoryPlan plan = plan_oracle(*program, 1);
    verify_memory_plan(*program, plan);
    std::vector<std::pair<uint64_t, uint64_t>> ranges;
    std::vector<int> deaths(static_cast<size_t>(program->value_count()), 0);
    for (const auto& dead : plan.dead_after) {
      for (const ValueId id : dead) ++deaths[static_cast<size_t>(id.index)];
    }
    const std::vector<Life> lives = lives_of(*program);
    const auto results = program->results();
    for (int32_t i = 0; i < program->value_count(); ++i) {
      const ValueId id{i};
      const bool used = lives[static_cast<size_t>(i)].first >= 0;
      const bool kept = std::find(results.begin(), results.end(), id) != results.end();
      const bool dies = used && is_transient(*program, id) && !kept;
      EXPECT_EQ(deaths[static_cast<size_t>(i)], dies ? 1 : 0) << program->value(id).name;
      if (!used || !is_transient(*program, id)) continue;
      const uint64_t arena =
          program->value(id).role == Role::offloaded ? uint64_t{1} << 40 : uint64_t{0};
      const uint64_t begin = arena + plan.offset[static_cast<size_t>(i)];
      ranges.emplace_back(begin, begin + program->value(id).bytes());
    }
    for (size_t index = 0; index < plan.dead_after.size(); ++index) {
      for (const ValueId id : plan.dead_after[index]) {
        EXPECT_EQ(lives[static_cast<size_t>(id.index)].last, static_cast<int32_t>(index));
      }
    }
    std::sort(ranges.begin(), ranges.end());
    for (size_t i = 1; i < ranges.size(); ++i) {
      EXPECT_LE(ranges[i - 1].second, ranges[i].first) << "two values share memory";
    }
  }
}

// In-place sharing.
class InPlace : public ::testing::Test {
 protected:
  uint64_t offset(const MemoryPlan& plan, ValueId id) const {
    return plan.offset[static_cast<size_t>(id.index)];
  }
  ToyState state = make_toy_state(1);
  Program program{state.table};
  Builder builder{program};
};

TEST_F(InPlace, AChainTakesOneBuffer) {
  const ValueId a = toy_make(builder, 100, "a");
  const ValueId b = toy_halve(builder, a, "b");
  const ValueId c = toy_halve(builder, b, "c");
  const MemoryPlan plan = plan_memory(program, 1);
  EXPECT_EQ(offset(plan, a), offset(plan, b));
  EXPECT_EQ(offset(plan, a), offset(plan, c));
  EXPECT_EQ(plan.transient_bytes, aligned(builder.value(a).bytes()));
}

TEST_F(InPlace, NotOverAnOperandThatIsUsedLater) {
  const ValueId a = toy_make(builder, 100, "a");
  const ValueId b = toy_halve(builder, a, "b");
  toy_mix(builder, a, b, "c");
  EXPECT_NE(offset(plan_memory(program, 1), a), offset(plan_memory(program, 1), b));
}

TEST_F(InPlace, NotOverAResult) {
  const ValueId a = toy_make(builder, 100, "a");
  const ValueId b = toy_halve(builder, a, "b");
  toy_halve(builder, b, "c");
  program.add_result(a);
  EXPECT_NE(offset(plan_memory(program, 1), a), offset(plan_memory(program, 1), b));
}

TEST_F(InPlace, NotOverAnInputOrState) {
  const ValueId x = builder.input("x", DType::f32, {100, 4});
  const ValueId b = toy_halve(builder, x, "b");
  const ValueId c = toy_halve(builder, builder.state(state.parameters[0]), "c");
  toy_halve(builder, b, "keep");
  const MemoryPlan plan = plan_memory(program, 1);
  EXPECT_EQ(plan.live_bytes[0], aligned(builder.value(b).bytes()));
  EXPECT_EQ(plan.live_bytes[1],
            aligned(builder.value(b).bytes()) + aligned(builder.value(c).bytes()));
}

TEST_F(InPlace, NotOverAValueWhoseMemoryIsStillWantedThroughAnotherName) {
  // b takes a's memory and lives on; c = halve(a) must not exist before b, so a is still live then.
  const ValueId a = toy_make(builder, 100, "a");
  const ValueId b = toy_halve(builder, a, "b");
  const ValueId c = toy_halve(builder, a, "c");
  toy_mix(builder, b, c, "d");
  const MemoryPlan plan = plan_memory(program, 1);
  expect_sound(program, plan);
  EXPECT_EQ(offset(plan, a), offset(plan, c))
      << "a dies in the second operation, which may reuse it";
  EXPECT_NE(offset(plan, b), offset(plan, c));
}

using MemoryPlanDeathTest = InPlace;

TEST_F(MemoryPlanDeathTest, VerifierFindsAnOverlap) {
  const ValueId a = toy_make(builder, 100, "a");
  const ValueId b = toy_make(builder, 100, "b");
  toy_mix(builder, a, b, "c");
  MemoryPlan plan = plan_memory(program, 1);
  plan.offset[static_cast<size_t>(b.index)] = offset(plan, a) + MemoryPlan::kAlignment;
  EXPECT_DEATH(verify_memory_plan(program, plan), "b overlaps a at operation 1");
}

TEST_F(MemoryPlanDeathTest, VerifierFindsAnIllegalInPlaceResult) {
  const ValueId a = toy_make(builder, 100, "a");
  const ValueId b = toy_halve(builder, a, "b");
  toy_mix(builder, a, b, "c");
  MemoryPlan plan = plan_memory(program, 1);
  plan.offset[static_cast<size_t>(b.index)] = offset(plan, a);
  EXPECT_DEATH(verify_memory_plan(program, plan), "b overlaps a at operation 1");
}

TEST_F(MemoryPlanDeathTest, VerifierFindsAValueOutsideTheArena) {
  const ValueId a = toy_make(builder, 100, "a");
  toy_halve(builder, a, "b");
  MemoryPlan plan = plan_memory(program, 1);
  plan.offset[static_cast<size_t>(a.index)] = MemoryPlan::kAlignment;
  EXPECT_DEATH(verify_memory_plan(program, plan), "a lies outside the transient arena");
}

TEST_F(MemoryPlanDeathTest, VerifierFindsAnOverlapOnTheHost) {
  const ValueId a = offload(builder, toy_make(builder, 100, "x"), "a");
  const ValueId b = offload(builder, toy_make(builder, 100, "y"), "b");
  reload(builder, a, "back");
  reload(builder, b, "back");
  MemoryPlan plan = plan_memory(program, 1);
  verify_memory_plan(program, plan);
  plan.offset[static_cast<size_t>(b.index)] = offset(plan, a);
  EXPECT_DEATH(verify_memory_plan(program, plan), "b overlaps a at operation 3");
}

TEST_F(InPlace, TheHostHasAnArenaOfItsOwn) {
  const ValueId a = toy_make(builder, 100, "a");
  const ValueId host_a = offload(builder, a, "host_a");
  const ValueId b = toy_make(builder, 50, "b");
  const ValueId host_b = offload(builder, b, "host_b");
  const ValueId back = reload(builder, host_a, "back");
  const ValueId back_b = reload(builder, host_b, "back_b");
  toy_halve(builder, back, "c");
  toy_halve(builder, back_b, "d");
  for (const Device device : {Device::cpu, Device::cuda}) {
    const MemoryPlan plan = plan_memory(program, 1, device);
    const uint64_t bytes = aligned(builder.value(a).bytes());
    const uint64_t bytes_b = aligned(builder.value(b).bytes());
    EXPECT_EQ(plan.host_transient_bytes, bytes + bytes_b);
    // Most is live on the way back; on a GPU what is copied out is kept beside it, as nothing waits
    // for the copies before the end.
    const bool on_gpu = device == Device::cuda;
    EXPECT_EQ(plan.transient_bytes, (on_gpu ? 2 : 1) * (bytes + bytes_b));
    EXPECT_EQ(plan.host_bytes(), bytes + bytes_b);
    EXPECT_EQ(plan.total_bytes(),
              plan.transient_bytes + plan.state_bytes + (on_gpu ? 0 : plan.host_bytes()));
    verify_memory_plan(program, plan);
  }
}

TEST(StateLayout, TensorsOnTheHostLieApart) {
  StateTable table;
  const auto add = [&](Role role, bool on_host) {
    table.add({.name = "t", .shape = {20}, .role = role, .on_host = on_host});
  };
  add(Role::parameter, false);
  add(Role::optimizer, true);
  add(Role::optimizer, false);
  add(Role::optimizer, true);
  const StateLayout layout(table);
  EXPECT_EQ(layout.offset, (std::vector<uint64_t>{0, 0, 256, 256}));
  EXPECT_EQ(layout.bytes, 512U);
  EXPECT_EQ(layout.host_bytes, 512U);
  EXPECT_EQ(layout.bytes_by_role[static_cast<size_t>(Role::optimizer)], 256U);
  EXPECT_EQ(layout.host_bytes_by_role[static_cast<size_t>(Role::optimizer)], 512U);
}

TEST(StateLayout, TensorsLieOneAfterTheOther) {
  const ToyState state = make_toy_state(3);
  const StateLayout layout(*state.table);
  uint64_t next = 0;
  for (const bool gradients : {false, true}) {
    if (gradients) {
      EXPECT_EQ(layout.lasting_bytes, next);
    }
    for (int32_t i = 0; i < state.table->size(); ++i) {
      if (((*state.table)[StateId{i}].role == Role::gradient) != gradients) continue;
      EXPECT_EQ(layout.offset[static_cast<size_t>(i)], next);
      next += 256;
    }
  }
  EXPECT_EQ(layout.bytes, 256U * static_cast<uint64_t>(state.table->size()));
  EXPECT_EQ(layout.bytes_by_role[static_cast<size_t>(Role::parameter)], 4 * 256U);
  EXPECT_EQ(layout.bytes_by_role[static_cast<size_t>(Role::gradient)], 3 * 256U);
}

struct ModelCase {
  const char* name;
  ModelConfig config;
  DType dtype = DType::f32;
  int32_t sequence = 64;
};

std::ostream& operator<<(std::ostream& out, const ModelCase& model) {
  return out << model.name;
}

class ModelPlan : public ::testing::TestWithParam<ModelCase> {
 protected:
  TrainingStep build(int32_t micro_batches) const {
    return build_training_step(
        GetParam().config, state,
        {.micro_batch_size = 1, .micro_batches = micro_batches, .sequence = GetParam().sequence});
  }
  ModelState state = declare_model_state(GetParam().config, GetParam().dtype, /*trained=*/true);
};

TEST_P(ModelPlan, IsSound) {
  const TrainingStep step = build(2);
  verify_program(*step.program);
  const MemoryPlan plan = plan_memory(*step.program, 2);
  verify_memory_plan(*step.program, plan);
  expect_sound(*step.program, plan);
}

// Largest first leaves few holes in such programs: no more than a tenth above what must be live.
TEST_P(ModelPlan, WastesLittle) {
  const TrainingStep step = build(1);
  const MemoryPlan plan = plan_memory(*step.program, 1);
  EXPECT_LE(static_cast<double>(plan.transient_bytes),
            1.10 * static_cast<double>(plan.largest_live_bytes));
}

TEST_P(ModelPlan, DoesNotGrowWithTheMicroBatches) {
  const MemoryPlan one = plan_memory(*build(1).program, 1);
  const MemoryPlan three = plan_memory(*build(3).program, 1);
  const MemoryPlan nine = plan_memory(*build(9).program, 1);
  EXPECT_EQ(one.transient_bytes, three.transient_bytes);
  EXPECT_EQ(three.transient_bytes, nine.transient_bytes);
  EXPECT_EQ(one.state_bytes, nine.state_bytes);
}

TEST_P(ModelPlan, StoresResultsOverOperands) {
  const TrainingStep step = build(1);
  const Program& program = *step.program;
  const MemoryPlan plan = plan_memory(program, 1);
  int shared = 0;
  for (int32_t index = 0; index < program.op_count(); ++index) {
    const Op& op = program.op(index);
    const OpSpec::InPlace pair = op.spec->in_place;
    if (pair.output < 0) continue;
    const ValueId input = program.inputs(op)[static_cast<size_t>(pair.input)];
    const ValueId output = program.outputs(op)[static_cast<size_t>(pair.output)];
    if (!input.valid() || !is_transient(program, input)) continue;
    shared += plan.offset[static_cast<size_t>(input.index)] ==
              plan.offset[static_cast<size_t>(output.index)];
  }
  EXPECT_GE(shared, GetParam().config.num_layers) << "at least one in each layer";
}

INSTANTIATE_TEST_SUITE_P(
    Models, ModelPlan,
    ::testing::Values(ModelCase{"dense_2_layers", dense_model(2), DType::f32, 64},
                      ModelCase{"dense_8_layers", dense_model(8), DType::f64, 512},
                      ModelCase{"moe_2_layers", moe_model(2), DType::f32, 64},
                      ModelCase{"moe_8_layers", moe_model(8), DType::bf16, 256},
                      ModelCase{"mixtral_like_2_layers", mixtral_like_model(2), DType::f32, 512},
                      ModelCase{"mixtral_like_8_layers", mixtral_like_model(8), DType::f32, 128},
                      ModelCase{"mixtral_like_8_layers_bf16", mixtral_like_model(8), DType::bf16,
                                512}),
    [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace troupe
