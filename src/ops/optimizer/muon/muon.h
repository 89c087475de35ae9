// The elementwise parts of the optimizer Muon (Jordan and others, 2024; the form of Megatron Core
// and Emerging-Optimizers), between which newton_schulz stands:
//   muon_momentum   g = coefficient * gradient
//                   m = m + (1 - beta) (g - m)                  in place
//                   u = m, or with `nesterov` g + beta (m - g)
//   muon_update     p = p (1 - learning_rate * weight_decay)    only with `decay`
//                   p = p - learning_rate * scale * y           in place
// Scalars are computed in double and rounded once to A, the accumulation dtype of the parameter
// (f64 for f64, else f32), in which all elementwise arithmetic is done. When skip is not 0 no state
// changes, and u is the momentum as it is. The learning rate, weight decay, coefficient and skip
// flag are values on the device (see adamw). There are no derivatives.
#pragma once

#include <cstdint>
#include <string>

#include "program/builder.h"
#include "program/op_spec.h"

namespace troupe {

// How an orthogonal update is scaled, by the sizes of the whole matrix [rows, columns], which maps
// `columns` inputs to `rows` outputs: sqrt(max(rows, columns)), sqrt(rows / columns), or
// sqrt(max(1, rows / columns)).
enum class MuonScale : uint8_t { spectral, unit_rms_norm, shape_scaling };

// Times `extra_factor`.
double muon_scale(MuonScale mode, int64_t rows, int64_t columns, double extra_factor = 1);

struct MuonMomentumAttributes {
  double beta = 0.9;
  bool nesterov = false;
  int64_t first = 0;  // the element of the gradient with which the momentum begins
};

struct MuonMomentumOperands {
  ValueId gradient;     // A or bf16; only read
  ValueId momentum;     // A; state, changed in place: m. As the gradient, or a shard of it
  ValueId coefficient;  // f64 [1]: see gradient_norm
  ValueId skip;         // i32 [1]
};

// Returns u: with `nesterov` a tensor like the momentum, named `name`; else the momentum itself.
ValueId muon_momentum(Builder& builder, const MuonMomentumOperands& operands,
                      const MuonMomentumAttributes& attributes, const std::string& name);

// Inputs: gradient, momentum, coefficient, skip. Outputs: momentum, in place, and with `nesterov`
// u.
extern const OpSpec kMuonMomentum;

struct MuonUpdateAttributes {
  double scale = 1;
  bool decay = true;
  int64_t first = 0;  // the element of the parameter with which the master begins
};

struct MuonUpdateOperands {
  ValueId update;  // A: y, as large as the parameter; only read
  // f64, f32 or bf16; state, changed in place. Invalid: it is bf16, with no rounded copy of the
  // master.
  ValueId parameter;
  // f32; state, changed in place. Exactly when the parameter is bf16: the parameter itself, of
  // which `parameter` becomes the rounded copy, or a shard of it: then with n elements in it, only
  // elements [first, first + n) of the parameter are updated.
  ValueId master;
  ValueId learning_rate;  // f64 [1]
  ValueId weight_decay;   // f64 [1]
  ValueId skip;           // i32 [1]
};

void muon_update(Builder& builder, const MuonUpdateOperands& operands,
                 const MuonUpdateAttributes& attributes, const std::string& name);

// Inputs: update, parameter, master (optional), learning_rate, weight_decay, skip. Outputs, in
// place: parameter and, when present, master.
extern const OpSpec kMuonUpdate;

}  // namespace troupe
