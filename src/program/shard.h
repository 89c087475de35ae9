// Shards: a tensor that several ranks use alike, cut into as many parts, one for each, of which the
// rank keeps the optimizer state, or which are all that it keeps. Plain values; any thread.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "base/shape.h"

namespace troupe {

// Indices begin to end - 1.
struct IndexRange {
  int64_t begin = 0;
  int64_t end = 0;
  bool operator==(const IndexRange&) const = default;
};

// Number `place` of `count` shards. A tensor with an owner is not cut: the owner's has all of it.
struct Shard {
  int32_t place = 0;
  int32_t count = 1;
  int32_t owner = -1;
  bool operator==(const Shard&) const = default;
};

// The elements of a shard, in row-major order. With R vectors of the last dimension (of a tensor of
// one dimension: elements) they are those of vectors R * place / count to R * (place + 1) / count.
// A shard may be empty.
inline IndexRange shard_of(const Shape& shape, Shard shard) {
  if (shard.owner >= 0) return {0, shard.owner == shard.place ? shape.elements() : 0};
  const int64_t vector = shape.rank() > 1 ? shape.back() : 1;
  const int64_t vectors = vector == 0 ? 0 : shape.elements() / vector;
  return {vectors * shard.place / shard.count * vector,
          vectors * (shard.place + 1) / shard.count * vector};
}

// The owner of tensor number `i` where the first tensors have these owners.
inline int32_t owner_of(std::span<const int16_t> owners, size_t i) {
  return i < owners.size() ? owners[i] : -1;
}

// A tensor of the elements of a shard: [vectors, last dimension] or [elements]; `shape` itself
// where they are all.
inline Shape shape_of_shard(const Shape& shape, Shard shard) {
  const IndexRange range = shard_of(shape, shard);
  const int64_t elements = range.end - range.begin;
  if (elements == shape.elements()) return shape;
  return shape.rank() > 1 ? Shape{elements / shape.back(), shape.back()} : Shape{elements};
}

// A rank's share of the elements of a sum that all get: whole cache lines, so that no two ranks
// write one.
inline IndexRange share_of(int64_t elements, int rank, int ranks) {
  constexpr int64_t kLine = 16;
  const int64_t lines = (elements + kLine - 1) / kLine;
  return {std::min(elements, lines * rank / ranks * kLine),
          std::min(elements, lines * (rank + 1) / ranks * kLine)};
}

}  // namespace troupe
