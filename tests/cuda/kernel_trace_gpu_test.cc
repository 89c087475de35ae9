// The trace of what GPUs do (runtime/cuda/kernel_trace.h): each GPU's own records, each with the
// operation that launched it, in the order of their beginnings.
#include <array>
#include <gtest/gtest.h>
#include <memory>
#include <string>
#include <vector>

#include "cuda/gpu.h"
#include "runtime/cuda/kernel_trace.h"
#include "runtime/device_memory.h"

namespace troupe::testing {
namespace {

// A copy to the GPU for each operation; -1: outside of operations.
void copy_for(KernelTrace& trace, int gpu, const std::vector<int32_t>& ops) {
  use_gpu(gpu);
  const std::array<std::byte, 64> bytes{};
  const DeviceMemory memory(bytes.size(), "copies", gpu);
  for (const int32_t op : ops) {
    if (op >= 0) trace.begin_op(op);
    memory.copy_in(bytes.data(), 0, bytes.size());
    if (op >= 0) trace.end_op();
  }
}

std::vector<int32_t> copied_ops(KernelTrace& trace, int gpu) {
  std::vector<int32_t> ops;
  uint64_t begin_ns = 0;
  for (const LaunchRecord& record : trace.finish(static_cast<uint32_t>(gpu))) {
    EXPECT_EQ(record.device, static_cast<uint32_t>(gpu));
    EXPECT_LE(begin_ns, record.begin_ns);
    EXPECT_LT(record.begin_ns, record.end_ns);
    begin_ns = record.begin_ns;
    if (record.name == "copy") ops.push_back(record.op);
  }
  return ops;
}

TEST(KernelTrace, NamesTheOperationOfEachCopy) {
  TROUPE_NEED_GPU();
  KernelTrace trace;
  copy_for(trace, 0, {3, -1, 1, 1});
  EXPECT_EQ(copied_ops(trace, 0), (std::vector<int32_t>{3, -1, 1, 1}));
}

// A copy after the last trace has ended is of no trace.
TEST(KernelTrace, RecordsUntilTheLastHasEnded) {
  TROUPE_NEED_GPU();
  {
    auto first = std::make_unique<KernelTrace>();
    KernelTrace second;
    copy_for(second, 0, {5});
    first.reset();
    copy_for(second, 0, {6});
    EXPECT_EQ(copied_ops(second, 0), (std::vector<int32_t>{5, 6}));
    copy_for(second, 0, {-1, -1});
  }
  KernelTrace third;
  copy_for(third, 0, {7});
  EXPECT_EQ(copied_ops(third, 0), (std::vector<int32_t>{7}));
}

// What a trace leaves is of the others: the first record is not its own, nor the last.
TEST(KernelTrace, KeepsGpusApart) {
  TROUPE_NEED_GPU();
  if (gpu_count() < 2) GTEST_SKIP() << "two GPUs, and " << gpu_count() << " here";
  KernelTrace first;
  KernelTrace second;
  copy_for(second, 1, {5, 6});
  copy_for(first, 0, {7, 8});
  copy_for(second, 1, {9});
  EXPECT_EQ(copied_ops(first, 0), (std::vector<int32_t>{7, 8}));
  EXPECT_EQ(copied_ops(second, 1), (std::vector<int32_t>{5, 6, 9}));
  use_gpu(0);
}

}  // namespace
}  // namespace troupe::testing
