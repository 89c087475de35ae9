// The index of a checkpoint (index.json): what is stored, where, and with which hashes.
//
// docs/checkpoint_format.md is the definition of the format; this is its image in memory, with the
// functions that write and read it. Parsing guarantees everything that the format demands of the
// index alone: known version, distinct names, and for every tensor slices that lie within it, do
// not overlap and together cover it. What the index says about the shards is checked where they are
// opened (checkpoint.h).
//
// Errors: a text that breaks a rule is a UserError (exit status 1) naming the path and the tensor.
// All functions may be called from any thread.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/dtype.h"
#include "base/shape.h"

namespace troupe {

// What a stored tensor is for; loading is complete role by role.
enum class CheckpointRole : uint8_t {
  parameter,  // a trained weight, as the forward pass uses it
  optimizer,  // kept by the optimizer for a parameter: master weights, moments
  state,      // anything else that evolves with training: router bias, counters
};

std::string_view name_of(CheckpointRole role);

// A box of elements inside a tensor: where it begins in each dimension, and its extents. Only the
// first shape.rank() offsets count.
struct Box {
  std::array<int64_t, Shape::kMaxRank> offset{};
  Shape shape;
};

struct StoredSlice {
  std::string file;    // name of the shard
  std::string tensor;  // name of the tensor in the shard
  Box box;             // never empty
  uint64_t hash = 0;   // XXH3-64 of the slice's bytes
};

struct StoredTensor {
  std::string name;
  CheckpointRole role = CheckpointRole::parameter;
  DType dtype = DType::f32;
  Shape shape;
  std::vector<StoredSlice> slices;  // none when the tensor has no elements
};

struct StoredShard {
  std::string file;
  uint64_t bytes = 0;        // size of the file
  uint64_t header_hash = 0;  // XXH3-64 of its length field and header
};

struct CheckpointIndex {
  int64_t step = 0;
  std::string troupe_version;
  std::string training;  // text of a JSON object
  std::vector<StoredShard> shards;
  std::vector<StoredTensor> tensors;
};

// The text of index.json. `index.training` must be the text of a JSON object.
std::string to_json(const CheckpointIndex& index);

// Reads such a text; `path` is for messages.
CheckpointIndex parse_checkpoint_index(std::string_view text, const std::string& path);

// Empty when `boxes` are non-empty boxes within `shape` that cover each of its elements exactly
// once; otherwise what is wrong, as the end of a sentence about the tensor.
std::string tiling_fault(const Shape& shape, std::span<const Box> boxes);

// The elements that two boxes of one tensor share; an extent is zero when there are none.
Box intersection(const Box& a, const Box& b);

}  // namespace troupe
