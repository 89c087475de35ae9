#include <atomic>

#include "ops/cpu/vector.h"
#include "ops/precision/code_counts/code_counts.h"
#include "program/kernel.h"

namespace troupe {
namespace {

constexpr int64_t kCodeCountsGrain = 65536;

// Sums of whole numbers are the same in any order.
template <class Code>
void run_code_counts(const KernelArguments& args) {
  constexpr uint8_t kLargest = Code::nearest(Code::kLargest).bits;
  const int64_t elements = args.input(0).live_elements();
  const Code* codes = args.in<Code>(0);
  auto* counts = args.out<int64_t>(0);
  counts[0] = elements;
  counts[1] = 0;
  counts[2] = 0;
  args.pool->parallel_ranges(elements, kCodeCountsGrain, [=](int64_t begin, int64_t end, int) {
    int64_t saturated = 0;
    int64_t zeros = 0;
    for (int64_t i = begin; i < end; ++i) {
      const auto magnitude = static_cast<uint8_t>(codes[i].bits & 0x7fU);
      saturated += magnitude == kLargest ? 1 : 0;
      zeros += magnitude == 0 ? 1 : 0;
    }
    std::atomic_ref<int64_t>(counts[1]).fetch_add(saturated, std::memory_order_relaxed);
    std::atomic_ref<int64_t>(counts[2]).fetch_add(zeros, std::memory_order_relaxed);
  });
}

}  // namespace

CpuKernel code_counts_cpu_kernel(const OpView& op) {
  return op.input(0).dtype == DType::f8e4m3 ? &run_code_counts<f8e4m3> : &run_code_counts<f8e5m2>;
}

}  // namespace troupe
