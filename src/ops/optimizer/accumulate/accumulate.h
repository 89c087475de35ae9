// Adds a small tensor to a metric or a piece of state, in place:
//
//   target[i] = weight * source[i] * factor            (overwrite)
//   target[i] = max(target[i], the same)               (largest)
//   target[i] += weight * source[i] * factor           (otherwise)
//
// Kinds
//   accumulate (target, source, factor?) -> target
// `target` is f64 and a metric or state; `source` is f64, f32, i32 or i64, not ragged, of any shape
// with the same number of elements, or, with `in_part`, with some that belong to the target's
// elements from `first` on; `factor` is [1], f64 or f32, and 1 when absent. Arithmetic is in f64.
// When overwriting, the old contents of the target are not read. There is no derivative: what is
// counted here does not influence the loss.
#pragma once

#include <string>

#include "program/builder.h"
#include "program/op_spec.h"

namespace troupe {

struct AccumulateAttributes {
  double weight = 1;
  bool overwrite = false;
  bool largest = false;  // of the terms so far, instead of their sum
  bool in_part = false;  // the source has fewer elements than the target,
  int64_t first = 0;     // of which this is the first
};

// Emits target = or += weight * source * factor.
void accumulate(Builder& builder, ValueId target, ValueId source, double weight, bool overwrite,
                ValueId factor = {});
// Emits target = weight * source, or the larger of both.
void accumulate_largest(Builder& builder, ValueId target, ValueId source, double weight,
                        bool overwrite);
// Emits target += source, or = the larger of both, of the target's elements from `first` on.
void accumulate_at(Builder& builder, ValueId target, ValueId source, int64_t first);
void accumulate_largest_at(Builder& builder, ValueId target, ValueId source, int64_t first,
                           bool overwrite);

extern const OpSpec kAccumulate;

}  // namespace troupe
