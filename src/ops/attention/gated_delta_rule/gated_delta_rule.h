// The gated delta rule (Yang et al., "Gated Delta Networks: Improving Mamba2 with Delta Rule",
// 2024): attention whose memory is one matrix for each head, which forgets and is corrected.
//
// Rows are batch-major: row b S + s is position s of sequence b. A row of qkv has H_k heads of
// queries and then of keys of d_k elements each, then H_v heads of values of d_v; value head h goes
// with query and key head h / (H_v / H_k). A row of gates has beta of all value heads, then g <= 0.
// With q' = d_k^{-1/2} q / sqrt(|q|^2 + 1e-6) and k' = k / sqrt(|k|^2 + 1e-6), for each head, from
// a state S of d_k x d_v zeros, or from `initial`, that before the sequence:
//
//   D_t = e^{g_t} S_{t-1}
//   u_t = v_t - D_t^T k'_t
//   S_t = D_t + beta_t k'_t u_t^T
//   o_t = S_t^T q'_t
//
// With `starts` the state is zero before each document. The gradients go backwards, with dS_t all
// that reaches S_t:
//
//   dS_t  = e^{g_{t+1}} (dS_{t+1} - k'_{t+1} dv_{t+1}^T) + q'_t do_t^T
//   dv_t  = beta_t dS_t^T k'_t                   dq'_t = S_t do_t
//   dk'_t = beta_t dS_t u_t - D_t dv_t           d_beta_t = u_t . dS_t^T k'_t
//   dg_t  = sum over all elements of (dS_t - k'_t dv_t^T) D_t
//
// The gradient of `initial` is e^{g_0} (dS_0 - k'_0 dv_0^T).
//
// All in the accumulation type. Nothing is kept for the gradients but the inputs: the states are
// computed again from those of every delta_chunk(S)-th row.
//
// Kinds (T = B S rows, not ragged; starts is i32 [T]: the position in its sequence at which the
// document of each row begins, negative where that is before the sequence: such a row goes on from
// `initial`. initial is [B, H_v, d_k, d_v] in the accumulation dtype)
//   gated_delta_rule (qkv [T, 2 H_k d_k + H_v d_v], gates [T, 2 H_v] in the accumulation dtype,
//       starts optional, initial optional)                         -> o [T, H_v d_v]
//   gated_delta_rule_gradient (d_o, qkv, gates, starts, initial)   -> d_qkv, d_gates, and
//       d_initial where there is one
#pragma once

#include <cstdint>
#include <string>

#include "ops/attention/gated_delta_rule/delta_attributes.h"
#include "ops/choose_kernel.h"
#include "program/builder.h"
#include "program/op_spec.h"

namespace troupe {

// Where a sequence begins, what its state is, and where its documents begin.
struct DeltaBeginnings {
  ValueId starts = {};
  ValueId initial = {};
};

ValueId gated_delta_rule(Builder& builder, ValueId qkv, ValueId gates,
                         const DeltaBeginnings& beginnings,
                         const GatedDeltaRuleAttributes& attributes, const std::string& name);

// Which CUDA kernel an operation of this folder gets, for qkv of this dtype: whole heads row by row
// in ordinary arithmetic, or chunks of rows on tensor cores (cuda/delta_sm90.h).
KernelChoice choose_delta_kernel(const OpView& op, const DeviceTraits& device, DType dtype,
                                 SelectCudaKernel select, ScratchRule scratch);
// Its scratch: of a forward pass, and of gradients of a state in one part or, of gated_delta_state,
// in two.
uint64_t delta_cuda_scratch(const OpView& op);
uint64_t delta_gradient_cuda_scratch(const OpView& op, int parts);

extern const OpSpec kGatedDeltaRule;
extern const OpSpec kGatedDeltaRuleGradient;

}  // namespace troupe
