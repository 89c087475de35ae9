#include <array>
#include <cstring>
#include <span>

#include "ops/cpu/vector.h"
#include "ops/exchange/exchange_heads/exchange_heads.h"

namespace troupe {
namespace {

// What goes to one rank, or comes from it: the rows of one rank with the heads of another,
// [B S / n, w / n]. Both forms of the whole are cut into these: rows of all heads by columns, rows
// of all positions by rows. Everything counts in bytes.
class HeadBlocks {
 public:
  explicit HeadBlocks(const KernelArguments& args)
      : attributes_(args.attributes->as<ExchangeHeadsAttributes>()),
        ranks_(attributes_.chunks.ranks),
        element_bytes_(static_cast<int64_t>(size_of(args.input(0).dtype))),
        here_(attributes_.sequence / ranks_),
        rows_(int64_t{attributes_.batch} * here_),
        width_(attributes_.row() / ranks_ * element_bytes_),
        args_(args) {
    TROUPE_CHECK(
        args.communicator->size() == ranks_ && args.communicator->rank() == attributes_.chunks.rank,
        "an exchange of heads: another group");
    auto* blocks = reinterpret_cast<Block*>(args.workspace);
    sent_ = {blocks, static_cast<size_t>(ranks_)};
    received_ = {blocks + ranks_, static_cast<size_t>(ranks_)};
    auto* data = reinterpret_cast<std::byte*>(blocks + 2 * ranks_);
    for (std::span<Block> side : {sent_, received_}) {
      for (Block& block : side) {
        block = {.data = data, .bytes = rows_ * width_};
        data += block.bytes;
      }
    }
  }

  void exchange() const {
    args_.communicator->all_to_all({.op = args_.op, .index = args_.op_index}, sent_, received_,
                                   *args_.pool);
  }

  // Between this rank's rows with all heads and the blocks by rank.
  void pack_columns(const void* matrix) const {
    each_column(sent_, [matrix = static_cast<const std::byte*>(matrix)](std::byte* block,
                                                                        int64_t at, int64_t bytes) {
      std::memcpy(block, matrix + at, static_cast<size_t>(bytes));
    });
  }
  void unpack_columns(void* matrix) const {
    each_column(received_, [matrix = static_cast<std::byte*>(matrix)](const std::byte* block,
                                                                      int64_t at, int64_t bytes) {
      std::memcpy(matrix + at, block, static_cast<size_t>(bytes));
    });
  }

  // Between the rows of all positions with this rank's heads and the blocks by rank.
  void pack_rows(const void* matrix) const {
    each_row(sent_, [matrix = static_cast<const std::byte*>(matrix)](std::byte* block, int64_t at,
                                                                     int64_t bytes) {
      std::memcpy(block, matrix + at, static_cast<size_t>(bytes));
    });
  }
  void unpack_rows(void* matrix) const {
    each_row(received_, [matrix = static_cast<std::byte*>(matrix)](const std::byte* block,
                                                                   int64_t at, int64_t bytes) {
      std::memcpy(matrix + at, block, static_cast<size_t>(bytes));
    });
  }

 private:
  // Calls copy(place in the block, byte of the matrix, bytes) for all of the blocks.
  template <class Copy>
  void each_column(std::span<const Block> blocks, const Copy& copy) const {
    const int64_t head_bytes = attributes_.head_dim * element_bytes_;
    const int64_t groups = attributes_.groups / ranks_;
    const std::array<int64_t, 3> sizes = {attributes_.heads / ranks_ * head_bytes,
                                          groups * head_bytes,
                                          groups * attributes_.value_size() * element_bytes_};
    args_.pool->parallel_ranges(
        rows_, row_grain(width_ * ranks_), [&](int64_t begin, int64_t end, int) {
          for (int64_t row = begin; row < end; ++row) {
            for (int64_t rank = 0; rank < ranks_; ++rank) {
              auto* part =
                  static_cast<std::byte*>(blocks[static_cast<size_t>(rank)].data) + row * width_;
              int64_t section = row * width_ * ranks_;
              for (const int64_t size : sizes) {
                if (size > 0) copy(part, section + rank * size, size);
                part += size;
                section += size * ranks_;
              }
            }
          }
        });
  }

  template <class Copy>
  void each_row(std::span<const Block> blocks, const Copy& copy) const {
    args_.pool->parallel_ranges(
        rows_, row_grain(width_ * ranks_), [&](int64_t begin, int64_t end, int) {
          for (int64_t row = begin; row < end; ++row) {
            for (int32_t rank = 0; rank < ranks_; ++rank) {
              const SequenceChunks chunks{.ranks = ranks_, .rank = rank};
              const int64_t whole =
                  row / here_ * attributes_.sequence + chunks.position(row % here_, here_);
              copy(static_cast<std::byte*>(blocks[static_cast<size_t>(rank)].data) + row * width_,
                   whole * width_, width_);
            }
          }
        });
  }

  const ExchangeHeadsAttributes attributes_;
  const int32_t ranks_;
  const int64_t element_bytes_;
  const int64_t here_;   // rows of a rank in each sequence
  const int64_t rows_;   // of a block
  const int64_t width_;  // of its rows
  const KernelArguments& args_;
  std::span<Block> sent_;
  std::span<Block> received_;
};

}  // namespace

void sequence_to_heads_cpu(const KernelArguments& args) {
  const HeadBlocks blocks(args);
  blocks.pack_columns(args.input(0).data);
  blocks.exchange();
  blocks.unpack_rows(args.output(0).data);
}

void heads_to_sequence_cpu(const KernelArguments& args) {
  const HeadBlocks blocks(args);
  blocks.pack_rows(args.input(0).data);
  blocks.exchange();
  blocks.unpack_columns(args.output(0).data);
}

}  // namespace troupe
