// What the kernels of quantize_activation, of CPUs and GPUs, have in common: a run as two steps,
// the activation, or its gradient, into memory of the run, and its quantisation from there.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "ops/elementwise/activation/activation.h"
#include "ops/precision/quantize/quantize.h"

namespace troupe {

struct QuantizeActivationAttributes {
  QuantizeAttributes codes = {};
  ActivationAttributes activation = {};
};

// For kernels: of a part of their memory, after which another one begins.
inline uint64_t aligned_bytes(const Shape& shape, DType dtype) {
  constexpr uint64_t kAlignment = 256;
  const uint64_t bytes = static_cast<uint64_t>(shape.elements()) * size_of(dtype);
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

// Of the parts that tiles of 128 columns have in the gradients of rows' weights.
inline Shape tile_sums_shape(const Shape& activated) {
  return {activated[0], (activated[1] + kTransposedRows - 1) / kTransposedRows};
}

// `Arguments`: KernelArguments or CudaKernelArguments, which are borrowed with all they point to.
template <class Arguments>
struct ActivationSteps {
  using Tensor = std::remove_const_t<typename decltype(Arguments::inputs)::element_type>;

  // `memory`: args.workspace or args.scratch.
  ActivationSteps(const Arguments& args, std::byte* Arguments::*memory, bool is_gradient)
      : activation(args.attributes->template as<QuantizeActivationAttributes>().activation),
        codes(args.attributes->template as<QuantizeActivationAttributes>().codes),
        made(args.input(0)),
        first(args),
        second(args) {
    const auto& attributes = args.attributes->template as<QuantizeActivationAttributes>();
    if (is_gradient) {
      read = {args.input(0), args.input(3), args.input(4), args.input(5)};
    } else {
      made.shape = {made.shape[0], made.shape[1] / (attributes.activation.gated ? 2 : 1)};
      read = {args.input(0), args.input(3), args.input(4)};
    }
    made.data = args.*memory;
    results = {made, args.outputs.back()};
    quantized = {made, args.input(1), args.input(2)};
    first.attributes = &activation;
    first.inputs = read;
    first.outputs = results;
    second.attributes = &codes;
    second.inputs = quantized;
    second.*memory = args.*memory + aligned_bytes(made.shape, made.dtype);
  }
  ActivationSteps(const ActivationSteps&) = delete;
  ActivationSteps& operator=(const ActivationSteps&) = delete;

  Attributes activation;
  Attributes codes;
  Tensor made;
  std::array<Tensor, 4> read;
  std::array<Tensor, 2> results;  // the last output is that of weights, where there are any
  std::array<Tensor, 3> quantized;
  Arguments first;
  Arguments second;
};

}  // namespace troupe
