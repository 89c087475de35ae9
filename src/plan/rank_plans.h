// The step programs of all ranks of a layout, built, checked and planned on one machine: nothing
// runs, no state is allocated, no other rank is needed.
//
// Ranks whose programs differ only in numbers (which ranks their groups consist of, which slice
// of a parameter or of the vocabulary is theirs, which micro-batches) are of one class. One program
// is built for each class and dropped again: what stays is its memory plan in numbers and the trace
// of its collectives. So the work grows with the places in the pipeline, not with the ranks.
//
// Pure functions of their arguments; any thread. plan_ranks() starts threads of its own.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/device.h"
#include "base/work_report.h"
#include "model/model_config.h"
#include "model/model_part.h"
#include "passes/step_programs.h"
#include "plan/expert_rows.h"
#include "plan/exposure.h"
#include "plan/kernel_variants.h"
#include "plan/link_traffic.h"
#include "plan/step_time.h"

namespace troupe {

struct RankClasses {
  std::vector<int32_t> first_rank;     // by class; they ascend
  std::vector<int32_t> class_of_rank;  // by rank
};

// `dtype`: that of the weights.
RankClasses classify_ranks(const ModelConfig& config, DType dtype,
                           const std::shared_ptr<const RunLayout>& run);

// What one rank of a class does in a step, and needs for it.
struct RankPlan {
  int32_t first_rank = 0;
  int32_t ranks = 0;
  std::array<uint64_t, kRoleCount> bytes_by_role{};       // as in MemoryPlan
  std::array<uint64_t, kRoleCount> host_bytes_by_role{};  // as in MemoryPlan
  uint64_t total_bytes = 0;
  uint64_t state_bytes = 0;
  std::string peak_operation;  // where most transient bytes are live
  int64_t operations = 0;
  int64_t collectives = 0;
  int64_t messages = 0;  // sent or received
  double operation_flops = 0;
  std::vector<KernelVariant> kernels;    // on a GPU
  std::vector<GroupTraffic> links;       // plan/link_traffic.h
  Exposure expert_exchange;              // plan/exposure.h
  ExpertRows expert_rows;                // plan/expert_rows.h
  uint64_t bytes_without_recompute = 0;  // total_bytes of the same step; 0: nothing is recomputed
  uint64_t bytes_without_offload = 0;    // of the same step; 0: no activations are offloaded
  TimedProgram timed;                    // where a cluster is given
  std::map<std::string_view, double> of_kinds;  // the same: seconds_of_kinds()
};

// "operation 7 (attention, layer 2, micro-batch 0)"
std::string describe_operation(const Program& program, int32_t index);

// The operation at which most transient bytes are live, of those of a memory plan.
int32_t peak_operation(const std::vector<uint64_t>& live_bytes);

// Of all operations.
double count_flops(const Program& program);

// The bytes of the step as it would be without recompute, or without offload of activations; 0
// where it is without already.
uint64_t bytes_without_recompute(const ModelConfig& config, const ModelState& state,
                                 const TrainingStepOptions& options, int threads, Device device,
                                 const DeviceTraits& gpu);
uint64_t bytes_without_offload(const ModelConfig& config, const ModelState& state,
                               const TrainingStepOptions& options, int threads, Device device,
                               const DeviceTraits& gpu);

// Of all classes, by first rank. Each program has passed verify_program() and its plan
// verify_memory_plan(); the collectives and messages of all ranks fit together, or it is the
// UserError of verify_collectives(). The same holds of the fallbacks of the steps, for which their
// memory has room, and of their evaluation, whose memory is not counted. `threads`: of one rank's
// pool; `gpu` as in plan_memory(). `workers` programs are in memory at once. `report` counts
// classes. `cluster`: whose GPUs the ranks have; their programs are then timed.
std::vector<RankPlan> plan_ranks(const ModelConfig& config, DType dtype,
                                 const std::shared_ptr<const RunLayout>& run,
                                 const TrainingStepOptions& options, int threads, int workers,
                                 Device device = Device::cpu, const DeviceTraits& gpu = {},
                                 const WorkReport& report = {},
                                 const GpuCluster* cluster = nullptr);

// The most bytes that successive ranks take which share a GPU, `ranks_per_gpu` of them each.
// plans[class_of_rank[r]] is that of rank r.
uint64_t largest_gpu_bytes(const std::vector<RankPlan>& plans,
                           const std::vector<int32_t>& class_of_rank, int32_t ranks_per_gpu);

}  // namespace troupe
