// Activations of feed-forward blocks, gated or plain, optionally times the router's weight of the
// row:
//
//   gated:  y[r, i] = phi(min(g[r, i], c)) (clamp(u[r, i], -c, c) + o) p[r]
//   plain:  y[r, i] = phi(x[r, i]) p[r]
//
// where a row of a gated input holds the gate g (f elements) and then the linear half u (f
// elements). c is `clamp` (no bound when it is 0) and o is `linear_offset`. p[r] =
// weights[row_slot[r]] in flat order (slot t * k + s is token t's s-th choice), or 1 without
// weights. It is applied before the only rounding. A row whose row_slot is -1, or anything else
// outside the weights, is a filler: its input is not read, its result is zero, and so is every
// gradient of it.
//
// phi, with sigma(x) = 1 / (1 + e^-x) and Phi and N the distribution function and the density of
// the standard normal distribution:
//   silu          x sigma(x); gated: SwiGLU (Shazeer, "GLU variants improve transformer", 2020)
//   gelu          x Phi(x) = x (1 + erf(x / sqrt 2)) / 2 (Hendrycks and Gimpel, 2016)
//   gelu_tanh     x (1 + tanh z) / 2 = x sigma(2 z), z = sqrt(2 / pi) (x + 0.044715 x^3)
//   quick_gelu    x sigma(1.702 x); gated with clamp 7 and offset 1: GPT-OSS
//   relu          max(x, 0)
//   squared_relu  max(x, 0)^2 (So et al., "Primer", 2021)
//
// Derivatives, with a = phi(min(g, c)) (clamp(u, -c, c) + o) in the accumulation type:
//   dg = dy p (clamp(u, -c, c) + o) phi'(g) where g <= c, else 0
//   du = dy p phi(min(g, c)) where -c <= u <= c, else 0
//   d_weights[row_slot[r]] = sum over i of a[r, i] dy[r, i]; slots without a row get 0.
// The derivative of relu at 0 is 0.
//
// With `stores_input` what the gradient reads of x are its coded rows (ops/exchange/coded_rows): 33
// bytes for 32 elements wait for the backward pass. y is that of x itself; the gradient is that at
// the decoded x. Each half of a row is then a multiple of 32 elements.
//
// Kinds (R rows, ragged when x is)
//   activation (x [R, 2 f] gated or [R, f] plain, weights [T, k] in the accumulation dtype
//   optional,
//               row_slot i32 [R] with weights)                 -> y [R, f], and with `stores_input`
//               stored u8 [R, coded_row_bytes(columns of x)]; of fillers nothing is stored
//   activation_gradient (x, dy [R, f], weights, row_slot)      -> d_x like x, which may be stored
//               over x, and with weights d_weights [T, k] in the accumulation dtype
//   activation_gradient (none, dy, weights, row_slot, stored)  -> the same
// Each live row that is no filler has a slot of its own. Weights may be ragged; then no row has a
// slot beyond their live rows. d_weights is not ragged.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "program/builder.h"
#include "program/op_spec.h"

namespace troupe {

enum class ActivationFunction : uint8_t { silu, gelu, gelu_tanh, quick_gelu, relu, squared_relu };
std::string_view name_of(ActivationFunction function);

// Clamp (>= 0) and offset belong to gated activations; plain ones have neither.
struct ActivationAttributes {
  ActivationFunction function = ActivationFunction::silu;
  bool gated = true;
  bool stores_input = false;
  double clamp = 0;  // 0: none
  double linear_offset = 0;
};

// Emits the activation of `x`; `weights` and `row_slot` are both valid or both absent.
ValueId activation(Builder& builder, ValueId x, ValueId weights, ValueId row_slot,
                   const ActivationAttributes& attributes, const std::string& name);

// For kinds that go on with what they make so (ops/precision/quantize_activation). Checks the
// attributes, `x` and the optional weights and slots, inputs `weights_input` and after it; returns
// the shape of y.
Shape activated_shape(const InferContext& context, const ActivationAttributes& attributes,
                      const Value& x, int weights_input);
// Flops for `elements` of y.
double activation_flops(const ActivationAttributes& attributes, double elements, bool weighted);
double activation_gradient_flops(const ActivationAttributes& attributes, double elements,
                                 bool weighted);
// Of the weights of rows and their slots, as far as they are read.
double activation_weights_bytes(const Value& weights, const Value& row_slot);
std::string print_activation(const ActivationAttributes& attributes);
// The kernels for x of that dtype; those of GPUs are there in builds with CUDA.
CpuKernel activation_cpu_kernel_of(DType dtype);
CpuKernel activation_gradient_cpu_kernel_of(DType dtype);
CudaKernel activation_cuda_kernel_of(DType dtype);
CudaKernel activation_gradient_cuda_kernel_of(DType dtype);

extern const OpSpec kActivation;
extern const OpSpec kActivationGradient;

}  // namespace troupe
