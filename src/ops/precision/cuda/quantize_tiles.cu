#include <cuda_fp8.h>

#include "ops/precision/cuda/block_scale.cuh"
#include "ops/precision/cuda/quantize_tiles.h"
#include "ops/precision/cuda/row_strips.cuh"
#include "ops/precision/cuda/transposed_rows.cuh"
#include "program/cuda/device.cuh"

namespace troupe {
namespace {

constexpr int kTile = kTransposedRows;  // rows and columns
constexpr int kTileThreads = 512;
constexpr int kTileBlocks = 2;           // of threads on a multiprocessor, at least
constexpr int kChunk = 16;               // codes that are stored at once
constexpr int kChunks = kTile / kChunk;  // of a column
constexpr int kPitch = kTile + kChunk;   // of rows in shared memory

// How the threads of a block share the elements of a tile: each has a pack
// of the rows that are kRowsAtOnce apart.
template <int kElements>
struct TilePacks {
  static constexpr int kPacks = kTile / kElements;           // of a row
  static constexpr int kRowsAtOnce = kTileThreads / kPacks;  // of which each thread has a pack
  static constexpr int kOwnRows = kTile / kRowsAtOnce;       // of a thread
};
template <class T>
using PacksOf = TilePacks<Pack<T>::kElements>;
using PacksOfCodes = TilePacks<8>;
constexpr int kMostRowsAtOnce = PacksOf<Bf16>::kRowsAtOnce;
static_assert(PacksOf<float>::kRowsAtOnce <= kMostRowsAtOnce);

struct TileOutputs {
  uint8_t* codes = nullptr;  // in rows; null: they are not stored
  float* scales = nullptr;
  uint8_t* transposed = nullptr;  // null: they are not stored
  float* transposed_scales = nullptr;
  const float* factors = nullptr;  // of whole matrices
  uint32_t* maxima = nullptr;      // of whole matrices: zeros before; null: they are not measured
  int64_t scale_columns = 0;       // of codes in rows, and of squares
  bool rounds = false;             // QuantizeAttributes::rounds
  ScaleRule rule = ScaleRule::ratio;
};

struct TileMemory {
  uint8_t rows[kTile * kPitch];
  union {
    uint8_t columns[kTile * kTile];
    uint32_t maxima[kMostRowsAtOnce][kTile];  // of columns; later in the first row their factors
    uint32_t of_warps[kTileThreads / 32];
  };
};

template <class T>
__device__ __forceinline__ uint32_t magnitude(T value) {
  return __float_as_uint(widen(value)) & 0x7fffffffU;
}

template <int kElements>
struct alignas(kElements) CodeWords {
  uint32_t words[kElements / 4];
};

template <__nv_fp8_interpretation_t kFormat, class T, int kElements>
__device__ __forceinline__ CodeWords<kElements> codes_of(const Pack<T>& pack,
                                                         const float (&factors)[kElements]) {
  CodeWords<kElements> codes;
#pragma unroll
  for (int word = 0; word < kElements / 4; ++word) {
    uint32_t pairs[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int at = word * 4 + i * 2;
      const float2 numbers = make_float2(widen(pack.values[at]) * factors[at],
                                         widen(pack.values[at + 1]) * factors[at + 1]);
      pairs[i] = __nv_cvt_float2_to_fp8x2(numbers, __NV_SATFINITE, kFormat);
    }
    codes.words[word] = pairs[0] | pairs[1] << 16;
  }
  return codes;
}

// Rows of 4 codes become columns.
__device__ __forceinline__ void transpose_words(const uint32_t (&rows)[4], uint32_t (&columns)[4]) {
  const uint32_t low = __byte_perm(rows[0], rows[1], 0x5140);
  const uint32_t low_after = __byte_perm(rows[2], rows[3], 0x5140);
  const uint32_t high = __byte_perm(rows[0], rows[1], 0x7362);
  const uint32_t high_after = __byte_perm(rows[2], rows[3], 0x7362);
  columns[0] = __byte_perm(low, low_after, 0x5410);
  columns[1] = __byte_perm(low, low_after, 0x7632);
  columns[2] = __byte_perm(high, high_after, 0x5410);
  columns[3] = __byte_perm(high, high_after, 0x7632);
}

// Stores the codes in memory.rows as columns of a tile; `columns` are there.
__device__ __forceinline__ void store_columns(TileMemory& memory, int columns, uint8_t* out) {
  const int thread = static_cast<int>(threadIdx.x);
  // Each thread: four columns of eight rows, half a chunk. Chunks lie swizzled, so that few lanes
  // meet in a bank.
  const int quad = thread % 32;
  const int half = thread / 32;
  static_assert(kTileThreads / 32 == 2 * kChunks);
  uint32_t result[4][2];
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    uint32_t words[4];
    uint32_t turned[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = half * kChunk / 2 + part * 4 + i;
      words[i] = *reinterpret_cast<const uint32_t*>(memory.rows + row * kPitch + quad * 4);
    }
    transpose_words(words, turned);
#pragma unroll
    for (int i = 0; i < 4; ++i) result[i][part] = turned[i];
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    *reinterpret_cast<uint2*>(memory.columns + (quad * 4 + i) * kTile +
                              (half / 2 ^ quad % kChunks) * kChunk + half % 2 * 8) =
        make_uint2(result[i][0], result[i][1]);
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kTile * kChunks / kTileThreads; ++i) {
    const int column = (thread + i * kTileThreads) / kChunks;
    const int at = thread % kChunks;
    if (column >= columns) continue;
    *reinterpret_cast<uint4*>(out + column * kTile + at * kChunk) = *reinterpret_cast<const uint4*>(
        memory.columns + column * kTile + (at ^ column / 4 % kChunks) * kChunk);
  }
}

// The largest magnitude of a tile, in all threads.
__device__ __forceinline__ uint32_t largest_of_tile(TileMemory& memory, uint32_t largest) {
  largest = __reduce_max_sync(0xffffffffU, largest);
  if (threadIdx.x % 32 == 0) memory.of_warps[threadIdx.x / 32] = largest;
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < kTileThreads / 32; ++warp) {
    largest = max(largest, memory.of_warps[warp]);
  }
  __syncthreads();  // the memory is used again
  return largest;
}

// The factors of this thread's columns; `store(column, scale)` keeps their scales.
template <class Store, int kElements>
__device__ __forceinline__ void column_factors(TileMemory& memory, ScaleRule rule,
                                               float largest_code,
                                               const uint32_t (&largest)[kElements],
                                               const Store& store, float (&factors)[kElements]) {
  constexpr int kPacks = TilePacks<kElements>::kPacks;
  const int thread = static_cast<int>(threadIdx.x);
  uint32_t* const own = memory.maxima[thread / kPacks] + thread % kPacks * kElements;
#pragma unroll
  for (int j = 0; j < kElements; ++j) own[j] = largest[j];
  __syncthreads();
  if (thread < kTile) {
    uint32_t of_column = 0;
#pragma unroll
    for (int i = 0; i < TilePacks<kElements>::kRowsAtOnce; ++i) {
      of_column = max(of_column, memory.maxima[i][thread]);
    }
    const BlockScale scale = block_scale(rule, largest_code, of_column);
    store(thread, scale.scale);
    memory.maxima[0][thread] = __float_as_uint(scale.factor);
  }
  __syncthreads();
  const uint32_t* const found = memory.maxima[0] + thread % kPacks * kElements;
#pragma unroll
  for (int j = 0; j < kElements; ++j) factors[j] = __uint_as_float(found[j]);
}

template <class T, __nv_fp8_interpretation_t kFormat, TileScales kScales>
__global__ void __launch_bounds__(kTileThreads, kTileBlocks)
    quantize_tiles_kernel(const T* x, SourceRows source, TransposedGrid grid, TileOutputs out) {
  constexpr int kPackElements = Pack<T>::kElements;
  constexpr int kPacks = PacksOf<T>::kPacks;
  constexpr int kRowsAtOnce = PacksOf<T>::kRowsAtOnce;
  constexpr int kOwnRows = PacksOf<T>::kOwnRows;
  using Words = CodeWords<kPackElements>;
  constexpr float kLargestCode = kFormat == __NV_E4M3 ? f8e4m3::kLargest : f8e5m2::kLargest;
  __shared__ __align__(16) TileMemory memory;
  const int64_t block = blockIdx.x;
  const TransposedRows tile = grid.rows_of(block);
  if (tile.count == 0 && out.transposed == nullptr) return;
  const int64_t columns = grid.columns();
  const int64_t first_column = int64_t{blockIdx.y} * kTile;
  const int pack = static_cast<int>(threadIdx.x) % kPacks;
  const int own_row = static_cast<int>(threadIdx.x) / kPacks;
  const int64_t column = first_column + pack * kPackElements;

  Pack<T> packs[kOwnRows];
#pragma unroll
  for (int i = 0; i < kOwnRows; ++i) {
    const int row = own_row + i * kRowsAtOnce;
    const bool is_inside = row < tile.count && column < columns;
    const int64_t from = is_inside ? source.of(tile.first + row) : -1;
    if (from >= 0) {
      packs[i] = load_pack(x + from * columns + column);
      if constexpr (std::is_same_v<T, float>) {
#pragma unroll
        for (float& value : packs[i].values) value = number_of(value, out.rounds);
      }
    } else {
#pragma unroll
      for (int j = 0; j < kPackElements; ++j) packs[i].values[j] = T(0.0F);
    }
  }

  float factors[kPackElements];
  uint32_t of_rows[kOwnRows] = {};
  uint32_t of_columns[kPackElements] = {};
  if constexpr (kScales == TileScales::whole) {
    const float factor = out.factors[tile.matrix];
#pragma unroll
    for (float& each : factors) each = factor;
    if (out.maxima != nullptr) {
      uint32_t largest = 0;
#pragma unroll
      for (const Pack<T>& own : packs) {
#pragma unroll
        for (const T& value : own.values) largest = max(largest, magnitude(value));
      }
      largest = largest_of_tile(memory, largest);
      if (threadIdx.x == 0 && largest > 0) atomicMax(out.maxima + tile.matrix, largest);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kOwnRows; ++i) {
#pragma unroll
      for (int j = 0; j < kPackElements; ++j) {
        const uint32_t of_element = magnitude(packs[i].values[j]);
        of_rows[i] = max(of_rows[i], of_element);
        of_columns[j] = max(of_columns[j], of_element);
      }
    }
  }
  if constexpr (kScales == TileScales::squares) {
    uint32_t largest = 0;
#pragma unroll
    for (const uint32_t of_row : of_rows) largest = max(largest, of_row);
    const BlockScale scale = block_scale(out.rule, kLargestCode, largest_of_tile(memory, largest));
    float* const scales = out.scales != nullptr ? out.scales : out.transposed_scales;
    if (threadIdx.x == 0) scales[block * out.scale_columns + blockIdx.y] = scale.scale;
#pragma unroll
    for (float& each : factors) each = scale.factor;
  }

  if (out.codes != nullptr) {
#pragma unroll
    for (int i = 0; i < kOwnRows; ++i) {
      const int row = own_row + i * kRowsAtOnce;
      if constexpr (kScales == TileScales::lines) {
        uint32_t largest = of_rows[i];
#pragma unroll
        for (int width = kPacks / 2; width > 0; width /= 2) {
          largest = max(largest, __shfl_xor_sync(0xffffffffU, largest, width));
        }
        const BlockScale scale = block_scale(out.rule, kLargestCode, largest);
        if (pack == 0 && row < tile.count) {
          out.scales[(tile.first + row) * out.scale_columns + blockIdx.y] = scale.scale;
        }
#pragma unroll
        for (float& each : factors) each = scale.factor;
      }
      if (row < tile.count && column < columns) {
        *reinterpret_cast<Words*>(out.codes + (tile.first + row) * columns + column) =
            codes_of<kFormat>(packs[i], factors);
      }
    }
  }
  if (out.transposed == nullptr) return;
  if constexpr (kScales == TileScales::lines) {
    column_factors(
        memory, out.rule, kLargestCode, of_columns,
        [&](int at, float scale) {
          if (first_column + at < columns) {
            out.transposed_scales[block * columns + first_column + at] = scale;
          }
        },
        factors);
  }
#pragma unroll
  for (int i = 0; i < kOwnRows; ++i) {
    *reinterpret_cast<Words*>(memory.rows + (own_row + i * kRowsAtOnce) * kPitch +
                              pack * kPackElements) = codes_of<kFormat>(packs[i], factors);
  }
  __syncthreads();
  store_columns(memory, static_cast<int>(min(columns - first_column, int64_t{kTile})),
                out.transposed + (block * columns + first_column) * kTile);
}

// `has_packs`: rows are whole packs of eight codes.
__global__ void __launch_bounds__(kTileThreads, kTileBlocks)
    transpose_tiles_kernel(const uint8_t* codes, TransposedGrid grid, bool has_packs,
                           uint8_t* out) {
  constexpr int kElements = 8;
  __shared__ __align__(16) TileMemory memory;
  const int64_t block = blockIdx.x;
  const TransposedRows tile = grid.rows_of(block);
  const int64_t columns = grid.columns();
  const int64_t first_column = int64_t{blockIdx.y} * kTile;
  const int within = static_cast<int>(threadIdx.x) % PacksOfCodes::kPacks * kElements;
  const auto left = static_cast<int>(min(columns - first_column - within, int64_t{kElements}));
#pragma unroll
  for (int i = 0; i < PacksOfCodes::kOwnRows; ++i) {
    const int row =
        static_cast<int>(threadIdx.x) / PacksOfCodes::kPacks + i * PacksOfCodes::kRowsAtOnce;
    const uint8_t* const from = codes + (tile.first + row) * columns + first_column + within;
    CodeWords<kElements> words = {};
    if (row < tile.count && left > 0) {
      if (has_packs) {
        words = *reinterpret_cast<const CodeWords<kElements>*>(from);
      } else {
#pragma unroll
        for (int j = 0; j < kElements; ++j) {
          if (j < left) words.words[j / 4] |= uint32_t{from[j]} << 8 * (j % 4);
        }
      }
    }
    *reinterpret_cast<CodeWords<kElements>*>(memory.rows + row * kPitch + within) = words;
  }
  __syncthreads();
  store_columns(memory, static_cast<int>(min(columns - first_column, int64_t{kTile})),
                out + (block * columns + first_column) * kTile);
}

template <class T, __nv_fp8_interpretation_t kFormat>
auto* select_tiles(TileScales scales) {
  switch (scales) {
    case TileScales::lines:
      return &quantize_tiles_kernel<T, kFormat, TileScales::lines>;
    case TileScales::squares:
      return &quantize_tiles_kernel<T, kFormat, TileScales::squares>;
    default:
      return &quantize_tiles_kernel<T, kFormat, TileScales::whole>;
  }
}

// Of all blocks of transposed codes.
dim3 tiles_of(const TransposedGrid& grid) {
  return {static_cast<unsigned>(std::max<int64_t>(grid.blocks(), 1)),
          static_cast<unsigned>(ceil_divide(grid.columns(), kTile))};
}

template <class T>
void launch_tiles(const CudaKernelArguments& args, const TransposedGrid& grid,
                  const TileOutputs& out) {
  const auto& attributes = args.attributes->as<QuantizeAttributes>();
  const TileScales scales = tile_scales(attributes);
  launch(args, {tiles_of(grid), kTileThreads},
         attributes.format == DType::f8e4m3 ? select_tiles<T, __NV_E4M3>(scales)
                                            : select_tiles<T, __NV_E5M2>(scales),
         static_cast<const T*>(args.input(0).data), source_rows_of(args), grid, out);
}

}  // namespace

void quantize_tiles(const CudaKernelArguments& args, const float* factors) {
  const auto& attributes = args.attributes->as<QuantizeAttributes>();
  const CudaTensor x = quantized_tensor(args);
  const TransposedGrid grid(x.shape, LiveRows(x), args.input(1));
  TileOutputs out;
  out.factors = factors;
  out.rule = attributes.rule;
  out.rounds = attributes.rounds;
  out.scale_columns = ceil_divide(x.shape.back(), kTile);
  if (attributes.has_rows()) {
    out.codes = static_cast<uint8_t*>(args.output(0).data);
    out.scales = static_cast<float*>(args.output(1).data);
  }
  if (attributes.has_transposed()) {
    out.transposed = static_cast<uint8_t*>(args.output(attributes.transposed_output()).data);
    out.transposed_scales =
        static_cast<float*>(args.output(attributes.transposed_scales_output()).data);
  }
  if (attributes.measures) {
    const CudaTensor& amax = args.output(attributes.measured_output());
    out.maxima = static_cast<uint32_t*>(amax.data);
    check_cuda(
        cudaMemsetAsync(out.maxima, 0,
                        static_cast<size_t>(amax.shape.elements()) * sizeof(uint32_t), args.stream),
        "clearing maxima");
  }
  if (x.dtype == DType::f32) return launch_tiles<float>(args, grid, out);
  launch_tiles<Bf16>(args, grid, out);
}

void transpose_tiles(const CudaKernelArguments& args) {
  const CudaTensor& codes = args.input(0);
  const TransposedGrid grid(codes.shape, LiveRows(codes), {});
  launch(args, {tiles_of(grid), kTileThreads}, transpose_tiles_kernel,
         static_cast<const uint8_t*>(codes.data), grid, codes.shape.back() % 8 == 0,
         static_cast<uint8_t*>(args.output(0).data));
}

}  // namespace troupe
