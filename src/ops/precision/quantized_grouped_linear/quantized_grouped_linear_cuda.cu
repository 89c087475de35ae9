#include "ops/experts/grouped_linear/grouped_kernels.h"
#include "ops/precision/cuda/widen_codes.h"
#include "ops/precision/quantized_grouped_linear/quantized_grouped_linear.h"
#include "ops/precision/quantized_kernels.h"

namespace troupe {
namespace {

// The kernel of one of the products for operands and a result of given dtypes.
using KernelOf = CudaKernel (*)(DType operands, DType out, GroupedVariant variant);

template <KernelOf kKernelOf, GroupedVariant kVariant>
void run_widened_grouped(const CudaKernelArguments& args) {
  const auto& own = args.attributes->as<QuantizedProductAttributes>();
  const DType wide = widened_dtype(own);
  const Attributes attributes = grouped_weight_gradient_attributes(own.accumulate);
  run_widened(args, {.kernel = kKernelOf(wide, args.output(0).dtype, kVariant),
                     .attributes = &attributes,
                     .wide = wide,
                     .offsets = 4});
}

template <KernelOf kKernelOf>
CudaKernel select_widened_grouped(GroupedVariant variant) {
  switch (variant) {
    case GroupedVariant::sm90:
      return &run_widened_grouped<kKernelOf, GroupedVariant::sm90>;
    case GroupedVariant::sm90_pair:
      return &run_widened_grouped<kKernelOf, GroupedVariant::sm90_pair>;
    case GroupedVariant::plain:
      break;
  }
  return &run_widened_grouped<kKernelOf, GroupedVariant::plain>;
}

}  // namespace

CudaKernel quantized_grouped_linear_cuda_kernel(GroupedVariant variant) {
  return select_widened_grouped<&grouped_linear_cuda_kernel_of>(variant);
}

CudaKernel quantized_grouped_linear_data_gradient_cuda_kernel(GroupedVariant variant) {
  return select_widened_grouped<&grouped_linear_data_gradient_cuda_kernel_of>(variant);
}

CudaKernel quantized_grouped_linear_weight_gradient_cuda_kernel(GroupedVariant variant) {
  return select_widened_grouped<&grouped_linear_weight_gradient_cuda_kernel_of>(variant);
}

}  // namespace troupe
