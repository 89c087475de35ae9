// Sinkhorn selection: chooses k experts for each token so that, over all T tokens, experts are
// asked for about equally often (semantics of Megatron Core's load balancing type "sinkhorn", in
// training; evaluation is a plain top-k). With the logits z and C_te = exp(z_te), factors d0 [T]
// and d1 [E] are computed from d1 = 1 by
//   d0_t = 1 / (T (sum_e C_te d1_e + 1e-8)),   d1_e = 1 / (E (sum_t C_te d0_t + 1e-8))
// until the mean of |change of d1| is at most 1e-4, and token t selects its k largest
// d0_t C_te d1_e (Sinkhorn and Knopp, "Concerning nonnegative matrices and doubly stochastic
// matrices", 1967). Equal ones: the lower expert first; slots are in descending order.
//
// The rounds end after kSinkhornRounds at the latest, so that no logits keep the kernel running:
// - Random logits of deviation 8 take some tens of rounds, with 8 tokens as with 2048.
// - Let R be the largest difference of two logits of one token. Each round lowers a potential that
//   starts below R + log E by the Kullback-Leibler divergence between equal shares and the experts'
//   shares of that round (Altschuler, Weed and Rigollet, "Near-linear time approximation algorithms
//   for optimal transport via Sinkhorn iteration", 2017, lemma 2; up to the epsilons). So with
//   R = 20, E = 64 and 1000 rounds some round was within a divergence of 0.024, which is a total
//   variation of 0.11 (Pinsker), of perfect balance.
// - What runs into the bound is an expert that hardly any token prefers: its d1 grows
//   towards 1e8 / E, and the threshold, which is absolute, sees steps of that size.
//
// Everything is computed in f64, whatever the logits are. Logits that are NaN or -infinity stand
// for C = 0. A token whose largest logit is not finite takes no part in the balance, and is
// selected for like any other. Indices are always k distinct experts. There is no derivative.
#pragma once

#include <cstdint>
#include <string>

#include "program/builder.h"
#include "program/op_spec.h"

namespace troupe {

inline constexpr int kSinkhornRounds = 1000;

struct SinkhornTopkAttributes {
  int32_t top_k = 0;  // 1 <= k <= E
};

// `logits`: [T, E], f32 or f64. Returns the indices, i32 [T, k], each in [0, E).
ValueId sinkhorn_topk(Builder& builder, ValueId logits, const SinkhornTopkAttributes& attributes,
                      const std::string& name);

// Inputs: logits. Output: indices.
extern const OpSpec kSinkhornTopk;

}  // namespace troupe
