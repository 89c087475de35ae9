// What this machine reaches, measured: the figures of a GPU, or of a CPU, by which a plan says how
// long a step takes (plan/gpu_cluster.h), as a file for --gpus and --hardware.
//
// Each figure comes from a small program that the interpreter runs as it runs a step, on the CPU or
// on the first GPU; that of the memory from copying. Links between ranks are not measured.
//
// One thread, which starts others. Takes some hundred megabytes of memory, or on a GPU some
// gigabytes. Errors are UserErrors; `report` may end the work by throwing.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "base/work_report.h"
#include "options/device_options.h"
#include "plan/gpu_cluster.h"

namespace troupe {

// A linear map of `size` rows by a square matrix of that size.
struct ProductRate {
  DType dtype = DType::f32;
  int64_t size = 0;
  double flops_per_s = 0;
};

struct Calibration {
  GpuModel hardware;
  bool links_are_known = false;  // as those of the shipped kind that is like it
  std::vector<ProductRate> products;
};

// Of all threads of the machine, or of the first GPU. `report` counts programs.
Calibration calibrate(const DeviceSpec& spec, const WorkReport& report);

// The products by size, for people.
std::string text_of(const Calibration& calibration);

// The file: every figure, and where it comes from.
std::string file_of(const Calibration& calibration);

}  // namespace troupe
