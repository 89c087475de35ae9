// Quantisation in tiles of 128 x 128 elements (quantize_tiles.h), for kernels that differ in where
// the elements come from. A block of kTileThreads takes a tile; each of its threads has packs of
// some of its rows.
//
// Device functions, and what launches give them.
#pragma once

#include <cuda_fp8.h>

#include "ops/precision/cuda/block_scale.cuh"
#include "ops/precision/cuda/row_strips.cuh"
#include "ops/precision/cuda/tile_scales.h"
#include "ops/precision/cuda/transposed_rows.cuh"
#include "program/cuda/device.cuh"

namespace troupe::code_tiles {

inline constexpr int kTile = kTransposedRows;  // rows and columns
inline constexpr int kTileThreads = 512;
inline constexpr int kTileBlocks = 2;           // of threads on a multiprocessor, at least
inline constexpr int kChunk = 16;               // codes that are stored at once
inline constexpr int kChunks = kTile / kChunk;  // of a column
inline constexpr int kPitch = kTile + kChunk;   // of rows in shared memory

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
inline constexpr int kMostRowsAtOnce = PacksOf<Bf16>::kRowsAtOnce;
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

template <class T>
__device__ __forceinline__ uint32_t largest_of_pack(const Pack<T>& pack) {
  uint32_t largest = 0;
#pragma unroll
  for (const T& value : pack.values) largest = max(largest, magnitude(value));
  return largest;
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

// The elements of a tile: a row r of it is row `rows.first + r` of what is quantised.
struct TilePlace {
  TransposedRows rows;
  int64_t block = 0;     // of transposed codes
  int columns = 0;       // of a row of codes
  int first_column = 0;  // of the tile,
  int end_column = 0;    // and the first that is not of it or lies beyond the row
};

// That of this block, whose rows are cut into tiles from column `begin` to `end`: rows of codes
// have no others, or several such ranges.
__device__ __forceinline__ TilePlace tile_place(const TransposedGrid& grid, int begin, int end) {
  TilePlace tile;
  tile.block = blockIdx.x;
  tile.rows = grid.rows_of(tile.block);
  tile.columns = static_cast<int>(grid.columns());
  tile.first_column = begin + static_cast<int>(blockIdx.y) * kTile;
  tile.end_column = min(tile.first_column + kTile, end);
  return tile;
}

// The packs of a thread are of column `own_column()` of the tile on, of rows own_row(i).
template <class T>
__device__ __forceinline__ int own_column() {
  return static_cast<int>(threadIdx.x) % PacksOf<T>::kPacks * Pack<T>::kElements;
}
template <class T>
__device__ __forceinline__ int own_row(int i) {
  return static_cast<int>(threadIdx.x) / PacksOf<T>::kPacks + i * PacksOf<T>::kRowsAtOnce;
}

template <class T>
__device__ __forceinline__ Pack<T> zeros() {
  Pack<T> pack;
#pragma unroll
  for (T& value : pack.values) value = T(0.0F);
  return pack;
}

// Quantises the packs that the threads of a block have of a tile, zeros beyond its rows and
// columns.
template <__nv_fp8_interpretation_t kFormat, TileScales kScales, class T>
__device__ __forceinline__ void quantize_tile(TileMemory& memory,
                                              const Pack<T> (&packs)[PacksOf<T>::kOwnRows],
                                              const TilePlace& tile, const TileOutputs& out) {
  constexpr int kPackElements = Pack<T>::kElements;
  constexpr int kPacks = PacksOf<T>::kPacks;
  constexpr int kOwnRows = PacksOf<T>::kOwnRows;
  using Words = CodeWords<kPackElements>;
  constexpr float kLargestCode = kFormat == __NV_E4M3 ? f8e4m3::kLargest : f8e5m2::kLargest;
  const int column = tile.first_column + own_column<T>();

  float factors[kPackElements];
  uint32_t largest = 0;
  if constexpr (kScales != TileScales::lines) {
#pragma unroll
    for (const Pack<T>& own : packs) largest = max(largest, largest_of_pack(own));
  }
  if constexpr (kScales == TileScales::whole) {
    const float factor = out.factors[tile.rows.matrix];
#pragma unroll
    for (float& each : factors) each = factor;
    if (out.maxima != nullptr) {
      largest = largest_of_tile(memory, largest);
      if (threadIdx.x == 0 && largest > 0) atomicMax(out.maxima + tile.rows.matrix, largest);
    }
  }
  if constexpr (kScales == TileScales::squares) {
    const BlockScale scale = block_scale(out.rule, kLargestCode, largest_of_tile(memory, largest));
    float* const scales = out.scales != nullptr ? out.scales : out.transposed_scales;
    if (threadIdx.x == 0)
      scales[tile.block * out.scale_columns + tile.first_column / kTile] = scale.scale;
#pragma unroll
    for (float& each : factors) each = scale.factor;
  }

  if (out.codes != nullptr) {
#pragma unroll
    for (int i = 0; i < kOwnRows; ++i) {
      const int row = own_row<T>(i);
      if constexpr (kScales == TileScales::lines) {
        uint32_t of_row = largest_of_pack(packs[i]);
#pragma unroll
        for (int width = kPacks / 2; width > 0; width /= 2) {
          of_row = max(of_row, __shfl_xor_sync(0xffffffffU, of_row, width));
        }
        const BlockScale scale = block_scale(out.rule, kLargestCode, of_row);
        if (own_column<T>() == 0 && row < tile.rows.count) {
          out.scales[(tile.rows.first + row) * out.scale_columns + tile.first_column / kTile] =
              scale.scale;
        }
#pragma unroll
        for (float& each : factors) each = scale.factor;
      }
      if (row < tile.rows.count && column < tile.end_column) {
        *reinterpret_cast<Words*>(out.codes + (tile.rows.first + row) * tile.columns + column) =
            codes_of<kFormat>(packs[i], factors);
      }
    }
  }
  if (out.transposed == nullptr) return;
  if constexpr (kScales == TileScales::lines) {
    uint32_t of_columns[kPackElements] = {};
#pragma unroll
    for (const Pack<T>& own : packs) {
#pragma unroll
      for (int j = 0; j < kPackElements; ++j) {
        of_columns[j] = max(of_columns[j], magnitude(own.values[j]));
      }
    }
    column_factors(
        memory, out.rule, kLargestCode, of_columns,
        [&](int at, float scale) {
          if (tile.first_column + at < tile.end_column) {
            out.transposed_scales[tile.block * tile.columns + tile.first_column + at] = scale;
          }
        },
        factors);
  }
#pragma unroll
  for (int i = 0; i < kOwnRows; ++i) {
    *reinterpret_cast<Words*>(memory.rows + own_row<T>(i) * kPitch + own_column<T>()) =
        codes_of<kFormat>(packs[i], factors);
  }
  __syncthreads();
  store_columns(memory, tile.end_column - tile.first_column,
                out.transposed + (tile.block * tile.columns + tile.first_column) * kTile);
}

// Of all blocks of transposed codes, in tiles of that many columns in all.
inline dim3 tiles_of(const TransposedGrid& grid, int64_t columns) {
  return {static_cast<unsigned>(std::max<int64_t>(grid.blocks(), 1)),
          static_cast<unsigned>(ceil_divide(columns, kTile))};
}

// Of a run of quantize; `factors` of whole matrices, or null. Measured maxima are cleared.
inline TileOutputs tile_outputs(const CudaKernelArguments& args, const float* factors) {
  const auto& attributes = args.attributes->as<QuantizeAttributes>();
  TileOutputs out;
  out.factors = factors;
  out.rule = attributes.rule;
  out.rounds = attributes.rounds;
  out.scale_columns = ceil_divide(quantized_tensor(args).shape.back(), kTile);
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
  return out;
}

}  // namespace troupe::code_tiles
