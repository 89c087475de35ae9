// How fast Troupe's CUDA kernels are on a GPU: the time of one operation by itself.
//
//   time = max(products / (rate of large products x share of its kernel),
//              bytes / (bandwidth of a copy x share of its kernel),
//              bytes of optimizer state on the host / (bandwidth of the host's link x its share))
//
// A product that leaves multiprocessors to an exchange (passes/overlap.h) has the rate of
// the others. Shares are properties of the kernels and few: docs/benchmarks/plan_time.md lists
// them, says what they were fitted to, and how far the times of whole steps are off.
//
// Pure functions; any thread.
#pragma once

#include <string_view>

#include "plan/gpu_cluster.h"
#include "program/program.h"

namespace troupe {

// What limits an operation, and so how a step's time is divided.
enum class TimePart : uint8_t {
  dense_products,
  expert_products,
  attention,
  memory_bound,  // norms, activations, permutations, losses
  update,        // the optimizer's, and the gradients' norm
  exchange,      // between ranks
  copies,        // between GPU and host
};
inline constexpr int kTimePartCount = static_cast<int>(TimePart::copies) + 1;
std::string_view name_of(TimePart part);

TimePart part_of(const Op& op);

// Does its kernel leave multiprocessors of the GPU to others, or take a part of them alone?
bool leaves_multiprocessors(const OpView& op, const DeviceTraits& traits);

// Seconds of the operation at `index` on this rank alone; what it sends counts in step_time.h.
// `expected` is `program` with expected rows. `traffic`: what it sends,
// over what is expected.
double seconds_of(const Program& program, const Program& expected, int32_t index,
                  const GpuModel& gpu, double traffic = 1);

}  // namespace troupe
