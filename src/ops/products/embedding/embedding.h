// Looks up rows of a table: y[t] = weight[tokens[t]], for tokens i32 [T] and weight [V, h].
//
// An id outside [0, V) gives a row of zeros and contributes to no gradient; so a table that holds
// only a part of the vocabulary can be used with shifted ids.
//
// One id may be the padding token: it is looked up like any other, but contributes to no gradient
// (as with padding_idx of PyTorch's nn.Embedding).
//
// Kinds
//   embedding                 (tokens, weight)              -> y [T, h], in weight's dtype
//   embedding_weight_gradient (dy, tokens, target optional) -> d_weight [V, h]
// The weight gradient has the accumulation dtype, or is written to or added into `target`, whose
// dtype is that or the weight's (declare_weight_gradient in program/derivative.h):
//   d_weight[v] (+)= sum of dy[t] over t with tokens[t] = v, in ascending t.
// Rows of tokens that do not occur, and that of the padding token, are zero, or untouched when
// accumulating. No tensor is ragged.
#pragma once

#include <string>

#include "program/builder.h"
#include "program/op_spec.h"

namespace troupe {

struct EmbeddingAttributes {
  int32_t padding_token = -1;  // -1: none
};

struct EmbeddingWeightGradientAttributes {
  int32_t vocabulary = 0;  // V
  int32_t padding_token = -1;
  bool accumulate = false;
};

// Emits the lookup of `tokens` (i32 [T]) in `weight` ([V, h]) and returns y [T, h].
ValueId embedding(Builder& builder, ValueId tokens, ValueId weight,
                  const EmbeddingAttributes& attributes, const std::string& name);

extern const OpSpec kEmbedding;
extern const OpSpec kEmbeddingWeightGradient;

}  // namespace troupe
