// Histories of largest elements, by which delayed scaling (Transformer Engine's) quantises: the
// scale of a tensor is known before it is there, so that one pass over it is enough.
//
// Of a linear map there is a history f32 [matrices, kHistoryKinds, steps]: of each matrix (expert)
// and each of its operands what was largest in the steps before, the newest first; 0: not yet.
//
// Kinds
//   delayed_amax         (history) -> input, weight, gradient: what quantize takes as `amax`
//     factor * newest    (most_recent), or
//     factor * max over the history
//     f32, [matrices, 1], of weights with `experts` [matrices, 1, 1].
//   amax_history_update  (history, forward, backward, skip) -> history, in place
//     `forward` and `backward`, f64 [ranks, n], have the largest elements of this step, one rank's
//     after the other's, those of this map from the attributes' columns on. The largest over the
//     ranks becomes the newest, the oldest is dropped. An operand of which the step had nothing but
//     zeros, or that was not finite, keeps its history (Transformer Engine keeps its scale), as all
//     do when skip, i32 [1], is not 0.
// There is no derivative.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "program/builder.h"
#include "program/op_spec.h"

namespace troupe {

// Operands of a linear map: its input, its weight, the gradient of its output.
inline constexpr int kHistoryKinds = 3;

// Before the name of the parameter, that of its history.
inline constexpr std::string_view kAmaxHistoryPrefix = "amax_history.";

struct DelayedAmaxAttributes {
  bool most_recent = true;
  bool experts = false;
  float factor = 1;  // 2^margin
};

struct AmaxHistoryAttributes {
  std::array<int64_t, kHistoryKinds> column = {};  // input and weight: of `forward`
};

// By operand.
std::array<ValueId, kHistoryKinds> delayed_amax(Builder& builder, ValueId history,
                                                const DelayedAmaxAttributes& attributes);
void amax_history_update(Builder& builder, ValueId history, ValueId forward, ValueId backward,
                         ValueId skip, const AmaxHistoryAttributes& attributes);

extern const OpSpec kDelayedAmax;
extern const OpSpec kAmaxHistoryUpdate;

}  // namespace troupe
