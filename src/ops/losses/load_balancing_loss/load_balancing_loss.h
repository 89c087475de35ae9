// Load-balancing loss (the auxiliary loss of Switch Transformer, as Megatron Core computes it):
// small when the router's average scores and the tokens that experts receive are spread evenly.
//   L = c * E / (k * T*^2) * sum_e (sum_t q_te) * n_e
// with coefficient c, scores q of the logits z, and counts n of the tokens that chose each expert.
// The scores are normalised over all E experts:
//   softmax:                q_te = exp(z_te) / sum_i exp(z_ti)
//   sigmoid, sqrtsoftplus:  q_te = s(z_te) / (sum_i s(z_ti) + 1e-20),
//                           s(z) = 1 / (1 + e^-z) or sqrt(log(1 + e^z))
// With uniform scores and balanced counts L is exactly c.
//
// Megatron's kinds of the loss, for one rank:
//   aux_loss         one sequence: T* = T, n are the counts of the micro-batch
//   seq_aux_loss     `sequences` = G: T* = T / G consecutive tokens are a sequence with counts of
//                    its own, and L is the mean of the sequences' losses
//   global_aux_loss  `steps` = m + 1: n are the running sums of micro-batches 0 to m of the step
//                    (count_experts adds them up), which the loss divides by m + 1
//
// The scores are those of the clean logits, and the counts should be: whatever the routing did with
// them (pre- or post-softmax, bias, groups, dropping). Counts carry no gradient. When counts are
// summed over several ranks the T*^2 of the formula is that of all these ranks' tokens: with m
// equal ranks the caller passes c / m^2; or, where the ranks have stretches of the same tokens, T*
// and the first of its own. L is then this rank's part of the loss.
//
// With ValidTokens padding is left out, and the counts should have no padding either. With N valid
// tokens in a sequence, of all ranks, and the shares n_e / sum_i n_i of the experts
//   L = c * E * sum_e (sum over valid t of q_te) / N * n_e / sum_i n_i,
// the mean over the sequences, in which one of nothing but padding counts as 0. It is the formula
// above when nothing is padding, and that for the valid tokens alone otherwise. Coefficients need
// no m then. N is the count of ValidTokens, or for several sequences sum_i n_i / k of each.
// (Megatron Core has one mean N for all sequences of a micro-batch, and for global_aux_loss N^2 in
// place of N * sum_i n_i / (k steps): the same where all sequences and micro-batches have as many
// valid tokens.)
#pragma once

#include <string>

#include "ops/losses/router_loss/router_loss.h"
#include "ops/routing/router_topk/router_topk.h"
#include "program/builder.h"
#include "program/op_spec.h"

namespace troupe {

struct LoadBalancingLossAttributes {
  double coefficient = 0;
  int32_t top_k = 1;
  ScoreFunction score_function = ScoreFunction::softmax;
  int32_t sequences = 1;        // G
  int32_t steps = 1;            // micro-batches of which `counts` is the sum
  int32_t sequence_tokens = 0;  // T*; 0: T / G, which G must divide
  int32_t first_token = 0;      // of these T among all G T* tokens
};

// `logits`: [T, E], f32 or f64; `counts`: i32, of the shape that count_experts gives them: [E], and
// [G, E] for G > 1 sequences. Returns the loss, [1] of the logits' dtype.
// With a mask there are not several sequences and several steps.
ValueId load_balancing_loss(Builder& builder, ValueId logits, ValueId counts,
                            const LoadBalancingLossAttributes& attributes, const std::string& name,
                            const ValidTokens& valid = {});

// Inputs: logits, counts; or logits, counts, mask, count. Output: loss [1].
extern const OpSpec kLoadBalancingLoss;

// With f = d_loss * c * E / (k * T*^2) / (G * steps), the counts n of the token's sequence and
// a = sum_i q_ti n_i:
//   softmax:                dz_ti = f * q_ti * (n_i - a)
//   sigmoid, sqrtsoftplus:  dz_ti = f * s'(z_ti) / (sum_e s(z_te) + 1e-20) * (n_i - a),
//                           s' = s (1 - s) or sigmoid(z) / (2 s)
// With ValidTokens f = d_loss * c * E / (G * N * sum_i n_i), and 0 for padding.
// Inputs: those of the loss, d_loss [1]. Output: d_logits [T, E].
extern const OpSpec kLoadBalancingLossGradient;

}  // namespace troupe
