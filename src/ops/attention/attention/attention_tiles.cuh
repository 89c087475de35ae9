// Tiles of attention in ordinary arithmetic, for any type and head. Private to attention_cuda.cu.
#pragma once

#include <initializer_list>

#include "program/cuda/device.cuh"

namespace troupe {
namespace {

// Blocks of 16 x 16 threads work on tiles of kTile queries and as many keys. A thread has kSide x
// kSide scores of a tile, those of rows y + 16 i and columns x + 16 j, and of the rows of a result
// the columns x + 16 c for c < kColumns; so heads of up to 16 kColumns elements fit. Tiles of
// operands lie in shared memory in the accumulation type, their rows one element longer than the
// head so that 16 rows can be read at once.
constexpr int kSideThreads = 16;
constexpr int kThreads = kSideThreads * kSideThreads;

template <class A, int kSide>
struct Tiles {
  static constexpr int kTile = kSide * kSideThreads;

  // Of tiles of rows of these elements and `squares` tiles of scores.
  static size_t bytes(std::initializer_list<int> rows, int squares) {
    int elements = squares * kTile * (kTile + 1);
    for (const int row : rows) elements += kTile * (row + 1);
    return sizeof(A) * static_cast<size_t>(elements);
  }
};

// Copies rows [first, first + kTile) of a sequence, d elements each, to shared memory; rows beyond
// the sequence become zero.
template <class T, int kTile>
__device__ __forceinline__ void load_tile(const T* source, int64_t stride, int64_t first,
                                          int64_t sequence, int d, accumulation_t<T>* tile) {
  using A = accumulation_t<T>;
  constexpr int kElements = Pack<T>::kElements;
  const int thread = static_cast<int>(threadIdx.x);
  if (d % kElements == 0) {
    const int packs = d / kElements;
    for (int i = thread; i < kTile * packs; i += kThreads) {
      const int row = i / packs;
      const int column = i % packs * kElements;
      A* to = tile + row * (d + 1) + column;
      if (first + row < sequence) {
        const Pack<T> pack = load_pack(source + (first + row) * stride + column);
#pragma unroll
        for (int j = 0; j < kElements; ++j) to[j] = widen(pack.values[j]);
      } else {
#pragma unroll
        for (int j = 0; j < kElements; ++j) to[j] = A(0);
      }
    }
    return;
  }
  for (int i = thread; i < kTile * d; i += kThreads) {
    const int row = i / d;
    tile[row * (d + 1) + i % d] =
        first + row < sequence ? widen(source[(first + row) * stride + i % d]) : A(0);
  }
}

// scores[i][j] = rows[y + 16 i] . columns[x + 16 j]
template <class A, int kSide>
__device__ __forceinline__ void multiply_tiles(const A* rows, const A* columns, int d, int x, int y,
                                               A (&scores)[kSide][kSide]) {
#pragma unroll
  for (int i = 0; i < kSide; ++i) {
#pragma unroll
    for (int j = 0; j < kSide; ++j) scores[i][j] = A(0);
  }
  for (int c = 0; c < d; ++c) {
    A r[kSide];
    A k[kSide];
#pragma unroll
    for (int i = 0; i < kSide; ++i) r[i] = rows[(y + kSideThreads * i) * (d + 1) + c];
#pragma unroll
    for (int j = 0; j < kSide; ++j) k[j] = columns[(x + kSideThreads * j) * (d + 1) + c];
#pragma unroll
    for (int i = 0; i < kSide; ++i) {
#pragma unroll
      for (int j = 0; j < kSide; ++j) scores[i][j] += r[i] * k[j];
    }
  }
}

// sums[i][c] += sum over j of square[y + 16 i][j] values[j][x + 16 c]
template <class A, int kSide, int kColumns>
__device__ __forceinline__ void add_product(const A* square, const A* values, int d, int x, int y,
                                            A (&sums)[kSide][kColumns]) {
  constexpr int kTile = Tiles<A, kSide>::kTile;
  for (int j = 0; j < kTile; ++j) {
    A s[kSide];
#pragma unroll
    for (int i = 0; i < kSide; ++i) s[i] = square[(y + kSideThreads * i) * (kTile + 1) + j];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int column = x + kSideThreads * c;
      const A v = column < d ? values[j * (d + 1) + column] : A(0);
#pragma unroll
      for (int i = 0; i < kSide; ++i) sums[i][c] += s[i] * v;
    }
  }
}

template <class A, int kSide>
__device__ __forceinline__ void store_square(const A (&values)[kSide][kSide], int x, int y,
                                             A* square) {
  constexpr int kTile = Tiles<A, kSide>::kTile;
#pragma unroll
  for (int i = 0; i < kSide; ++i) {
#pragma unroll
    for (int j = 0; j < kSide; ++j) {
      square[(y + kSideThreads * i) * (kTile + 1) + x + kSideThreads * j] = values[i][j];
    }
  }
}

// Over the 16 threads that share a row.
template <class A, class Combine>
__device__ __forceinline__ A over_row(A value, const Combine& combine) {
#pragma unroll
  for (int width = kSideThreads / 2; width > 0; width /= 2) {
    value = combine(value, __shfl_xor_sync(0xffffffffU, value, width));
  }
  return value;
}

}  // namespace
}  // namespace troupe
