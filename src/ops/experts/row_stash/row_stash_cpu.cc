#include <algorithm>
#include <cstddef>
#include <cstring>
#include <numeric>

#include "ops/experts/row_stash/row_stash.h"

namespace troupe {
namespace {

int64_t live_bytes(const TensorView& tensor) {
  return tensor.live_elements() * static_cast<int64_t>(size_of(tensor.dtype));
}

// Calls body(begin, bytes, page) for the parts of `bytes` that fill a page each.
template <class Body>
void for_pages(const KernelArguments& args, int64_t bytes, int64_t page_bytes, const int32_t* table,
               const Body& body) {
  args.pool->parallel_ranges(
      pages_of(bytes, page_bytes), 16, [=, &body](int64_t first, int64_t last, int) {
        for (int64_t i = first; i < last; ++i) {
          const int64_t begin = i * page_bytes;
          body(begin, static_cast<size_t>(std::min(page_bytes, bytes - begin)), table[i]);
        }
      });
}

}  // namespace

void open_stash_cpu(const KernelArguments& args) {
  auto* free = args.out<int32_t>(1);
  const int64_t pages = args.output(0).shape[0];
  free[kFreePages] = static_cast<int32_t>(pages);
  free[kWantedPages] = 0;
  std::iota(free + kFirstFreePage, free + kFirstFreePage + pages, 0);
}

void stash_cpu(const KernelArguments& args) {
  const TensorView& x = args.input(0);
  const int64_t page_bytes = args.input(1).shape[1];
  auto* table = args.out<int32_t>(0);
  auto* pages = static_cast<std::byte*>(args.output(1).data);
  auto* free = args.out<int32_t>(2);
  const int64_t bytes = live_bytes(x);
  const int64_t wanted = pages_of(bytes, page_bytes);
  const int64_t taken = std::min<int64_t>(wanted, free[kFreePages]);
  free[kFreePages] -= static_cast<int32_t>(taken);
  free[kWantedPages] += static_cast<int32_t>(wanted);
  const int32_t* top = free + kFirstFreePage + free[kFreePages];
  for (int64_t i = 0; i < wanted; ++i) table[i] = i < taken ? top[taken - 1 - i] : -1;
  if (taken < wanted) *args.out<double>(3) += 1;
  double& most = *args.out<double>(4);
  most = std::max(most, static_cast<double>(free[kWantedPages]));
  const auto* source = static_cast<const std::byte*>(x.data);
  for_pages(args, bytes, page_bytes, table, [=](int64_t begin, size_t count, int32_t page) {
    if (page >= 0) std::memcpy(pages + page * page_bytes, source + begin, count);
  });
}

void unstash_cpu(const KernelArguments& args) {
  const auto* table = args.in<int32_t>(0);
  const auto* pages = static_cast<const std::byte*>(args.input(1).data);
  const int64_t page_bytes = args.input(1).shape[1];
  const TensorView& y = args.output(0);
  auto* target = static_cast<std::byte*>(y.data);
  auto* free = args.out<int32_t>(1);
  const int64_t bytes = live_bytes(y);
  for_pages(args, bytes, page_bytes, table, [=](int64_t begin, size_t count, int32_t page) {
    if (page >= 0) {
      std::memcpy(target + begin, pages + page * page_bytes, count);
    } else {
      std::memset(target + begin, 0, count);
    }
  });
  const int64_t wanted = pages_of(bytes, page_bytes);
  free[kWantedPages] -= static_cast<int32_t>(wanted);
  for (int64_t i = 0; i < wanted && table[i] >= 0; ++i) {
    free[kFirstFreePage + free[kFreePages]++] = table[i];
  }
}

}  // namespace troupe
