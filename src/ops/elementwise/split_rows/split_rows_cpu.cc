#include <algorithm>
#include <cstddef>
#include <cstring>
#include <span>

#include "ops/elementwise/split_rows/split_rows.h"

namespace troupe {
namespace {

constexpr int64_t kSplitRowsGrain = int64_t{1} << 18;  // bytes

int64_t split_rows_bytes(const TensorView& view) {
  return view.shape.elements() * static_cast<int64_t>(size_of(view.dtype));
}

// The bytes of the whole tensor, and of each of its pieces where they stand in it.
template <class Copy>
void for_pieces(const KernelArguments& args, const TensorView& whole,
                std::span<const TensorView> pieces, const Copy& copy) {
  auto* all = static_cast<std::byte*>(whole.data);
  args.pool->parallel_ranges(
      split_rows_bytes(whole), kSplitRowsGrain, [=](int64_t begin, int64_t end, int) {
        int64_t first = 0;  // of the piece
        for (const TensorView& piece : pieces) {
          const int64_t last = first + split_rows_bytes(piece);
          const int64_t from = std::max(begin, first);
          const int64_t to = std::min(end, last);
          if (from < to) {
            copy(all + from, static_cast<std::byte*>(piece.data) + (from - first),
                 static_cast<size_t>(to - from));
          }
          first = last;
        }
      });
}

}  // namespace

void split_rows_cpu(const KernelArguments& args) {
  for_pieces(args, args.input(0), args.outputs,
             [](const std::byte* whole, std::byte* piece, size_t bytes) {
               std::memcpy(piece, whole, bytes);
             });
}

void join_rows_cpu(const KernelArguments& args) {
  for_pieces(args, args.output(0), args.inputs,
             [](std::byte* whole, const std::byte* piece, size_t bytes) {
               std::memcpy(whole, piece, bytes);
             });
}

}  // namespace troupe
