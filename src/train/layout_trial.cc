#include "train/layout_trial.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <vector>

#include "model/parameters.h"
#include "options/layout_options.h"
#include "options/model_options.h"
#include "options/step_spec.h"
#include "passes/memory_plan.h"
#include "passes/step_programs.h"
#include "plan/fallback_step.h"
#include "train/expert_room_choice.h"
#include "train/short_step.h"

namespace troupe {
namespace {

// Of the inputs of micro-batches; those of the whole step are scalars.
uint64_t input_bytes(const Program& program) {
  uint64_t bytes = 0;
  for (int32_t i = 0; i < program.value_count(); ++i) {
    const Value& value = program.value(ValueId{i});
    if (value.role != Role::input || value.shape.elements() == 1) continue;
    bytes += MemoryPlan::aligned(value.bytes());
  }
  return bytes;
}

// The step of some ranks of a layout with N rounds of micro-batches.
class ShortStep {
 public:
  ShortStep(const Options& options, const std::shared_ptr<const Model>& model,
            const GpuCluster& cluster, int32_t micro_batches, int32_t rounds)
      : model_(model),
        cluster_(cluster),
        spec_(step_spec_of(with_few_micro_batches(options, micro_batches, rounds),
                           model->config())) {}

  const RunLayout& run() const { return *spec_.layout; }
  int32_t micro_batches() const { return spec_.options.micro_batches; }

  struct Planned {
    uint64_t bytes = 0;                 // of the device
    uint64_t bytes_of_micro_batch = 0;  // of its inputs, which all have their own
    TimedProgram timed;
  };
  // `with_fallback`: the bytes are those with which the step's fallback has room, too.
  Planned plan(int32_t rank, bool with_fallback) const {
    const ModelState state = declare_model_state(model_, spec_.dtype, /*trained=*/true,
                                                 {.run = spec_.layout, .rank = rank});
    const TrainingStep step = build_training_step(spec_.model, state, spec_.options);
    const auto plan_one = [&](const Program& program) {
      return plan_memory(program, /*threads=*/1, Device::cuda, cluster_.model.traits);
    };
    MemoryPlan memory = plan_one(*step.program);
    Planned planned;
    planned.timed = time_program(*step.program, memory, cluster_, run().layout, rank);
    planned.bytes_of_micro_batch = input_bytes(*step.program) / micro_batches();
    if (with_fallback)
      plan_fallback_step(spec_.model, state, spec_.options, step, memory, plan_one);
    planned.bytes = memory.total_bytes();
    return planned;
  }

  // With the lowest number of a place in the pipeline.
  int32_t first_rank(int32_t place) const { return run().layout.rank_of(DensePlace{.pp = place}); }
  // What ranks of a tp group differ in is that the first alone counts the loss.
  std::vector<int32_t> kinds_of_ranks(int32_t place) const {
    std::vector<int32_t> ranks = {first_rank(place)};
    if (run().layout.tp() > 1) {
      ranks.push_back(run().layout.rank_of(DensePlace{.tp = 1, .pp = place}));
    }
    return ranks;
  }

 private:
  std::shared_ptr<const Model> model_;
  const GpuCluster& cluster_;
  StepSpec spec_;
};

int32_t micro_batches_of(const Options& options, const ModelConfig& config) {
  return run_layout_of(options, config).schedule.micro_batches;
}

// The most that ranks of these places take in a step with N micro-batches.
uint64_t fullest_bytes(const ShortStep& step, const std::vector<int32_t>& places,
                       int32_t micro_batches) {
  uint64_t most = 0;
  for (const int32_t place : places) {
    for (const int32_t rank : step.kinds_of_ranks(place)) {
      const ShortStep::Planned planned = step.plan(rank, /*with_fallback=*/true);
      const auto more = static_cast<uint64_t>(micro_batches - step.micro_batches());
      most = std::max(most, planned.bytes + more * planned.bytes_of_micro_batch);
    }
  }
  return most;
}

StepTime time_of(const std::vector<TimedProgram>& programs, const GpuCluster& cluster) {
  std::vector<const TimedProgram*> places;
  for (const TimedProgram& program : programs) places.push_back(&program);
  return simulate_step(places, cluster.model.launch_seconds);
}

// a + factor x (b - a), part by part.
StepTime continued(const StepTime& a, const StepTime& b, double factor) {
  const auto of = [&](double x, double y) { return x + factor * (y - x); };
  StepTime time;
  time.seconds = of(a.seconds, b.seconds);
  for (size_t i = 0; i < time.compute.size(); ++i) time.compute[i] = of(a.compute[i], b.compute[i]);
  for (size_t i = 0; i < time.exposed.size(); ++i) time.exposed[i] = of(a.exposed[i], b.exposed[i]);
  time.bubble = of(a.bubble, b.bubble);
  time.copies = of(a.copies, b.copies);
  time.idle = of(a.idle, b.idle);
  return time;
}

void set_speed(const Options& options, const Model& model, const RunLayout& run,
               int32_t micro_batches, const GpuCluster& cluster, LayoutTrial& trial) {
  const int32_t sequence = sequence_length_of(options, model.config());
  const double sequences =
      static_cast<double>(micro_batches) * options.micro_batch_size * run.layout.dp();
  const double of_gpu = trial.time.seconds * cluster.gpus;
  trial.tokens_per_s = sequences * sequence / of_gpu;
  trial.flops_per_s = model.training_flops(sequence) * sequences / of_gpu;
}

}  // namespace

LayoutTrial try_out(const Options& asked, const ModelConfig& config, const GpuCluster& cluster) {
  const Options options = with_least_expert_room(asked, config, cluster.expert_load);
  const auto model = std::make_shared<const Model>(config);
  const int32_t micro_batches = micro_batches_of(options, config);
  const ShortStep two(options, model, cluster, micro_batches, kFullRounds);
  const int32_t pp = two.run().layout.pp();
  const uint64_t available = cluster.model.memory_bytes;

  LayoutTrial trial;
  trial.expert_room = options.moe_expert_rank_capacity_factor.value_or(0);
  std::vector<TimedProgram> programs;
  int32_t fullest = 0;
  for (int32_t place = 0; place < pp; ++place) {
    ShortStep::Planned planned = two.plan(two.first_rank(place), /*with_fallback=*/false);
    if (planned.bytes > trial.bytes) {
      trial.bytes = planned.bytes;
      fullest = place;
    }
    if (trial.bytes > available) return trial;
    programs.push_back(std::move(planned.timed));
  }
  trial.bytes = std::max(trial.bytes, fullest_bytes(two, {fullest}, micro_batches));
  trial.fits = trial.bytes <= available;
  if (!trial.fits) return trial;
  trial.time = time_of(programs, cluster);
  if (two.micro_batches() < micro_batches) {
    const ShortStep three(options, model, cluster, micro_batches, kFullRounds + 1);
    programs.clear();
    for (int32_t place = 0; place < pp; ++place) {
      programs.push_back(three.plan(three.first_rank(place), /*with_fallback=*/false).timed);
    }
    trial.time = continued(trial.time, time_of(programs, cluster),
                           static_cast<double>(micro_batches - two.micro_batches()) /
                               static_cast<double>(three.micro_batches() - two.micro_batches()));
  }
  set_speed(options, *model, two.run(), micro_batches, cluster, trial);
  return trial;
}

void choose_room(const Options& asked, const ModelConfig& config, const GpuCluster& cluster,
                 LayoutTrial& trial) {
  Options timed = asked;
  // Unless it was asked for the time is that of a step without.
  timed.moe_paged_stash = asked.moe_paged_stash.value_or(false);
  const Options options = with_expert_room(timed, config, usable_bytes_of_gpu(asked));
  const int32_t micro_batches = micro_batches_of(options, config);
  const ShortStep step(options, std::make_shared<const Model>(config), cluster, micro_batches,
                       kFullRounds);
  std::vector<int32_t> places;
  for (int32_t place = 0; place < step.run().layout.pp(); ++place) places.push_back(place);
  trial.expert_room = options.moe_expert_rank_capacity_factor.value_or(0);
  trial.bytes = fullest_bytes(step, places, micro_batches);
  trial.fits = trial.bytes <= cluster.model.memory_bytes;
}

}  // namespace troupe
