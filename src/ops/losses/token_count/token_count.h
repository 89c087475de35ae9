// Token count: the sum of a mask, that is of the weights that tokens have in the loss; and the
// factor that makes a sum over tokens a share of such a count.
//
// Kinds
//   token_count (mask [T])     -> [1]
//   token_share (tokens [1])   -> [1] = numerator / max(tokens, 1)
//   token_share (tokens [1], part [1]) -> [1] = numerator * part / max(tokens, 1); part is i32
//   token_mean  (sum [1], tokens [1]) -> sum [1] = sum / max(tokens, 1), in place: f64, and the sum
//                                        a metric
// f64 or f32, and token_count also i32; summed in double, in order, and rounded once. A share may
// have another of these types than the count. A mask has no gradient.
#pragma once

#include <string>

#include "program/builder.h"
#include "program/op_spec.h"

namespace troupe {

struct TokenShareAttributes {
  double numerator = 1;
  DType dtype = DType::f32;  // of the share
};

ValueId token_count(Builder& builder, ValueId mask, const std::string& name);
ValueId token_share(Builder& builder, ValueId tokens, const TokenShareAttributes& attributes,
                    const std::string& name, ValueId part = {});
// Divides a metric, a sum over tokens, by their number.
void token_mean(Builder& builder, ValueId sum, ValueId tokens);

extern const OpSpec kTokenCount;
extern const OpSpec kTokenShare;
extern const OpSpec kTokenMean;

}  // namespace troupe
