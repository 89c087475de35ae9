// Attention sinks: a learned score of each query head that no key has, to which a query can give
// probability (GPT-OSS; Xiao et al., "Efficient streaming language models with attention sinks",
// 2024). The kinds of attention take them as an optional operand; here is what they share.
//
// With the log-sum lse of the visible keys' scores and the sink s of its head, a query has
//   lse' = log(exp(lse) + exp(s)),  out' = exp(lse - lse') out
// The attention's gradient formulas hold for out' and lse' as they stand, and
//   d_s = - sum over the rows of exp(s - lse') d_out' . out'
//
// Kinds (H heads of e elements; S sinks, of which the heads have [first_sink, first_sink + H))
//   attention_sink_gradient (d_out [T, H e], out [T, H e], lse [T, H], sinks [S], target optional)
//       -> d_sinks [S], zeros where the sink is no head's; `target` as in declare_weight_gradient.
//       Rows are summed in fixed pieces.
// lse and sinks have the accumulation dtype.
#pragma once

#include <cstdint>

#include "program/builder.h"
#include "program/cuda_kernel.h"
#include "program/derivative.h"
#include "program/op_spec.h"

namespace troupe {

struct AttentionSinkGradientAttributes {
  int32_t heads = 0;
  int32_t value_dim = 0;  // e
  int32_t first_sink = 0;
  bool accumulate = false;
};

// Of the shape rules of attention: sinks, where there are some, are [S] for these heads.
void check_attention_sinks(const InferContext& context, int input, int32_t heads,
                           int32_t first_sink);

// Of the derivative rules of attention, whose first two outputs are out and lse: emits the gradient
// of input `input` if that is wanted.
void differentiate_attention_sinks(DerivativeContext& context, int input,
                                   const AttentionSinkGradientAttributes& attributes);

// What a GPU's attention has left, of T rows of heads of e elements.
struct SinkCall {
  DType dtype = DType::f32;
  int64_t rows = 0;
  int32_t heads = 0;
  int32_t value_dim = 0;
  void* out = nullptr;          // [T, H e] of dtype, made out'
  void* lse = nullptr;          // [T, H], made lse'
  const void* sinks = nullptr;  // [H]
};
// Launches that. Only in builds with CUDA.
void add_attention_sinks(const CudaKernelArguments& args, const SinkCall& call);

extern const OpSpec kAttentionSinkGradient;

}  // namespace troupe
