#include <cuda_fp8.h>
#include <type_traits>

#include "ops/precision/cuda/block_scale.cuh"
#include "ops/precision/cuda/quantize_tiles.h"
#include "ops/precision/cuda/row_strips.cuh"
#include "ops/precision/cuda/tile_scales.h"
#include "ops/precision/cuda/transposed_rows.cuh"
#include "ops/precision/fp4_block.h"
#include "ops/precision/quantize/quantize.h"
#include "program/cuda/device.cuh"

namespace troupe {
namespace {

// Whether the lanes of a warp that share a block are a power of two side by side, each with all of
// its columns in it.
__device__ __forceinline__ bool is_shared_by_lanes(int64_t width, int step) {
  return width % step == 0 && (width & (width - 1)) == 0;
}

// Adds what a lane holds of its columns to the maxima of their blocks, in one row of scales.
template <int kStep>
__device__ __forceinline__ void add_maxima(uint32_t* to, const ScaleGrid& grid, int64_t column,
                                           const uint32_t (&held)[kStep]) {
  uint32_t largest = 0;
#pragma unroll
  for (int j = 0; j < kStep; ++j) largest = max(largest, held[j]);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (grid.scale_columns() == 1) {
    largest = __reduce_max_sync(0xffffffffU, largest);
    if (lane == 0 && largest > 0) atomicMax(to, largest);
    return;
  }
  const int64_t width = grid.block_columns();
  if (is_shared_by_lanes(width, kStep)) {
    const int lanes = static_cast<int>(min(width / kStep, int64_t{32}));
    for (int other = lanes / 2; other > 0; other /= 2) {
      largest = max(largest, __shfl_xor_sync(0xffffffffU, largest, other));
    }
    if (lane % lanes == 0 && column < grid.columns() && largest > 0) {
      atomicMax(to + column / width, largest);
    }
    return;
  }
#pragma unroll
  for (int j = 0; j < kStep; ++j) {
    if (column + j < grid.columns() && held[j] > 0) atomicMax(to + (column + j) / width, held[j]);
  }
}

// Of a row of x, or of one of zeros.
template <class T, int kStep>
__device__ __forceinline__ Pack<T> load_row_step(const T* x, int64_t row, const ScaleGrid& grid,
                                                 int64_t column) {
  if (row >= 0) return load_step<T, kStep>(x + row * grid.columns() + column);
  Pack<T> zeros;
#pragma unroll
  for (T& value : zeros.values) value = round_to<T>(0.0F);
  return zeros;
}

// The largest magnitude of each block, as its bits, which are ordered as the magnitudes are, NaN
// above all. `maxima` are zeros before. A maximum is the same in any order.
template <class T, int kStep>
__global__ void __launch_bounds__(kStripThreads)
    block_maxima_kernel(const T* x, SourceRows source, LiveRows rows, ScaleGrid grid, bool rounds,
                        uint32_t* maxima) {
  const RowStrip strip(grid, rows.count(), kStep);
  if (strip.rows() <= 0) return;
  const int64_t own_scale_row = strip.scale_row_of_lane(grid);
  const int64_t column = strip.column();
  const bool reads = column < grid.columns();
  uint32_t held[kStep] = {};
  int64_t current = __shfl_sync(0xffffffffU, own_scale_row, 0);
  constexpr int kAhead = 4;
  for (int first = 0; first < strip.rows(); first += kAhead) {
    Pack<T> packs[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (reads && first + i < strip.rows()) {
        packs[i] = load_row_step<T, kStep>(x, source.of(strip.row() + first + i), grid, column);
      }
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (first + i >= strip.rows()) break;
      const int64_t scale_row = __shfl_sync(0xffffffffU, own_scale_row, first + i);
      if (scale_row != current) {
        add_maxima<kStep>(maxima + current * grid.scale_columns(), grid, column, held);
        current = scale_row;
#pragma unroll
        for (int j = 0; j < kStep; ++j) held[j] = 0;
      }
      if (!reads) continue;
#pragma unroll
      for (int j = 0; j < kStep; ++j) {
        const float value = number_of(packs[i].values[j], rounds);
        held[j] = max(held[j], __float_as_uint(value) & 0x7fffffffU);
      }
    }
  }
  add_maxima<kStep>(maxima + current * grid.scale_columns(), grid, column, held);
}

// Of each block, over `parts` tensors of maxima one after the other.
__global__ void largest_of_parts_kernel(const uint32_t* amax, int64_t parts, int64_t count,
                                        uint32_t* maxima) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= count) return;
  uint32_t largest = 0;
  for (int64_t part = 0; part < parts; ++part) largest = max(largest, amax[part * count + i]);
  maxima[i] = largest;
}

// What the elements of a block are multiplied by; its scale is stored.
template <class Scale>
__device__ __forceinline__ float store_scale(ScaleRule rule, float largest_code, uint32_t largest,
                                             Scale* scale) {
  if constexpr (std::is_same_v<Scale, uint8_t>) {
    *scale = scale_exponent(largest);
    return 1 / exponent_scale(*scale);
  } else {
    const BlockScale found = block_scale(rule, largest_code, largest);
    *scale = found.scale;
    return found.factor;
  }
}

// Replaces the bits of each maximum by those of the factor.
template <class Scale>
__global__ void scales_kernel(ScaleRule rule, float largest_code, uint32_t* maxima, int64_t count,
                              Scale* scales) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= count) return;
  maxima[i] = __float_as_uint(store_scale(rule, largest_code, maxima[i], scales + i));
}

template <__nv_fp8_interpretation_t kFormat, class T, int kStep>
__global__ void __launch_bounds__(kStripThreads)
    codes_kernel(const T* x, SourceRows source, LiveRows rows, ScaleGrid grid, bool rounds,
                 const float* factors, uint8_t* codes) {
  const RowStrip strip(grid, rows.count(), kStep);
  if (strip.rows() <= 0) return;
  const int64_t own_scale_row = strip.scale_row_of_lane(grid);
  const int64_t column = strip.column();
  const int64_t width = grid.block_columns();
  int64_t current = -1;
  float factor[kStep] = {};
  for (int i = 0; i < strip.rows(); ++i) {
    const int64_t scale_row = __shfl_sync(0xffffffffU, own_scale_row, i);
    if (column >= grid.columns()) continue;
    const int64_t at = (strip.row() + i) * grid.columns() + column;
    const Pack<T> pack = load_row_step<T, kStep>(x, source.of(strip.row() + i), grid, column);
    if (scale_row != current) {
      current = scale_row;
      const float* of_row = factors + scale_row * grid.scale_columns();
#pragma unroll
      for (int j = 0; j < kStep; ++j) {
        factor[j] = of_row[grid.scale_columns() == 1 ? 0 : (column + j) / width];
      }
    }
    CodePack<kStep> result;
#pragma unroll
    for (int j = 0; j < kStep; ++j) {
      result.codes[j] = __nv_cvt_float_to_fp8(number_of(pack.values[j], rounds) * factor[j],
                                              __NV_SATFINITE, kFormat);
    }
    *reinterpret_cast<CodePack<kStep>*>(codes + at) = result;
  }
}

// A thread for each code, also of unused blocks: correct for any blocks, and slow.
template <__nv_fp8_interpretation_t kFormat, class T>
__global__ void transposed_codes_kernel(const T* x, SourceRows source, TransposedGrid blocks,
                                        ScaleGrid grid, bool rounds, const float* factors,
                                        int64_t count, uint8_t* codes) {
  const int64_t at = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (at >= count) return;
  const int64_t column = at / kTransposedRows % grid.columns();
  const TransposedRows rows = blocks.rows_of(at / kTransposedRows / grid.columns());
  const auto within = static_cast<int>(at % kTransposedRows);
  uint8_t code = 0;
  if (within < rows.count) {
    const int64_t row = rows.first + within;
    const float factor = factors[grid.scale_row(row) * grid.scale_columns() +
                                 (grid.scale_columns() == 1 ? 0 : column / grid.block_columns())];
    const int64_t from = source.of(row);
    const float value = from < 0 ? 0.0F : number_of(x[from * grid.columns() + column], rounds);
    code = __nv_cvt_float_to_fp8(value * factor, __NV_SATFINITE, kFormat);
  }
  codes[at] = code;
}

template <class T>
void find_maxima(const CudaKernelArguments& args, const ScaleGrid& grid, bool rounds,
                 uint32_t* maxima, int64_t count) {
  check_cuda(cudaMemsetAsync(maxima, 0, static_cast<size_t>(count) * sizeof(uint32_t), args.stream),
             "clearing maxima");
  const bool packs = is_made_of_packs<T>(grid.columns());
  constexpr int kPack = Pack<T>::kElements;
  launch(args, {strip_blocks(grid, packs ? kPack : 1), kStripThreads},
         packs ? block_maxima_kernel<T, kPack> : block_maxima_kernel<T, 1>, args.in<T>(0),
         source_rows_of(args), live_rows_of(quantized_tensor(args), grid), grid, rounds, maxima);
}

// Scales of blocks, to that output, and what elements are multiplied by.
template <class T>
void find_scales(const CudaKernelArguments& args, const ScaleGrid& grid, int output,
                 float* factors) {
  const auto& attributes = args.attributes->as<QuantizeAttributes>();
  const CudaTensor& scales = args.output(output);
  const int64_t count = scales.shape.elements();
  const auto blocks = static_cast<unsigned>(ceil_divide(count, 256));
  auto* const maxima = reinterpret_cast<uint32_t*>(factors);
  if (args.input(2).data != nullptr) {
    launch(args, {blocks, 256}, largest_of_parts_kernel,
           static_cast<const uint32_t*>(args.input(2).data), args.input(2).shape.elements() / count,
           count, maxima);
  } else {
    find_maxima<T>(args, grid, attributes.rounds, maxima, count);
  }
  const bool is_e4m3 = attributes.format == DType::f8e4m3;
  const float largest = is_e4m3 ? f8e4m3::kLargest : f8e5m2::kLargest;
  if (attributes.rule == ScaleRule::exponent) {
    launch(args, {blocks, 256}, scales_kernel<uint8_t>, attributes.rule, largest, maxima, count,
           static_cast<uint8_t*>(scales.data));
  } else {
    launch(args, {blocks, 256}, scales_kernel<float>, attributes.rule, largest, maxima, count,
           static_cast<float*>(scales.data));
  }
}

template <class T, __nv_fp8_interpretation_t kFormat>
void store_codes(const CudaKernelArguments& args, const ScaleGrid& grid, const float* factors) {
  const bool packs = is_made_of_packs<T>(grid.columns());
  constexpr int kPack = Pack<T>::kElements;
  launch(args, {strip_blocks(grid, packs ? kPack : 1), kStripThreads},
         packs ? codes_kernel<kFormat, T, kPack> : codes_kernel<kFormat, T, 1>, args.in<T>(0),
         source_rows_of(args), live_rows_of(quantized_tensor(args), grid), grid,
         args.attributes->as<QuantizeAttributes>().rounds, factors,
         static_cast<uint8_t*>(args.output(0).data));
}

template <class T, __nv_fp8_interpretation_t kFormat>
void store_transposed(const CudaKernelArguments& args, const ScaleGrid& grid,
                      const float* factors) {
  const CudaTensor x = quantized_tensor(args);
  const auto& attributes = args.attributes->as<QuantizeAttributes>();
  const CudaTensor& codes = args.output(attributes.transposed_output());
  const int64_t count = codes.shape.elements();
  launch(args, {static_cast<unsigned>(ceil_divide(count, 256)), 256},
         transposed_codes_kernel<kFormat, T>, args.in<T>(0), source_rows_of(args),
         TransposedGrid(x.shape, LiveRows(x), args.input(1)), grid, attributes.rounds, factors,
         count, static_cast<uint8_t*>(codes.data));
}

// The grids of a tensor in blocks of 4 bits: of the blocks, of what has one amax, and of transposed
// codes.
struct Fp4Grids {
  ScaleGrid blocks;
  ScaleGrid matrices;
  ScaleGrid lines;
  BlockShape block;
  bool rotates;

  Fp4Grids(const CudaKernelArguments& args, BlockShape shape, bool rotated)
      : blocks(cuda_grid_of(args.input(0), shape, args.input(1))),
        matrices(cuda_grid_of(args.input(0), {}, args.input(1))),
        lines(cuda_grid_of(args.input(0), {kTransposedRows, 1}, args.input(1))),
        block(shape),
        rotates(rotated) {}

  unsigned thread_blocks() const {
    return static_cast<unsigned>(
        std::max<int64_t>(1, ceil_divide(blocks.rows() * blocks.scale_columns(), kFp4Threads)));
  }
  static constexpr int kFp4Threads = 128;
};

// A thread for each row and block of columns; those whose row begins a block have work.
struct Fp4Place {
  int64_t row = 0;
  int64_t column = 0;
  int64_t rows = 0;  // 0: no work
  int64_t columns = 0;

  __device__ Fp4Place(const Fp4Grids& grids, int64_t live) {
    const int64_t at = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    row = at / grids.blocks.scale_columns();
    column = at % grids.blocks.scale_columns() * grids.block.columns;
    if (row >= live) return;
    rows = grids.blocks.rows_of_block(row);
    columns = min(int64_t{grids.block.columns}, grids.blocks.columns() - column);
  }
};

template <class T>
__device__ void load_fp4_block(const T* x, const Fp4Grids& grids, const Fp4Place& place,
                               float* numbers) {
  for (int64_t i = 0; i < place.rows * place.columns; ++i) {
    const int64_t row = place.row + i / place.columns;
    numbers[i] = static_cast<float>(
        widen(x[row * grids.blocks.columns() + place.column + i % place.columns]));
  }
  if (grids.rotates && place.rows == kFp4Block) rotate_fp4(numbers);
}

struct Fp4Outputs {
  const float* amax;
  int64_t parts;  // of amax, one after the other
  bool is_stochastic;
  uint8_t* codes;       // in rows; null: they are not stored
  uint8_t* transposed;  // zeros before; null: they are not stored
  float* scales;
};

template <class T>
__global__ void __launch_bounds__(Fp4Grids::kFp4Threads)
    fp4_blocks_kernel(const T* x, LiveRows rows, Fp4Grids grids, Fp4Outputs out) {
  const Fp4Place place(grids, rows.count());
  if (place.rows == 0) return;
  float numbers[kFp4Block * kFp4Block];
  load_fp4_block(x, grids, place, numbers);
  const int64_t matrix = grids.matrices.scale_row(place.row);
  float largest = 0;
  for (int64_t part = 0; part < out.parts; ++part) {
    largest = larger_magnitude(largest, out.amax[part * grids.matrices.matrices() + matrix]);
  }
  const int64_t columns = grids.blocks.columns();
  out.scales[grids.blocks.scale_row(place.row) * grids.blocks.scale_columns() +
             place.column / grids.block.columns] =
      quantize_fp4(numbers, static_cast<int>(place.rows * place.columns), largest,
                   out.is_stochastic);
  for (int64_t i = 0; i < place.rows * place.columns; ++i) {
    const int64_t row = place.row + i / place.columns;
    const int64_t column = place.column + i % place.columns;
    const uint8_t code = f8e4m3::nearest(numbers[i]).bits;
    if (out.codes != nullptr) out.codes[row * columns + column] = code;
    if (out.transposed == nullptr) continue;
    out.transposed[(grids.lines.scale_row(row) * columns + column) * kTransposedRows +
                   grids.lines.row_in_block(row)] = code;
  }
}

__global__ void fill_scales_kernel(float* scales, int64_t count) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < count) scales[i] = 1;
}

template <class T>
void quantize_fp4_blocks(const CudaKernelArguments& args) {
  const auto& attributes = args.attributes->as<QuantizeAttributes>();
  const Fp4Grids grids(args, attributes.has_rows() ? attributes.block : attributes.transposed_block,
                       attributes.rotates);
  const CudaTensor& scales =
      args.output(attributes.has_rows() ? 1 : attributes.transposed_scales_output());
  Fp4Outputs out{.amax = args.in<float>(2),
                 .parts = args.input(2).shape.elements() / grids.matrices.matrices(),
                 .is_stochastic = attributes.is_stochastic,
                 .codes = nullptr,
                 .transposed = nullptr,
                 .scales = static_cast<float*>(scales.data)};
  if (attributes.has_rows()) out.codes = static_cast<uint8_t*>(args.output(0).data);
  if (attributes.has_transposed()) {
    const CudaTensor& transposed = args.output(attributes.transposed_output());
    out.transposed = static_cast<uint8_t*>(transposed.data);
    check_cuda(cudaMemsetAsync(out.transposed, 0, static_cast<size_t>(transposed.shape.elements()),
                               args.stream),
               "clearing codes");
  }
  const int64_t count = scales.shape.elements();
  launch(args, {static_cast<unsigned>(ceil_divide(count, 256)), 256}, fill_scales_kernel,
         out.scales, count);
  launch(args, {grids.thread_blocks(), Fp4Grids::kFp4Threads}, fp4_blocks_kernel<T>, args.in<T>(0),
         live_rows_of(args.input(0), grids.blocks), grids, out);
}

template <class T>
__global__ void __launch_bounds__(Fp4Grids::kFp4Threads)
    rotated_maxima_kernel(const T* x, LiveRows rows, Fp4Grids grids, uint32_t* maxima) {
  const Fp4Place place(grids, rows.count());
  if (place.rows == 0) return;
  float numbers[kFp4Block];
  load_fp4_block(x, grids, place, numbers);
  atomicMax(maxima + grids.matrices.scale_row(place.row),
            __float_as_uint(largest_of(numbers, static_cast<int>(place.rows))));
}

// Of each matrix, or expert.
template <class T>
void find_rotated_maxima(const CudaKernelArguments& args, uint32_t* maxima, int64_t count) {
  check_cuda(cudaMemsetAsync(maxima, 0, static_cast<size_t>(count) * sizeof(uint32_t), args.stream),
             "clearing maxima");
  const Fp4Grids grids(args, {kFp4Block, 1}, /*rotated=*/true);
  launch(args, {grids.thread_blocks(), Fp4Grids::kFp4Threads}, rotated_maxima_kernel<T>,
         args.in<T>(0), live_rows_of(args.input(0), grids.blocks), grids, maxima);
}

template <class T, __nv_fp8_interpretation_t kFormat>
void quantize_any(const CudaKernelArguments& args) {
  const auto& attributes = args.attributes->as<QuantizeAttributes>();
  const CudaTensor x = quantized_tensor(args);
  if (attributes.measures) {
    const CudaTensor& amax = args.output(attributes.measured_output());
    const BlockShape block = attributes.has_rows() ? attributes.block : attributes.transposed_block;
    find_maxima<T>(args, cuda_grid_of(x, block, args.input(1), attributes.part), attributes.rounds,
                   static_cast<uint32_t*>(amax.data), amax.shape.elements());
  }
  auto* factors = reinterpret_cast<float*>(args.scratch);
  if (attributes.has_rows()) {
    const ScaleGrid grid = cuda_grid_of(x, attributes.block, args.input(1), attributes.part);
    find_scales<T>(args, grid, 1, factors);
    store_codes<T, kFormat>(args, grid, factors);
  }
  if (!attributes.has_transposed()) return;
  const ScaleGrid grid = cuda_grid_of(x, attributes.transposed_block, args.input(1));
  if (!attributes.shares_scales()) {
    if (attributes.has_rows()) factors += args.output(1).shape.elements();
    find_scales<T>(args, grid, attributes.transposed_scales_output(), factors);
  }
  store_transposed<T, kFormat>(args, grid, factors);
}

template <class T>
struct QuantizeCuda {
  static void run(const CudaKernelArguments& args) {
    const auto& attributes = args.attributes->as<QuantizeAttributes>();
    if (attributes.rule == ScaleRule::fp4) {
      quantize_fp4_blocks<T>(args);
    } else if (attributes.format == DType::f8e4m3) {
      quantize_any<T, __NV_E4M3>(args);
    } else {
      quantize_any<T, __NV_E5M2>(args);
    }
  }
};

void quantize_in_tiles(const CudaKernelArguments& args) {
  quantize_tiles(args, tile_factors(args));
}

template <class T>
struct BlockAmaxCuda {
  static void run(const CudaKernelArguments& args) {
    const auto& [block, part, rounds, rotates] = args.attributes->as<BlockAmaxAttributes>();
    if (rotates) {
      return find_rotated_maxima<T>(args, static_cast<uint32_t*>(args.output(0).data),
                                    args.output(0).shape.elements());
    }
    find_maxima<T>(args, cuda_grid_of(args.input(0), block, args.input(1), part), rounds,
                   static_cast<uint32_t*>(args.output(0).data), args.output(0).shape.elements());
  }
};

}  // namespace

const float* tile_factors(const CudaKernelArguments& args) {
  if (tile_scales(args.attributes->as<QuantizeAttributes>()) != TileScales::whole) return nullptr;
  const CudaTensor x = quantized_tensor(args);
  const ScaleGrid grid = cuda_grid_of(x, {}, args.input(1));
  auto* const factors = reinterpret_cast<float*>(args.scratch);
  if (x.dtype == DType::f32) {
    find_scales<float>(args, grid, 1, factors);
  } else {
    find_scales<Bf16>(args, grid, 1, factors);
  }
  return factors;
}

CudaKernel quantize_cuda_kernel_of(const QuantizeAttributes& attributes, const CudaTensor& x) {
  if (!quantizes_tiles(attributes, x)) return select_cuda_kernel<QuantizeCuda>(x.dtype);
  return &quantize_in_tiles;
}

CudaKernel quantize_cuda_kernel(const OpView& op) {
  const Value& x = op.input(0);
  return quantize_cuda_kernel_of(op.attributes<QuantizeAttributes>(),
                                 {.dtype = x.dtype, .shape = x.shape});
}

CudaKernel block_amax_cuda_kernel(const OpView& op) {
  return select_cuda_kernel<BlockAmaxCuda>(op.input(0).dtype);
}

}  // namespace troupe
