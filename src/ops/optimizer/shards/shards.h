// The collectives of a sharded optimizer, both in place. The rank at place r of a group of n has
// shard r of n of every tensor (program/shard.h), or all or nothing where the tensor has an owner:
//   reduce_shards   the rank's own shard becomes the sum of the ranks' tensors there, in ascending
//                   order of ranks; the other elements keep the rank's own terms
//   gather_shards   every shard comes from the rank whose own it is
//
// Kinds
//   reduce_shards (t0, t1, ...) -> t0, t1, ...   each f64, f32, bf16 (summed in f32,
//                                                rounded once) or i32
//   gather_shards (t0, t1, ...) -> t0, t1, ...   any dtypes
// Any number of tensors at once, so that many small ones are fused into one collective. None is
// ragged; each is state or a metric; every rank passes tensors of the same dtypes and sizes in the
// same order. There is no derivative: they stand around the update, after the backward pass.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "program/builder.h"
#include "program/op_spec.h"

namespace troupe {

struct ShardsAttributes {
  RankGroup group = RankGroup::dp_cp_within_instance;
  // Of the first tensors of the operation: the places of their owners, or -1.
  int16_t owner_count = 0;
  std::array<int16_t, 32> owner = {};

  std::span<const int16_t> owners() const {
    return std::span(owner).first(static_cast<size_t>(owner_count));
  }
};

// Tensors that go together: those that are cut by rows in one collective, and then those with an
// owner, in collectives of as many as attributes have owners for.
struct ShardedTensors {
  std::vector<ValueId> cut;
  std::vector<ValueId> owned;
  std::vector<int16_t> owners;  // of `owned`

  void add(ValueId tensor, int32_t owner);
};

// Both emit on the group's queue.
void reduce_shards(Builder& builder, const ShardedTensors& tensors, RankGroup group);
void gather_shards(Builder& builder, const ShardedTensors& tensors, RankGroup group);

extern const OpSpec kReduceShards;
extern const OpSpec kGatherShards;

}  // namespace troupe
