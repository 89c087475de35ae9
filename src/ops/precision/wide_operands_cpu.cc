#include <algorithm>
#include <array>

#include "ops/cpu/vector.h"
#include "ops/precision/quantized_product.h"
#include "ops/precision/wide_operands.h"

namespace troupe {
namespace {

constexpr int64_t kWidenGrain = 32768;  // elements

uint64_t aligned(uint64_t bytes) {
  return (bytes + 63) / 64 * 64;
}

float scale_at(const TensorView& scales, int64_t i) {
  return scales.dtype == DType::f32 ? scales.as<float>()[i]
                                    : exponent_scale(scales.as<uint8_t>()[i]);
}

// `blocks`: of transposed codes; null for codes in rows.
template <class Code, class Wide>
void widen_codes(const TensorView& codes, const TensorView& scales, const ScaleGrid& grid,
                 const ScaleGrid* blocks, Wide* wide, ThreadPool& pool) {
  const int64_t width = grid.block_columns();
  const int64_t grain = std::max<int64_t>(1, kWidenGrain / std::max<int64_t>(1, grid.columns()));
  pool.parallel_ranges(grid.rows(), grain, [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; ++row) {
      // The row's codes are `step` apart.
      const Code* from = codes.as<Code>() + row * grid.columns();
      int64_t step = 1;
      if (blocks != nullptr) {
        step = kTransposedRows;
        from = codes.as<Code>() + blocks->scale_row(row) * grid.columns() * step +
               blocks->row_in_block(row);
      }
      Wide* to = wide + row * grid.columns();
      const int64_t first_scale = grid.scale_row(row) * grid.scale_columns();
      for (int64_t block = 0; block < grid.scale_columns(); ++block) {
        const Wide scale = scale_at(scales, first_scale + block);
        const int64_t last = std::min(grid.columns(), (block + 1) * width);
        for (int64_t i = block * width; i < last; ++i) {
          to[i] = Wide(static_cast<float>(from[i * step])) * scale;
        }
      }
    }
  });
}

}  // namespace

uint64_t wide_operands_bytes(const OpView& op, uint64_t own_bytes) {
  const DType wide = accumulation_dtype(op.attributes<QuantizedProductAttributes>().compute);
  uint64_t bytes = aligned(own_bytes);
  for (int i = 0; i < 2; ++i) {
    bytes += aligned(static_cast<uint64_t>(quantized_shape(op, i).elements()) * size_of(wide));
  }
  for (size_t i = 4; i < op.program.inputs(op.op).size(); ++i) {
    const int input = static_cast<int>(i);
    // A bias may come after the scales; what else comes there takes no more than it does.
    if (!op.has_input(input) || op.input(input).shape.rank() != 1) continue;
    bytes += aligned(static_cast<uint64_t>(op.input(input).shape.elements()) * size_of(wide));
  }
  return bytes;
}

template <class Wide>
WideOperands<Wide> widen_operands(const KernelArguments& args, uint64_t own_bytes, int offsets,
                                  int bias) {
  const auto& attributes = args.attributes->as<QuantizedProductAttributes>();
  const int32_t* starts = offsets < 0 ? nullptr : args.in<int32_t>(offsets);
  const int64_t experts = offsets < 0 ? 0 : args.input(offsets).shape[0] - 1;
  std::byte* memory = args.workspace + aligned(own_bytes);
  const auto take = [&](const Shape& shape) {
    Wide* wide = reinterpret_cast<Wide*>(memory);
    memory += aligned(static_cast<uint64_t>(shape.elements()) * sizeof(Wide));
    return wide;
  };
  std::array<Wide*, 2> wide{};
  for (int i = 0; i < 2; ++i) {
    const TensorView& codes = args.input(i);
    const auto place = static_cast<size_t>(i);
    const auto& operand = attributes.operands[place];
    const Shape shape = operand.shape(codes.shape);
    const int32_t* of_rows = shape.rank() == 2 ? starts : nullptr;
    int64_t rows = shape.rank() == 2 ? shape[0] : shape[0] * shape[1];
    if (of_rows != nullptr) rows = starts[experts];
    const auto grid_of = [&](BlockShape block) {
      return ScaleGrid(shape, rows, block, of_rows, experts);
    };
    const ScaleGrid grid = grid_of(operand.block);
    const ScaleGrid transposed = grid_of({kTransposedRows, 1});
    const ScaleGrid* const blocks = operand.is_transposed() ? &transposed : nullptr;
    wide[place] = take(shape);
    if (codes.dtype == DType::f8e4m3) {
      widen_codes<f8e4m3>(codes, args.input(2 + i), grid, blocks, wide[place], *args.pool);
    } else {
      widen_codes<f8e5m2>(codes, args.input(2 + i), grid, blocks, wide[place], *args.pool);
    }
  }
  if (bias < 0 || args.input(bias).data == nullptr) return {wide[0], wide[1], nullptr};
  const TensorView& narrow = args.input(bias);
  Wide* wide_bias = take(narrow.shape);
  for (int64_t i = 0; i < narrow.shape.elements(); ++i) {
    wide_bias[i] = narrow.dtype == DType::bf16  ? Wide(narrow.as<bf16>()[i])
                   : narrow.dtype == DType::f16 ? Wide(narrow.as<f16>()[i])
                                                : narrow.as<Wide>()[i];
  }
  return {wide[0], wide[1], wide_bias};
}

template WideOperands<double> widen_operands<double>(const KernelArguments&, uint64_t, int, int);
template WideOperands<float> widen_operands<float>(const KernelArguments&, uint64_t, int, int);

}  // namespace troupe
