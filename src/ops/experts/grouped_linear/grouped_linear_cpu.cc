#include "ops/experts/grouped_linear/grouped_linear_cpu.h"

#include "ops/cpu/grouped_gemm.h"
#include "ops/experts/grouped_linear/grouped_linear.h"

namespace troupe {
namespace {

template <class T>
void multiply_rows(const KernelArguments& args, bool transposed) {
  const Shape& x = args.input(0).shape;
  const int64_t outputs = args.output(0).shape[1];
  const auto multiply = [&](int weight, const int32_t* offsets) {
    multiply_grouped_rows<T, T>(args, grouped_tiles(x[0], outputs, x[1]), args.in<T>(0), x[1],
                                args.in<T>(weight), args.input(weight).shape, transposed, offsets,
                                args.out<T>(0), outputs);
  };
  const auto* offsets = args.in<int32_t>(2);
  multiply(1, offsets);
  if (args.inputs.size() > 3) multiply(3, offsets + args.input(1).shape[0]);
}

template <class T>
struct GroupedLinearKernel {
  static void run(const KernelArguments& args) { multiply_rows<T>(args, true); }
};

template <class T>
struct GroupedLinearDataGradientKernel {
  static void run(const KernelArguments& args) { multiply_rows<T>(args, false); }
};

// Out is the type of the gradient.
template <class T, class Out>
void run_grouped_linear_weight_gradient(const KernelArguments& args) {
  const auto& attributes = args.attributes->as<GroupedLinearWeightGradientAttributes>();
  multiply_groups<T, Out>(args, args.in<T>(0), args.input(0).shape, args.in<T>(1),
                          args.input(1).shape, args.in<int32_t>(2) + attributes.first,
                          args.output(0).shape[0], attributes.accumulate, args.out<Out>(0));
}

template <class T>
struct GroupedLinearWeightGradientKernel {
  static void run(const KernelArguments& args) {
    run_grouped_linear_weight_gradient<T, accumulation_t<T>>(args);
  }
};

}  // namespace

CpuKernel grouped_linear_cpu_kernel(const OpView& op) {
  return select_float_kernel<GroupedLinearKernel>(op.input(0).dtype);
}

CpuKernel grouped_linear_data_gradient_cpu_kernel(const OpView& op) {
  return select_float_kernel<GroupedLinearDataGradientKernel>(op.input(0).dtype);
}

CpuKernel grouped_linear_weight_gradient_cpu_kernel(const OpView& op) {
  if (op.output(0).dtype == DType::bf16) return &run_grouped_linear_weight_gradient<bf16, bf16>;
  return select_float_kernel<GroupedLinearWeightGradientKernel>(op.input(0).dtype);
}

}  // namespace troupe
