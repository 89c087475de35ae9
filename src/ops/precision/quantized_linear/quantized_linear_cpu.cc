#include <array>

#include "ops/cpu/gemm.h"
#include "ops/precision/quantized_linear/quantized_linear.h"
#include "ops/precision/quantized_product.h"
#include "ops/precision/wide_operands.h"

namespace troupe {
namespace {

using Form = QuantizedProductAttributes;

GemmTiles forward_tiles(const Shape& x, const Shape& weight) {
  return gemm_tiles(x[0], weight[0], x[1]);
}

GemmTiles data_gradient_tiles(const Shape& dy, const Shape& weight) {
  return gemm_tiles(dy[0], weight[1], dy[1]);
}

GemmTiles weight_gradient_tiles(const Shape& dy, const Shape& x) {
  return gemm_tiles(dy[1], x[1], dy[0], 1, true);
}

uint64_t scratch_of(const OpView& op, const GemmTiles& tiles) {
  return gemm_scratch_bytes(tiles, quantized_sum_dtype(op), quantized_sum_dtype(op),
                            op.output(0).dtype);
}

uint64_t sums_bytes(const Shape& dy, const Shape& x, DType wide) {
  return gemm_workspace_bytes(weight_gradient_tiles(dy, x), dy[1], x[1], wide);
}

std::array<Shape, 2> shapes_of(const KernelArguments& args) {
  const auto& operands = args.attributes->as<Form>().operands;
  return {operands[0].shape(args.input(0).shape), operands[1].shape(args.input(1).shape)};
}

template <class Wide, class Out>
struct QuantizedLinearKernel {
  static void run(const KernelArguments& args) {
    const auto [x, weight] = shapes_of(args);
    const auto operands = widen_operands<Wide>(args, 0, -1, 4);
    parallel_gemm<Wide, Wide, Out>(args, forward_tiles(x, weight), {operands.one, x[1], false},
                                   {operands.other, x[1], true}, x[0], weight[0], x[1],
                                   args.out<Out>(0), weight[0], false, operands.bias);
  }
};

template <class Wide, class Out>
struct QuantizedLinearDataGradientKernel {
  static void run(const KernelArguments& args) {
    const auto [dy, weight] = shapes_of(args);
    const auto operands = widen_operands<Wide>(args, 0, -1, -1);
    parallel_gemm<Wide, Wide, Out>(args, data_gradient_tiles(dy, weight),
                                   {operands.one, dy[1], false}, {operands.other, weight[1], false},
                                   dy[0], weight[1], dy[1], args.out<Out>(0), weight[1], false,
                                   nullptr);
  }
};

template <class Wide, class Out>
struct QuantizedLinearWeightGradientKernel {
  static void run(const KernelArguments& args) {
    const auto [dy, x] = shapes_of(args);
    const auto operands = widen_operands<Wide>(args, sums_bytes(dy, x, dtype_of<Wide>), -1, -1);
    parallel_gemm<Wide, Wide, Out>(args, weight_gradient_tiles(dy, x), {operands.one, dy[1], true},
                                   {operands.other, x[1], false}, dy[1], x[1], dy[0],
                                   args.out<Out>(0), x[1], args.attributes->as<Form>().accumulate,
                                   nullptr);
  }
};

}  // namespace

uint64_t scratch_quantized_linear(const OpView& op) {
  return scratch_of(op, forward_tiles(quantized_shape(op, 0), quantized_shape(op, 1)));
}

uint64_t scratch_quantized_linear_data_gradient(const OpView& op) {
  return scratch_of(op, data_gradient_tiles(quantized_shape(op, 0), quantized_shape(op, 1)));
}

uint64_t scratch_quantized_linear_weight_gradient(const OpView& op) {
  return scratch_of(op, weight_gradient_tiles(quantized_shape(op, 0), quantized_shape(op, 1)));
}

uint64_t workspace_quantized_linear(const OpView& op) {
  return wide_operands_bytes(op, 0);
}

uint64_t workspace_quantized_linear_weight_gradient(const OpView& op) {
  return wide_operands_bytes(
      op, sums_bytes(quantized_shape(op, 0), quantized_shape(op, 1), quantized_sum_dtype(op)));
}

CpuKernel quantized_linear_cpu_kernel(const OpView& op) {
  return select_wide_kernel<QuantizedLinearKernel>(op);
}

CpuKernel quantized_linear_data_gradient_cpu_kernel(const OpView& op) {
  return select_wide_kernel<QuantizedLinearDataGradientKernel>(op);
}

CpuKernel quantized_linear_weight_gradient_cpu_kernel(const OpView& op) {
  return select_wide_kernel<QuantizedLinearWeightGradientKernel>(op);
}

}  // namespace troupe
