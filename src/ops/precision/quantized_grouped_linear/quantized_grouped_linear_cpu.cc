#include "ops/cpu/grouped_gemm.h"
#include "ops/precision/quantized_grouped_linear/quantized_grouped_linear.h"
#include "ops/precision/quantized_product.h"
#include "ops/precision/wide_operands.h"

namespace troupe {
namespace {

using Form = QuantizedProductAttributes;

template <class Wide, class Out>
void multiply_wide_rows(const KernelArguments& args, bool transposed) {
  const Shape& x = args.input(0).shape;
  const Shape weight = args.attributes->as<Form>().operands[1].shape(args.input(1).shape);
  const int64_t outputs = args.output(0).shape[1];
  const auto operands =
      widen_operands<Wide>(args, grouped_rows_bytes(weight[0]), kQuantizedOffsets, -1);
  multiply_grouped_rows<Wide, Out>(args, grouped_tiles(x[0], outputs, x[1]), operands.one, x[1],
                                   operands.other, weight, transposed,
                                   args.in<int32_t>(kQuantizedOffsets), args.out<Out>(0), outputs);
}

template <class Wide, class Out>
struct QuantizedGroupedLinearKernel {
  static void run(const KernelArguments& args) { multiply_wide_rows<Wide, Out>(args, true); }
};

template <class Wide, class Out>
struct QuantizedGroupedLinearDataGradientKernel {
  static void run(const KernelArguments& args) { multiply_wide_rows<Wide, Out>(args, false); }
};

template <class Wide, class Out>
struct QuantizedGroupedLinearWeightGradientKernel {
  static void run(const KernelArguments& args) {
    const auto operands = widen_operands<Wide>(args, 0, kQuantizedOffsets, -1);
    const Form& form = args.attributes->as<Form>();
    multiply_groups<Wide, Out>(args, operands.one, form.operands[0].shape(args.input(0).shape),
                               operands.other, form.operands[1].shape(args.input(1).shape),
                               args.in<int32_t>(kQuantizedOffsets), args.output(0).shape[0],
                               form.accumulate, args.out<Out>(0));
  }
};

}  // namespace

uint64_t scratch_quantized_grouped_linear(const OpView& op) {
  const Shape& x = op.input(0).shape;
  return gemm_scratch_bytes(grouped_tiles(x[0], op.output(0).shape[1], x[1]),
                            quantized_sum_dtype(op), quantized_sum_dtype(op), op.output(0).dtype);
}

uint64_t scratch_quantized_grouped_linear_weight_gradient(const OpView& op) {
  return gemm_scratch_bytes(
      grouped_weight_gradient_tiles(quantized_shape(op, 0), quantized_shape(op, 1),
                                    op.output(0).shape[0]),
      quantized_sum_dtype(op), quantized_sum_dtype(op), op.output(0).dtype);
}

uint64_t workspace_quantized_grouped_linear(const OpView& op) {
  return wide_operands_bytes(op, grouped_rows_bytes(quantized_shape(op, 1)[0]));
}

uint64_t workspace_quantized_grouped_linear_weight_gradient(const OpView& op) {
  return wide_operands_bytes(op, 0);
}

CpuKernel quantized_grouped_linear_cpu_kernel(const OpView& op) {
  return select_wide_kernel<QuantizedGroupedLinearKernel>(op);
}

CpuKernel quantized_grouped_linear_data_gradient_cpu_kernel(const OpView& op) {
  return select_wide_kernel<QuantizedGroupedLinearDataGradientKernel>(op);
}

CpuKernel quantized_grouped_linear_weight_gradient_cpu_kernel(const OpView& op) {
  return select_wide_kernel<QuantizedGroupedLinearWeightGradientKernel>(op);
}

}  // namespace troupe
