// The GPUs that a plan is for: --gpus, or this machine's first.
//
// Reads files of configs/gpus, or the one that is named. Any thread. Errors are UserErrors (bad
// request) that name the flag or the file, and what would do.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "base/device.h"
#include "model/model_config.h"
#include "options/options.h"
#include "plan/gpu_cluster.h"

namespace troupe {

// What --gpus says: "64xh100", "64xFILE.toml", or "FILE.toml", which then says how many in `gpus`.
// Nothing where it is not given.
std::optional<GpuCluster> gpu_cluster_of(const Options& options);

// The same with the loads that --expert-load says.
std::optional<GpuCluster> gpu_cluster_of(const Options& options, const ModelConfig& config);

// Makes what --gpus implies of the other options: the device, as many ranks as GPUs, and that
// nothing runs. Refuses flags that contradict it, and numbers of GPUs that the layout cannot use.
void apply_gpus(Options& options);

// The value of --gpus with another number of GPUs.
std::string with_gpus(const std::string& gpus, int64_t count);

// The value of --hardware that turns the planned time off.
inline constexpr std::string_view kNoHardware = "none";
// The figures of one GPU: a kind of configs/gpus, or a file like those (--hardware).
GpuModel hardware_of(const std::string& name);
// Those of the shipped kind that has these traits and a little less than so much memory, if any.
std::optional<GpuModel> hardware_like(const DeviceTraits& traits, uint64_t bytes);

// Those that --hardware names; where it names none those like `gpu` of this machine, if any is
// given. Nothing where planned times are turned off.
std::optional<GpuModel> hardware_of_machine(const std::string& name, std::optional<int> gpu);

// What kernels are chosen by in plans: those of --gpus, of the first GPU here, or the default ones.
DeviceTraits planned_traits_of(const Options& options);

// Bytes of a GPU that a rank can use: of --gpus, or of the first GPU here; 0: there is none.
uint64_t usable_gpu_bytes(const Options& options);

}  // namespace troupe
