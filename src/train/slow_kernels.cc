#include "train/slow_kernels.h"

#include <fmt/format.h>
#include <map>
#include <utility>

#include "base/error.h"
#include "plan/gpu_cluster.h"
#include "program/op_spec.h"
#include "runtime/device_memory.h"

namespace troupe {
namespace {

struct Advice {
  std::string why;
  std::string change;
};

Advice advice_on(SlowKernel slow, const DeviceTraits& gpu) {
  switch (slow) {
    case SlowKernel::no:
      break;
    case SlowKernel::dtype:
      return {"the fast kernels are for bf16", "Use --bf16"};
    case SlowKernel::mixed_dtypes:
      return {"cuBLASLt does not combine these dtypes", "Use --moe-router-dtype fp32"};
    case SlowKernel::bias_dtype:
      return {"cuBLASLt adds no bias of this dtype to this result",
              "Use --disable-bias-linear or --bf16"};
    case SlowKernel::head_size:
      return {"the fast kernels take heads of 8, 16, ... 256 elements",
              "Choose such --kv-channels"};
    case SlowKernel::dropout:
      return {"the fast kernels have no dropout", "Use --attention-dropout 0"};
    case SlowKernel::documents:
      return {
          "within documents the fast kernels take keys of up to 192 elements and values of up to "
          "128",
          "Leave --reset-attention-mask out"};
    case SlowKernel::one_query:
      return {"a rank has a single query of a chunk",
              "Use a longer --seq-length or a smaller --context-parallel-size"};
    case SlowKernel::row_bytes:
      return {"tensor cores are fed with rows of a multiple of 16 bytes",
              "Choose multiples of 8 for --hidden-size, and for --moe-ffn-hidden-size over "
              "--expert-tensor-parallel-size"};
    case SlowKernel::row_codes:
      return {"tensor cores are fed with rows of a multiple of 16 codes",
              "Choose multiples of 16 for --hidden-size and for the other sizes of products"};
    case SlowKernel::block_scales:
      return {"this GPU multiplies codes with one scale for each tensor or for each 128 numbers",
              "Use --fp8-recipe tensorwise or blockwise"};
    case SlowKernel::four_bits:
      return {"this GPU has no products in 4 bits, and they are computed in fp32",
              "Use --fp8-format"};
    case SlowKernel::compute_capability:
      return {fmt::format("the fast kernel is for compute capability 9.0, and this GPU has {}.{}",
                          gpu.compute_capability / 10, gpu.compute_capability % 10),
              "Use a Hopper GPU"};
  }
  TROUPE_CHECK(false, "advice on a kernel that is not slow");
}

}  // namespace

std::vector<std::string> warn_of_slow_kernels(std::span<const KernelVariant> variants,
                                              const DeviceTraits& gpu) {
  if (gpu.compute_capability == kNoGpu) return {};
  std::map<std::pair<SlowKernel, std::string>, std::vector<std::string>> kinds;
  for (const KernelVariant& variant : variants) {
    if (variant.slow == SlowKernel::no) continue;
    kinds[{variant.slow, variant.variant}].push_back(variant.kind);
  }
  std::vector<std::string> warnings;
  for (const auto& [key, names] : kinds) {
    const Advice advice = advice_on(key.first, gpu);
    const char* const kernels = key.first == SlowKernel::block_scales
                                    ? "kernels no faster than those of bf16"
                                    : "slow kernels without tensor cores";
    warnings.push_back(fmt::format("Warning: {} ({}) for {}: {}. {} to get fast ones.", kernels,
                                   key.second, fmt::join(names, ", "), advice.why, advice.change));
  }
  return warnings;
}

std::vector<std::string> warn_of_slow_kernels(const Program& program, Device device, int gpu) {
  if (device == Device::cpu) return {};
  const DeviceTraits traits = device_traits(gpu);
  return warn_of_slow_kernels(kernel_variants(program, traits), traits);
}

std::string warn_of_missing_algorithms(const Program& program,
                                       std::span<const int32_t> operations) {
  if (operations.empty()) return "";
  std::map<std::string, int64_t> kinds;
  for (const int32_t index : operations) ++kinds[program.op(index).spec->name];
  std::vector<std::string> parts;
  for (const auto& [kind, count] : kinds) parts.push_back(fmt::format("{} {}", count, kind));
  return fmt::format(
      "Warning: slow kernels without tensor cores for {}: on this GPU cuBLASLt has no algorithm "
      "for "
      "their sizes. Choose multiples of 8 for the sizes of the model to get fast ones.",
      fmt::join(parts, ", "));
}

}  // namespace troupe
