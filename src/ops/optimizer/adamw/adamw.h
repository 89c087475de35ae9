// AdamW: updates one parameter and its moments in place (Loshchilov and Hutter, decoupled weight
// decay; the same order of operations as torch.optim.AdamW, with which it agrees to rounding):
//   g = coefficient * gradient
//   p = p * (1 - learning_rate * weight_decay)           only with `decay`
//   m = m + (1 - beta1) * (g - m)
//   v = beta2 * v + (1 - beta2) * g^2
//   p = p - learning_rate * (m / (1 - beta1^step)) / (sqrt(v / (1 - beta2^step)) + epsilon)
// Scalars are computed in double and rounded once to the accumulation dtype, in which all
// elementwise arithmetic is done. Moments kept in bf16 are rounded to nearest when they are stored,
// those kept in f8e4m3 as moment_blocks.h says; the update uses them as they were before. When skip
// is not 0 nothing changes. The gradient is only read.
//
// The learning rate, weight decay, step, clip coefficient and skip flag are values on the device,
// so the same program serves every step. There is no derivative.
#pragma once

#include <string>

#include "program/builder.h"
#include "program/op_spec.h"

namespace troupe {

struct AdamWAttributes {
  double beta1 = 0.9;
  double beta2 = 0.999;
  double epsilon = 1e-8;
  bool decay = true;
  int64_t first = 0;  // the element of the parameter with which the moments begin
};

// Parameter and gradient have the same shape. So have moments and master; with n elements in them,
// only elements [first, first + n) of the parameter are updated. With A the accumulation dtype of
// the parameter (f64 for f64, else f32):
struct AdamWTensors {
  ValueId parameter;   // f64, f32 or bf16; state, changed in place. Invalid: it is bf16, and there
                       // is no rounded copy of the master
  ValueId gradient;    // A, or the dtype of the parameter
  ValueId exp_avg;     // A, or bf16 or f8e4m3 where A is f32; state, changed in place: m
  ValueId exp_avg_sq;  // as exp_avg: v
  ValueId master;      // f32; state, changed in place. Exactly when the parameter is bf16: the
                       // parameter itself, of which `parameter` becomes the rounded copy
  // u8, moment_scales_shape of the moment; state, changed in place. Exactly with f8e4m3.
  ValueId exp_avg_scale = {};
  ValueId exp_avg_sq_scale = {};
};

struct AdamWScalars {
  ValueId learning_rate;  // f64 [1]
  ValueId weight_decay;   // f64 [1]
  ValueId step;           // i64 [1]: number of this update, from 1
  ValueId coefficient;    // f64 [1]: see gradient_norm
  ValueId skip;           // i32 [1]
};

void adamw(Builder& builder, const AdamWTensors& tensors, const AdamWScalars& scalars,
           const AdamWAttributes& attributes, const std::string& name);

// Inputs: parameter (optional), gradient, exp_avg, exp_avg_sq, master (optional), learning_rate,
// weight_decay, step, coefficient, skip, and with moments in f8e4m3 exp_avg_scale and
// exp_avg_sq_scale (each optional). Outputs, in place: parameter, exp_avg, exp_avg_sq, master and
// scales, as far as they are there.
extern const OpSpec kAdamW;

}  // namespace troupe
