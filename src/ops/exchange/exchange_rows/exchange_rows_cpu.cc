#include <cstring>

#include "ops/cpu/partial_rows.h"
#include "ops/exchange/exchange_rows/exchange_rows.h"

namespace troupe {
namespace {

// The private memory of send_rows and return_rows: blocks, then packed rows, by the rank that they
// go to and come back from.
struct Packed {
  Packed(const KernelArguments& args, int64_t width_bytes)
      : ranks(static_cast<int32_t>(args.input(2).shape[0])),
        row_bytes(width_bytes),
        counts(args.in<int32_t>(2)),
        offsets(args.in<int32_t>(3)),
        blocks(reinterpret_cast<Block*>(args.workspace)),
        // Blocks are 16 bytes each: the rows are aligned to that at least.
        rows(args.workspace + 2 * static_cast<size_t>(ranks) * sizeof(Block)) {}

  std::span<Block> first_blocks() const { return {blocks, static_cast<size_t>(ranks)}; }
  std::span<Block> second_blocks() const { return {blocks + ranks, static_cast<size_t>(ranks)}; }

  // Blocks of the packed rows.
  void fill_packed(std::span<Block> target) const {
    std::byte* at = rows;
    for (int32_t rank = 0; rank < ranks; ++rank) {
      const int64_t bytes = counts[rank] * row_bytes;
      target[static_cast<size_t>(rank)] = {.data = at, .bytes = bytes};
      at += bytes;
    }
  }
  // Blocks of the rows of other ranks, in `data`.
  void fill_foreign(std::span<Block> target, void* data) const {
    for (int32_t rank = 0; rank < ranks; ++rank) {
      target[static_cast<size_t>(rank)] = {
          .data = static_cast<std::byte*>(data) + offsets[rank] * row_bytes,
          .bytes = (offsets[rank + 1] - offsets[rank]) * row_bytes};
    }
  }

  int32_t ranks;
  int64_t row_bytes;
  const int32_t* counts;
  const int32_t* offsets;
  Block* blocks;
  std::byte* rows;
};

template <class T>
struct ReturnRowsKernel {
  static void run(const KernelArguments& args) {
    const int64_t width = args.input(0).shape[1];
    const Packed packed(args, width * static_cast<int64_t>(sizeof(T)));
    packed.fill_foreign(packed.first_blocks(), args.input(0).data);
    packed.fill_packed(packed.second_blocks());
    args.communicator->all_to_all({.op = args.op, .index = args.op_index}, packed.first_blocks(),
                                  packed.second_blocks(), *args.pool);
    sum_partial_rows(*args.pool, args.in<int32_t>(1), args.input(1).shape[0], packed.ranks, width,
                     args.out<T>(0), [&](int32_t rank, int32_t slot) {
                       const Block& block = packed.second_blocks()[static_cast<size_t>(rank)];
                       return static_cast<const T*>(block.data) + slot * width;
                     });
  }
};

}  // namespace

void exchange_counts_cpu(const KernelArguments& args) {
  const auto ranks = static_cast<size_t>(args.input(0).shape[0]);
  auto* blocks = reinterpret_cast<Block*>(args.workspace);
  const std::span<Block> sent(blocks, ranks);
  const std::span<Block> received(blocks + ranks, ranks);
  auto* counts = reinterpret_cast<int32_t*>(blocks + 2 * ranks);
  for (size_t rank = 0; rank < ranks; ++rank) {
    sent[rank] = {.data = args.inputs[0].as<int32_t>() + rank, .bytes = sizeof(int32_t)};
    received[rank] = {.data = counts + rank, .bytes = sizeof(int32_t)};
  }
  args.communicator->all_to_all({.op = args.op, .index = args.op_index}, sent, received,
                                *args.pool);
  auto* offsets = args.out<int32_t>(0);
  offsets[0] = 0;
  for (size_t rank = 0; rank < ranks; ++rank) offsets[rank + 1] = offsets[rank] + counts[rank];
}

void send_rows_cpu(const KernelArguments& args) {
  const TensorView& x = args.input(0);
  const Packed packed(args, x.shape[1] * static_cast<int64_t>(size_of(x.dtype)));
  packed.fill_packed(packed.first_blocks());
  packed.fill_foreign(packed.second_blocks(), args.output(0).data);
  const auto* source = static_cast<const std::byte*>(x.data);
  const auto* slots = args.in<int32_t>(1);
  args.pool->parallel_ranges(
      x.shape[0], row_grain(x.shape[1]), [&](int64_t begin, int64_t end, int) {
        for (int64_t token = begin; token < end; ++token) {
          for (int32_t rank = 0; rank < packed.ranks; ++rank) {
            const int32_t slot = slots[token * packed.ranks + rank];
            if (slot < 0) continue;
            const Block& block = packed.first_blocks()[static_cast<size_t>(rank)];
            std::memcpy(static_cast<std::byte*>(block.data) + slot * packed.row_bytes,
                        source + token * packed.row_bytes, static_cast<size_t>(packed.row_bytes));
          }
        }
      });
  args.communicator->all_to_all({.op = args.op, .index = args.op_index}, packed.first_blocks(),
                                packed.second_blocks(), *args.pool);
}

CpuKernel return_rows_cpu_kernel(DType dtype) {
  return select_float_kernel<ReturnRowsKernel>(dtype);
}

}  // namespace troupe
