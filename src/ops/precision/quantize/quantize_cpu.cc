#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <limits>

#include "ops/cpu/vector.h"
#include "ops/precision/fp4_block.h"
#include "ops/precision/quantize/quantize.h"
#include "program/kernel.h"

namespace troupe {
namespace {

constexpr int64_t kQuantizeGrain = 32768;  // elements

// Input 3 of quantize; block_amax has none.
const int32_t* row_slot_of(const KernelArguments& args) {
  return args.inputs.size() > 3 ? args.in<int32_t>(3) : nullptr;
}

ScaleGrid grid_of(const KernelArguments& args, BlockShape block, const MatrixRows& part = {}) {
  const TensorView& x = args.input(0);
  const TensorView& offsets = args.input(1);
  Shape shape = x.shape;
  int64_t rows = shape.rank() == 3 ? shape[0] * shape[1] : x.rows();
  if (row_slot_of(args) != nullptr) {
    shape = {args.input(3).shape[0], shape[1]};
    rows = args.input(3).rows();
  }
  return {
      shape, rows, block, offsets.as<int32_t>(), offsets.data == nullptr ? 0 : offsets.shape[0] - 1,
      part};
}

template <class T>
float number_of(T x, bool rounds) {
  const auto number = static_cast<float>(widen(x));
  return rounds ? static_cast<float>(bf16(number)) : number;
}

// The rows that are quantised: those of x, or gathered from it.
template <class T>
class SourceRows {
 public:
  SourceRows(const KernelArguments& args, bool rounds)
      : x_(args.in<T>(0)),
        columns_(args.input(0).shape.back()),
        row_slot_(row_slot_of(args)),
        rounds_(rounds) {
    if (row_slot_ != nullptr) top_k_ = args.attributes->as<QuantizeAttributes>().top_k;
  }

  // What of a row: number(i) is its element i.
  class Row {
   public:
    float operator()(int64_t i) const {
      return from_ == nullptr ? 0 : number_of(from_[i], rounds_);
    }

   private:
    friend class SourceRows;
    const T* from_ = nullptr;  // null: a filler
    bool rounds_ = false;
  };
  Row of(int64_t row) const {
    Row found;
    found.rounds_ = rounds_;
    if (row_slot_ == nullptr) {
      found.from_ = x_ + row * columns_;
    } else if (row_slot_[row] >= 0) {
      found.from_ = x_ + row_slot_[row] / top_k_ * columns_;
    }
    return found;
  }

 private:
  const T* x_;
  int64_t columns_;
  const int32_t* row_slot_;
  bool rounds_;
  int64_t top_k_ = 1;
};

int64_t grain_of(const ScaleGrid& grid) {
  return std::max<int64_t>(1, kQuantizeGrain / std::max<int64_t>(1, grid.columns()));
}

// Makes it at least as large.
void raise(uint32_t& maximum, uint32_t largest) {
  const std::atomic_ref<uint32_t> shared(maximum);
  uint32_t before = shared.load(std::memory_order_relaxed);
  while (before < largest &&
         !shared.compare_exchange_weak(before, largest, std::memory_order_relaxed)) {
  }
}

// The largest magnitude of each block, as its bits, which are ordered as the magnitudes are, NaN
// above all. Threads meet in a block where their rows do; a maximum is the same in any order.
template <class T>
void find_maxima(const KernelArguments& args, const ScaleGrid& grid, bool rounds, uint32_t* maxima,
                 int64_t count) {
  std::fill(maxima, maxima + count, 0U);
  const SourceRows<T> rows(args, rounds);
  const int64_t width = grid.block_columns();
  args.pool->parallel_ranges(grid.rows(), grain_of(grid), [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; ++row) {
      const auto numbers = rows.of(row);
      uint32_t* to = maxima + grid.scale_row(row) * grid.scale_columns();
      for (int64_t block = 0; block < grid.scale_columns(); ++block) {
        const int64_t last = std::min(grid.columns(), (block + 1) * width);
        uint32_t largest = 0;
        for (int64_t i = block * width; i < last; ++i) {
          largest = std::max(largest, std::bit_cast<uint32_t>(numbers(i)) & 0x7fffffffU);
        }
        raise(to[block], largest);
      }
    }
  });
}

// Replaces the bits of each block's maximum by those of what its elements are multiplied by, and
// stores the scale.
void store_scales(ScaleRule rule, float largest_code, uint32_t* maxima, int64_t count,
                  const TensorView& scales) {
  for (int64_t i = 0; i < count; ++i) {
    float factor = 1;
    if (rule == ScaleRule::ratio) {
      const auto amax = std::bit_cast<float>(maxima[i]);
      if (amax > 0 && std::isfinite(amax)) {
        factor = std::min(largest_code / amax, std::numeric_limits<float>::max());
      }
      scales.as<float>()[i] = 1 / factor;
    } else {
      const uint8_t s = scale_exponent(maxima[i]);
      factor = 1 / exponent_scale(s);
      if (rule == ScaleRule::exponent) {
        scales.as<uint8_t>()[i] = s;
      } else {
        scales.as<float>()[i] = exponent_scale(s);
      }
    }
    maxima[i] = std::bit_cast<uint32_t>(factor);
  }
}

// Calls store(row, first, last, factor) for the elements [first, last) of each row in one block.
template <class Store>
void for_each_block(const KernelArguments& args, const ScaleGrid& grid, const uint32_t* factors,
                    const Store& store) {
  const int64_t width = grid.block_columns();
  args.pool->parallel_ranges(grid.rows(), grain_of(grid), [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; ++row) {
      const uint32_t* of_row = factors + grid.scale_row(row) * grid.scale_columns();
      for (int64_t block = 0; block < grid.scale_columns(); ++block) {
        store(row, block * width, std::min(grid.columns(), (block + 1) * width),
              std::bit_cast<float>(of_row[block]));
      }
    }
  });
}

template <class T, class Code>
void store_codes(const KernelArguments& args, const ScaleGrid& grid, const uint32_t* factors) {
  const SourceRows<T> rows(args, args.attributes->as<QuantizeAttributes>().rounds);
  Code* codes = args.out<Code>(0);
  for_each_block(args, grid, factors, [&](int64_t row, int64_t first, int64_t last, float factor) {
    const auto numbers = rows.of(row);
    Code* const to = codes + row * grid.columns();
    for (int64_t i = first; i < last; ++i) to[i] = Code::nearest(numbers(i) * factor);
  });
}

template <class T, class Code>
void store_transposed(const KernelArguments& args, const ScaleGrid& grid, const uint32_t* factors,
                      int output) {
  const SourceRows<T> rows(args, args.attributes->as<QuantizeAttributes>().rounds);
  Code* codes = args.out<Code>(output);
  std::fill(codes, codes + args.output(output).shape.elements(), Code{});
  const ScaleGrid blocks = grid_of(args, {kTransposedRows, 1});
  for_each_block(args, grid, factors, [&](int64_t row, int64_t first, int64_t last, float factor) {
    const int64_t block = blocks.scale_row(row) * grid.columns();
    const int64_t place = blocks.row_in_block(row);
    const auto numbers = rows.of(row);
    for (int64_t column = first; column < last; ++column) {
      codes[(block + column) * kTransposedRows + place] = Code::nearest(numbers(column) * factor);
    }
  });
}

// Of each block, over the parts one after the other.
void largest_of_parts(const TensorView& amax, uint32_t* maxima, int64_t count) {
  const float* parts = amax.as<float>();
  std::fill(maxima, maxima + count, 0U);
  for (int64_t i = 0; i < amax.shape.elements(); ++i) {
    maxima[i % count] = std::max(maxima[i % count], std::bit_cast<uint32_t>(parts[i]));
  }
}

// Scales of blocks, to that output, and in place of the maxima what elements are multiplied by.
template <class T>
void find_scales(const KernelArguments& args, const ScaleGrid& grid, int output, uint32_t* maxima) {
  const auto& attributes = args.attributes->as<QuantizeAttributes>();
  const int64_t count = args.output(output).live_elements();
  if (args.input(2).data != nullptr) {
    largest_of_parts(args.input(2), maxima, count);
  } else {
    find_maxima<T>(args, grid, attributes.rounds, maxima, count);
  }
  const bool is_e4m3 = attributes.format == DType::f8e4m3;
  store_scales(attributes.rule, is_e4m3 ? f8e4m3::kLargest : f8e5m2::kLargest, maxima, count,
               args.output(output));
}

template <class T>
void measure(const KernelArguments& args) {
  const auto& attributes = args.attributes->as<QuantizeAttributes>();
  if (!attributes.measures) return;
  const TensorView& amax = args.output(attributes.measured_output());
  const BlockShape block = attributes.has_rows() ? attributes.block : attributes.transposed_block;
  find_maxima<T>(args, grid_of(args, block, attributes.part), attributes.rounds,
                 reinterpret_cast<uint32_t*>(amax.as<float>()), amax.live_elements());
}

// Calls visit(row, rows, column, columns, numbers, scale row) for each block, with its numbers, row
// by row, in f32.
template <class T, class Visit>
void for_each_fp4_block(const KernelArguments& args, const ScaleGrid& grid, BlockShape block,
                        bool rotates, const Visit& visit) {
  const T* x = args.in<T>(0);
  args.pool->parallel_ranges(grid.rows(), grain_of(grid), [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t rows = grid.rows_of_block(row);
      for (int64_t column = 0; rows > 0 && column < grid.columns(); column += block.columns) {
        const int64_t columns = std::min<int64_t>(block.columns, grid.columns() - column);
        float numbers[kFp4Block * kFp4Block];
        for (int64_t i = 0; i < rows * columns; ++i) {
          numbers[i] = number_of(x[(row + i / columns) * grid.columns() + column + i % columns],
                                 /*rounds=*/false);
        }
        if (rotates && rows == kFp4Block) rotate_fp4(numbers);
        visit(row, rows, column, columns, numbers);
      }
    }
  });
}

// Codes in one order, or in both with the same scales.
template <class T>
void quantize_fp4_as(const KernelArguments& args) {
  const auto& attributes = args.attributes->as<QuantizeAttributes>();
  const BlockShape block = attributes.has_rows() ? attributes.block : attributes.transposed_block;
  const ScaleGrid grid = grid_of(args, block);
  const ScaleGrid matrices = grid_of(args, {});
  const ScaleGrid lines = grid_of(args, {kTransposedRows, 1});
  f8e4m3* codes = attributes.has_rows() ? args.out<f8e4m3>(0) : nullptr;
  f8e4m3* transposed = nullptr;
  if (attributes.has_transposed()) {
    const int output = attributes.transposed_output();
    transposed = args.out<f8e4m3>(output);
    std::fill_n(transposed, args.output(output).shape.elements(), f8e4m3{});
  }
  const int of_scales = attributes.has_rows() ? 1 : attributes.transposed_scales_output();
  const TensorView& scales = args.output(of_scales);
  std::fill_n(scales.as<float>(), scales.live_elements(), 1.0F);
  const TensorView& amax = args.input(2);
  const int64_t count = matrices.matrices();
  const auto largest_of_matrix = [&](int64_t row) {
    float largest = 0;
    for (int64_t i = matrices.scale_row(row); i < amax.shape.elements(); i += count) {
      largest = larger_magnitude(largest, amax.as<float>()[i]);
    }
    return largest;
  };
  for_each_fp4_block<T>(
      args, grid, block, attributes.rotates,
      [&](int64_t row, int64_t rows, int64_t column, int64_t columns, float* numbers) {
        scales.as<float>()[grid.scale_row(row) * grid.scale_columns() + column / block.columns] =
            quantize_fp4(numbers, static_cast<int>(rows * columns), largest_of_matrix(row),
                         attributes.is_stochastic);
        for (int64_t i = 0; i < rows * columns; ++i) {
          const int64_t at = row + i / columns;
          const int64_t of_row = column + i % columns;
          const f8e4m3 code = f8e4m3::nearest(numbers[i]);
          if (codes != nullptr) codes[at * grid.columns() + of_row] = code;
          if (transposed == nullptr) continue;
          transposed[(lines.scale_row(at) * grid.columns() + of_row) * kTransposedRows +
                     lines.row_in_block(at)] = code;
        }
      });
}

template <class T, class Code>
void quantize_as(const KernelArguments& args) {
  const auto& attributes = args.attributes->as<QuantizeAttributes>();
  measure<T>(args);
  auto* factors = reinterpret_cast<uint32_t*>(args.workspace);
  if (attributes.has_rows()) {
    const ScaleGrid grid = grid_of(args, attributes.block, attributes.part);
    find_scales<T>(args, grid, 1, factors);
    store_codes<T, Code>(args, grid, factors);
  }
  if (!attributes.has_transposed()) return;
  const ScaleGrid grid = grid_of(args, attributes.transposed_block);
  if (!attributes.shares_scales()) {
    if (attributes.has_rows()) factors += args.output(1).shape.elements();
    find_scales<T>(args, grid, attributes.transposed_scales_output(), factors);
  }
  store_transposed<T, Code>(args, grid, factors, attributes.transposed_output());
}

template <class T>
struct QuantizeKernel {
  static void run(const KernelArguments& args) {
    const auto& attributes = args.attributes->as<QuantizeAttributes>();
    if (attributes.rule == ScaleRule::fp4) {
      quantize_fp4_as<T>(args);
    } else if (attributes.format == DType::f8e4m3) {
      quantize_as<T, f8e4m3>(args);
    } else {
      quantize_as<T, f8e5m2>(args);
    }
  }
};

// Of each matrix, or expert.
template <class T>
void find_rotated_maxima(const KernelArguments& args, uint32_t* maxima, int64_t count) {
  std::fill(maxima, maxima + count, 0U);
  constexpr BlockShape kColumns{kFp4Block, 1};
  const ScaleGrid matrices = grid_of(args, {});
  for_each_fp4_block<T>(args, grid_of(args, kColumns), kColumns, /*rotates=*/true,
                        [&](int64_t row, int64_t rows, int64_t, int64_t, const float* numbers) {
                          raise(
                              maxima[matrices.scale_row(row)],
                              std::bit_cast<uint32_t>(largest_of(numbers, static_cast<int>(rows))));
                        });
}

template <class T>
struct BlockAmaxKernel {
  static void run(const KernelArguments& args) {
    const auto& [block, part, rounds, rotates] = args.attributes->as<BlockAmaxAttributes>();
    auto* maxima = reinterpret_cast<uint32_t*>(args.out<float>(0));
    if (rotates) return find_rotated_maxima<T>(args, maxima, args.output(0).shape.elements());
    find_maxima<T>(args, grid_of(args, block, part), rounds, maxima,
                   args.output(0).live_elements());
  }
};

}  // namespace

CpuKernel quantize_cpu_kernel_of(DType dtype) {
  return select_float_kernel<QuantizeKernel>(dtype);
}

CpuKernel quantize_cpu_kernel(const OpView& op) {
  return quantize_cpu_kernel_of(op.input(0).dtype);
}

CpuKernel block_amax_cpu_kernel(const OpView& op) {
  return select_float_kernel<BlockAmaxKernel>(op.input(0).dtype);
}

}  // namespace troupe
