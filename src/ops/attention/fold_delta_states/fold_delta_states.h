// The states of gated delta rules before the chunks of sequences that a rank has, from what every
// chunk makes of any state (ops/attention/gated_delta_rule/gated_delta_state.h).
//
// n ranks have two chunks of each sequence each (program/row_origin.h). With Q_g and P_g of chunk
// g, for each sequence and value head, in order of positions:
//
//   S_0 = 0        S_{g+1} = P_g S_g + Q_g
//
// A rank gets S_g of its own two chunks. Backwards from the later of them, with dS_g all that
// reaches S_g:
//
//   dQ_g = dS_{g+1}        dP_g = dS_{g+1} S_g^T        dS_g = d_states_g + P_g^T dS_{g+1}
//
// and zeros for the chunks after it, so the sum over ranks is the whole gradient.
//
// Kinds (of an accumulation dtype; B sequences)
//   fold_delta_states (ends [n 2 B, H_v, d_k, d_v + d_k])  -> states [2 B, H_v, d_k, d_v]
//       `ends`: Q beside P; of rank 0, 1, ..., each its first and its second chunk of each sequence
//   fold_delta_states_gradient (d_states, ends)            -> d_ends
#pragma once

#include <string>

#include "program/builder.h"
#include "program/op_spec.h"
#include "program/row_origin.h"

namespace troupe {

struct FoldDeltaStatesAttributes {
  SequenceChunks chunks = {};
};

ValueId fold_delta_states(Builder& builder, ValueId ends,
                          const FoldDeltaStatesAttributes& attributes, const std::string& name);

extern const OpSpec kFoldDeltaStates;
extern const OpSpec kFoldDeltaStatesGradient;

}  // namespace troupe
