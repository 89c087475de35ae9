// Sums over more ranks than any machine here has GPUs (comm/cuda/peers.h): terms are added in their
// order, whatever their number, and rounded once.
#include <cstdint>
#include <gtest/gtest.h>
#include <vector>

#include "base/random.h"
#include "comm/cuda/peers.h"
#include "cuda/gpu.h"
#include "runtime/device_memory.h"

namespace troupe::testing {
namespace {

template <class T>
void expect_sums_in_order(DType dtype, int terms) {
  constexpr int64_t kElements = 37;  // of a sum; not a whole number of packs
  constexpr int kSums = 3;           // more than one launch takes, where there are many terms
  const auto count = static_cast<size_t>(kSums * kElements * terms);
  std::vector<T> values(count);
  for (size_t i = 0; i < count; ++i) {
    values[i] = T(static_cast<float>(random_normal(5, RandomStream::test, 0, i)));
  }
  const DeviceMemory memory(count * sizeof(T), "terms");
  const DeviceMemory results(kSums * kElements * sizeof(T), "sums");
  memory.copy_in(reinterpret_cast<const std::byte*>(values.data()), 0, memory.bytes());
  // Term k of sum s.
  const auto begin = [&](int s, int k) { return (int64_t{s} * terms + k) * kElements; };
  CudaKernelArguments args;
  args.multiprocessors = device_traits(0).multiprocessors;
  PeerSums sums(args, dtype, terms, 1);
  for (int s = 0; s < kSums; ++s) {
    sums.add(
        kElements, [&](int k) { return reinterpret_cast<T*>(memory.data()) + begin(s, k); },
        [&](int) { return reinterpret_cast<T*>(results.data()) + s * kElements; });
  }
  sums.launch();
  std::vector<T> found(static_cast<size_t>(kSums * kElements));
  results.copy_out(reinterpret_cast<std::byte*>(found.data()), 0, results.bytes());
  for (int s = 0; s < kSums; ++s) {
    for (int64_t i = 0; i < kElements; ++i) {
      float expected = 0;
      for (int k = 0; k < terms; ++k) {
        const auto term = static_cast<float>(values[static_cast<size_t>(begin(s, k) + i)]);
        expected = k == 0 ? term : expected + term;
      }
      const auto actual = static_cast<float>(found[static_cast<size_t>(s * kElements + i)]);
      EXPECT_EQ(actual, static_cast<float>(T(expected)))
          << terms << " terms, sum " << s << ", " << i;
    }
  }
}

TEST(PeerSums, AddTermsInOrder) {
  TROUPE_NEED_GPU();
  for (const int terms : {1, 2, 5, 64, 500, kMostMembers}) {
    expect_sums_in_order<float>(DType::f32, terms);
    expect_sums_in_order<bf16>(DType::bf16, terms);
  }
}

}  // namespace
}  // namespace troupe::testing
