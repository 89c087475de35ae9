// What the own attention kernels (attention_cuda.cu, attention_sm90.cuh) know of a call: sizes,
// which positions its queries have, what they see, dropout. Plain values, made on the host.
#pragma once

#include "ops/attention/attention/attention_mask.h"
#include "ops/attention/attention/cuda/attention_call.h"
#include "ops/cuda/random.cuh"
#include "program/cuda/device.cuh"

namespace troupe {

// Sizes, visibility and dropout of a call.
struct AttentionSizes {
  int64_t rows;       // of queries in each sequence
  int64_t chunk;      // of these, at consecutive positions
  int64_t positions;  // of a sequence: its keys
  int ranks;
  int rank;
  int heads;
  int groups;
  int head_dim;
  int value_dim;
  int64_t query_stride;
  int64_t key_stride;
  int64_t window;
  const int32_t* starts;  // of all queries, or null
  double scale;
  int first_head;
  int all_heads;
  bool drops;
  DeviceDropout dropout;
  const int64_t* step;

  explicit AttentionSizes(const AttentionCall& call)
      : AttentionSizes(call, call.shape.attributes) {}

  AttentionSizes(const AttentionCall& call, const AttentionAttributes& a)
      : rows(call.shape.rows()),
        chunk(call.shape.chunk()),
        positions(call.shape.positions()),
        ranks(call.shape.chunks.ranks),
        rank(call.shape.chunks.rank),
        heads(a.heads),
        groups(a.groups),
        head_dim(a.head_dim),
        value_dim(a.value_size()),
        query_stride(call.query_stride),
        key_stride(call.key_stride),
        window(a.window),
        starts(call.starts),
        scale(a.scale),
        first_head(a.first_head),
        all_heads(a.all_heads == 0 ? a.heads : a.all_heads),
        drops(call.step != nullptr),
        dropout(a.seed, a.substream, a.probability),
        step(call.step) {}

  __device__ int64_t out_stride() const { return int64_t{heads} * value_dim; }
  // Where chunk `number` of the queries begins.
  __device__ int64_t position(int number) const {
    return (number == 0 ? rank : 2 * ranks - 1 - rank) * chunk;
  }
  // Of queries from row `row` of sequence b on, the first of which has position `position`.
  __device__ AttentionMask mask(int64_t b, int64_t row, int64_t position) const {
    return {window, starts == nullptr ? nullptr : starts + b * rows + row, position};
  }
  // Is a probability kept? `head` is that of this call in sequence b.
  __device__ bool keeps(uint64_t seed, int64_t b, int head, int64_t query, int64_t key) const {
    const int64_t number = b * all_heads + first_head + head;
    const int64_t row = (positions + 3) / 4 * 4;
    return dropout.keeps(seed, static_cast<uint64_t>((number * positions + query) * row + key));
  }
};

// Consecutive queries of one chunk.
struct QueryTile {
  int64_t row;       // of a sequence's queries
  int64_t end;       // of the chunk's rows
  int64_t position;  // of the first row
  int64_t count;

  // Of these queries, in sequence b.
  __device__ AttentionMask mask(const AttentionSizes& sizes, int64_t b) const {
    return sizes.mask(b, row, position);
  }
  __device__ AttentionBlock block() const { return {position, count}; }

  // Tile `number` of chunk `of`.
  template <int kTile>
  __device__ static QueryTile make(const AttentionSizes& sizes, int of, int64_t number) {
    const int64_t first = number * kTile;
    QueryTile tile;
    tile.row = of * sizes.chunk + first;
    tile.end = (of + 1) * sizes.chunk;
    tile.position = sizes.position(of) + first;
    tile.count = sizes.chunk - first < kTile ? sizes.chunk - first : kTile;
    return tile;
  }
  // Tile `number` of all chunks.
  template <int kTile>
  __device__ static QueryTile make(const AttentionSizes& sizes, int number) {
    const auto tiles = static_cast<int>((sizes.chunk + kTile - 1) / kTile);
    return make<kTile>(sizes, number / tiles, number % tiles);
  }
};

}  // namespace troupe
