// Slices of a tensor of which each rank of a group holds one (model/parameter_slice.h), on one
// rank: the slices of all ranks, as all_gather leaves them, become the whole tensor, and the whole
// one becomes this rank's slice. The optimizer Muon stands between the two; gated delta nets take a
// rank's share of what all ranks of cp have.
//
// One dimension of the whole tensor is cut. It is made of sections, one after the other (queries,
// keys and values; gate and up), and of each section every rank has an equal part, in order. With
// `copies` c each part is held by c successive ranks: of n ranks, rank r has part r / c of n / c.
//
// Kinds
//   join_slices (x)     -> whole   x: the slices of ranks 0, 1, ..., n - 1, one after the other in
//                                  the first dimension. Of copies the first rank's is taken
//   take_slice  (whole) -> slice   that of rank `place`
//   take_slice_gradient (d_slice, target optional) -> d_whole   zeros where the rank has nothing;
//                                  `target` as in declare_weight_gradient
// Any float dtype, not ragged; d_whole has the accumulation dtype. join_slices has no derivative.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "program/builder.h"
#include "program/op_spec.h"

namespace troupe {

struct SliceSection {
  int64_t size = 0;    // in the whole tensor; 0: there is no such section
  int32_t copies = 1;  // a divisor of the number of ranks
};

struct SliceCut {
  std::array<SliceSection, 4> sections{};
  int32_t dimension = 0;
  int32_t ranks = 1;
  int32_t place = 0;
  bool accumulate = false;  // of take_slice_gradient, with a target: adds to it
};

ValueId join_slices(Builder& builder, ValueId x, const SliceCut& cut, const std::string& name);
ValueId take_slice(Builder& builder, ValueId whole, const SliceCut& cut, const std::string& name);

extern const OpSpec kJoinSlices;
extern const OpSpec kTakeSlice;
extern const OpSpec kTakeSliceGradient;

}  // namespace troupe
