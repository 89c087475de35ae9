#include "plan/rank_plans.h"

#include <algorithm>
#include <array>
#include <map>
#include <mutex>

#include "model/parameters.h"
#include "parallel/collective_schedule.h"
#include "passes/inference_programs.h"
#include "passes/memory_plan.h"
#include "passes/rank_sums.h"
#include "plan/fallback_step.h"
#include "plan/for_each_item.h"
#include "program/op_spec.h"
#include "program/verify.h"

namespace troupe {
namespace {

// All of a rank that its program depends on, except numbers in attributes: where it stands among
// the stages, how much it holds of each parameter, and what it does with the gradient. Optimizer
// state, and what of it is on the host, follow from that.
std::vector<int64_t> class_key(const std::shared_ptr<const Model>& model, DType dtype,
                               const ModelPart& part) {
  const DensePlace dense = part.dense();
  std::vector<int64_t> key = {
      dense.pp,
      // The loss counts once in a tp group, and the vocabulary's first slice needs no shift.
      dense.tp == 0,
  };
  const ModelState state = declare_model_state(model, dtype, /*trained=*/false, part);
  for (const Parameter& parameter : state.parameters) {
    const GradientDuty duty = gradient_duty(parameter, part);
    key.push_back(parameter.id.index);
    for (const auto& ranges : parameter.slice.ranges) {
      for (const IndexRange& range : ranges) key.push_back(range.end - range.begin);
      key.push_back(-1);  // the dimension's end
    }
    key.push_back(parameter.shard.end - parameter.shard.begin);
    key.push_back(parameter.held.end - parameter.held.begin);
    key.push_back(duty.counts);
    key.push_back(duty.leads_shared);
    key.push_back(duty.first_shared_row.value_or(-1));
  }
  return key;
}

struct BuiltClass {
  RankPlan plan;
  // Of the step, its fallback (empty where there is none), and the evaluation.
  std::array<CollectiveTrace, 3> traces;
};

// Of an evaluation, which runs between steps.
CollectiveTrace trace_evaluation(const ModelConfig& config, const ModelState& state,
                                 const TrainingStepOptions& options) {
  const InferenceStep step = build_evaluation_step(config, state, options.micro_batch_size,
                                                   options.sequence, options.loss_chunk_tokens,
                                                   options.reset_attention_mask, options.precision);
  verify_program(*step.program);
  return trace_collectives(*step.program);
}

BuiltClass build_class(const std::shared_ptr<const Model>& model, DType dtype,
                       const ModelPart& part, const TrainingStepOptions& options, int threads,
                       Device device, const DeviceTraits& gpu, const GpuCluster* cluster) {
  const ModelConfig& config = model->config();
  const ModelState state = declare_model_state(model, dtype, /*trained=*/true, part);
  const TrainingStep step = build_training_step(config, state, options);
  const Program& program = *step.program;
  const auto plan_verified = [&](const Program& each) {
    verify_program(each);
    MemoryPlan memory = plan_memory(each, threads, device, gpu);
    verify_memory_plan(each, memory);
    return memory;
  };
  MemoryPlan memory = plan_verified(program);
  BuiltClass built;
  auto& [of_step, of_fallback, of_evaluation] = built.traces;
  of_step = trace_collectives(program);
  if (const std::optional<FallbackStep> fallback =
          plan_fallback_step(config, state, options, step, memory, plan_verified)) {
    of_fallback = trace_collectives(*fallback->step.program);
  }
  of_evaluation = trace_evaluation(config, state, options);
  RankPlan& plan = built.plan;
  plan.first_rank = part.rank;
  plan.bytes_by_role = memory.bytes_by_role;
  plan.host_bytes_by_role = memory.host_bytes_by_role;
  plan.total_bytes = memory.total_bytes();
  plan.state_bytes = memory.state_bytes;
  plan.peak_operation = describe_operation(program, peak_operation(memory.live_bytes));
  plan.operations = program.op_count();
  plan.operation_flops = count_flops(program);
  if (device == Device::cuda) plan.kernels = kernel_variants(program, gpu);
  if (cluster != nullptr) {
    plan.timed = time_program(program, memory, *cluster, part.layout(), part.rank);
    plan.of_kinds = seconds_of_kinds(program, plan.timed);
  }
  plan.links = link_traffic(program, part.layout(), part.rank);
  plan.expert_exchange = measure_exposure(program);
  plan.expert_rows = expert_rows_of(program, step.rooms_lacked.valid());
  plan.bytes_without_recompute =
      bytes_without_recompute(config, state, options, threads, device, gpu);
  plan.bytes_without_offload = bytes_without_offload(config, state, options, threads, device, gpu);
  for (const CollectiveTrace::Event& event : of_step.events) {
    if (!event.message) {
      ++plan.collectives;
    } else if (event.message->action != MessageUse::Action::finish) {
      ++plan.messages;
    }
  }
  return built;
}

}  // namespace

RankClasses classify_ranks(const ModelConfig& config, DType dtype,
                           const std::shared_ptr<const RunLayout>& run) {
  const auto model = std::make_shared<const Model>(config);
  RankClasses classes;
  std::map<std::vector<int64_t>, int32_t> known;
  for (int32_t rank = 0; rank < run->layout.world_size(); ++rank) {
    const auto [found, is_new] =
        known.try_emplace(class_key(model, dtype, {.run = run, .rank = rank}),
                          static_cast<int32_t>(classes.first_rank.size()));
    if (is_new) classes.first_rank.push_back(rank);
    classes.class_of_rank.push_back(found->second);
  }
  return classes;
}

std::string describe_operation(const Program& program, int32_t index) {
  const Op& op = program.op(index);
  std::string text = "operation " + std::to_string(index) + " (" + op.spec->name;
  if (op.place.layer >= 0) text += ", layer " + std::to_string(op.place.layer);
  if (op.place.micro_batch >= 0) text += ", micro-batch " + std::to_string(op.place.micro_batch);
  return text + ")";
}

int32_t peak_operation(const std::vector<uint64_t>& live_bytes) {
  return static_cast<int32_t>(std::max_element(live_bytes.begin(), live_bytes.end()) -
                              live_bytes.begin());
}

double count_flops(const Program& program) {
  double flops = 0;
  const Program expected = program.with_expected_rows();
  for (int32_t index = 0; index < expected.op_count(); ++index) {
    const Op& op = expected.op(index);
    if (op.spec->cost != nullptr) flops += op.spec->cost(OpView{expected, op}).flops;
  }
  return flops;
}

uint64_t bytes_without_recompute(const ModelConfig& config, const ModelState& state,
                                 const TrainingStepOptions& options, int threads, Device device,
                                 const DeviceTraits& gpu) {
  if (!options.recompute.any()) return 0;
  TrainingStepOptions keeping = options;
  keeping.recompute = {};
  return plan_memory(*build_training_step(config, state, keeping).program, threads, device, gpu)
      .total_bytes();
}

uint64_t bytes_without_offload(const ModelConfig& config, const ModelState& state,
                               const TrainingStepOptions& options, int threads, Device device,
                               const DeviceTraits& gpu) {
  if (!options.offload.any()) return 0;
  TrainingStepOptions keeping = options;
  keeping.offload = {};
  return plan_memory(*build_training_step(config, state, keeping).program, threads, device, gpu)
      .total_bytes();
}

std::vector<RankPlan> plan_ranks(const ModelConfig& config, DType dtype,
                                 const std::shared_ptr<const RunLayout>& run,
                                 const TrainingStepOptions& options, int threads, int workers,
                                 Device device, const DeviceTraits& gpu, const WorkReport& report,
                                 const GpuCluster* cluster) {
  const RankClasses classes = classify_ranks(config, dtype, run);
  const auto model = std::make_shared<const Model>(config);
  std::vector<RankPlan> plans(classes.first_rank.size());
  std::array<std::vector<CollectiveTrace>, std::tuple_size_v<decltype(BuiltClass::traces)>> traces;
  traces.fill(std::vector<CollectiveTrace>(plans.size()));
  std::mutex mutex;
  uint64_t done = 0;
  for_each_item(plans.size(), workers, [&](size_t i) {
    BuiltClass built = build_class(model, dtype, {.run = run, .rank = classes.first_rank[i]},
                                   options, threads, device, gpu, cluster);
    plans[i] = std::move(built.plan);
    for (size_t program = 0; program < traces.size(); ++program) {
      traces[program][i] = std::move(built.traces[program]);
    }
    const std::lock_guard lock(mutex);
    if (report) report(++done, plans.size());
  });
  for (const int32_t number : classes.class_of_rank) ++plans[static_cast<size_t>(number)].ranks;
  for (const std::vector<CollectiveTrace>& of_classes : traces) {
    verify_collectives(of_classes, classes.class_of_rank, run->layout);
  }
  return plans;
}

uint64_t largest_gpu_bytes(const std::vector<RankPlan>& plans,
                           const std::vector<int32_t>& class_of_rank, int32_t ranks_per_gpu) {
  uint64_t largest = 0;
  uint64_t sum = 0;
  for (size_t rank = 0; rank < class_of_rank.size(); ++rank) {
    if (rank % static_cast<size_t>(ranks_per_gpu) == 0) sum = 0;
    sum += plans[static_cast<size_t>(class_of_rank[rank])].total_bytes;
    largest = std::max(largest, sum);
  }
  return largest;
}

}  // namespace troupe
