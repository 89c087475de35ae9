// What the time of a plan is for: what one GPU can do, what its links carry, how many there are,
// and how unevenly the router loads them. Rates are those that large pieces of work reach, not
// those of data sheets.
//
// Plain values; any thread.
#pragma once

#include <cstdint>
#include <string>

#include "base/device.h"
#include "base/dtype.h"
#include "plan/expert_load.h"

namespace troupe {

// The compute capability of a CPU, whose operations have no kernels to choose from.
inline constexpr int32_t kNoGpu = 0;

struct GpuModel {
  std::string name;      // "NVIDIA H100 SXM 80 GB"
  bool measured = true;  // false: estimated from data sheets
  DeviceTraits traits;
  uint64_t memory_bytes = 0;    // that a run can use
  double bf16_flops = 0;        // per second, in large dense products
  double f32_flops = 0;         // the same
  double f64_flops = 0;         // the same
  double attention_scale = 1;   // attention's rate, of what its shares of products say
  double memory_bandwidth = 0;  // bytes per second of a copy, read and written
  double host_bandwidth = 0;    // bytes per second between GPU and host, each way
  int32_t gpus_per_node = 8;
  int32_t gpus_per_nvlink = 8;   // that NVLink joins; nodes of a rack may share one
  double nvlink_bandwidth = 0;   // bytes per second that a GPU sends
  double nvlink_latency = 0;     // seconds
  double network_bandwidth = 0;  // bytes per second that a GPU sends
  double network_latency = 0;    // seconds
  double launch_seconds = 0;     // between one operation of a queue and the next
  double storage_bandwidth = 0;  // bytes per second that all nodes write together; 0: not known

  double product_flops(DType dtype) const {
    if (is_half(dtype)) return bf16_flops;
    return dtype == DType::f64 ? f64_flops : f32_flops;
  }
};

// Rank r has GPU r; nodes are filled one after the other.
struct GpuCluster {
  GpuModel model;
  int32_t gpus = 1;
  ExpertLoad expert_load = {};

  int32_t node_of(int32_t rank) const { return rank / model.gpus_per_node; }
  bool shares_nvlink(int32_t rank, int32_t other) const {
    return rank / model.gpus_per_nvlink == other / model.gpus_per_nvlink;
  }
};

}  // namespace troupe
