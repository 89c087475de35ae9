// What this machine reaches, measured: the figures of a GPU, or of a CPU, by which a plan says how
// long a step takes (plan/gpu_cluster.h), as a file for --gpus and --hardware.
//
// Each figure comes from a small program that the interpreter runs as it runs a step, on the CPU or
// on the first GPU; that of the memory from copying. Links are measured where there are several
// ranks (train/link_calibration.h).
//
// Takes some hundred megabytes of memory, or on a GPU some gigabytes. Errors are UserErrors;
// `report` may end the work by throwing.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "base/work_report.h"
#include "comm/process_group.h"
#include "options/device_options.h"
#include "plan/gpu_cluster.h"
#include "train/link_calibration.h"

namespace troupe {

// A linear map of `size` rows by a square matrix of that size.
struct ProductRate {
  DType dtype = DType::f32;
  int64_t size = 0;
  double flops_per_s = 0;
};

// Causal attention of sequences of this length, and its gradient, among products in a row.
struct AttentionRate {
  int64_t sequence = 0;
  double flops_per_s = 0;
  double gradient_flops_per_s = 0;
};

struct Calibration {
  GpuModel hardware;
  bool links_are_known = false;  // as those of the shipped kind that is like it
  std::vector<ProductRate> products;
  std::vector<AttentionRate> attention;
  double share_under_load = 1;  // of the best product's rate, of products in a row
  LinkCalibrations links;
};

// Of all threads of the machine, or of the first GPU; with spec.ranks above 1 also of what joins
// the ranks, which are `processes`, or, where that is null, threads of this one. All processes call
// it at once; nothing where rank 0 is another process's. `report` counts programs.
std::optional<Calibration> calibrate(const DeviceSpec& spec, ProcessGroup* processes,
                                     const WorkReport& report);

// What was measured by size, for people.
std::string text_of(const Calibration& calibration);

// The file: every figure, and where it comes from.
std::string file_of(const Calibration& calibration);

}  // namespace troupe
