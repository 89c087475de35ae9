#include "ops/precision/cuda/widen_codes.h"
#include "ops/precision/quantized_kernels.h"
#include "ops/precision/quantized_linear/quantized_linear.h"
#include "ops/product_scratch.h"
#include "ops/products/linear/linear_kernels.h"

namespace troupe {
namespace {

// The kernel of one of the products for operands and a result of given dtypes.
using KernelOf = CudaKernel (*)(DType operands, DType out);

// `kBias`: the input that is one; -1: none.
template <KernelOf kKernelOf, int kBias>
void run_widened_linear(const CudaKernelArguments& args) {
  const auto& own = args.attributes->as<QuantizedProductAttributes>();
  const DType wide = widened_dtype(own);
  const Attributes attributes = linear_weight_gradient_attributes(own.accumulate);
  run_widened(args, {.kernel = kKernelOf(wide, args.output(0).dtype),
                     .attributes = &attributes,
                     .wide = wide,
                     .own_scratch = kProductScratchBytes,
                     .bias = kBias});
}

}  // namespace

CudaKernel quantized_linear_cuda_kernel(GroupedVariant) {
  return &run_widened_linear<&linear_cuda_kernel_of, 4>;
}

CudaKernel quantized_linear_data_gradient_cuda_kernel(GroupedVariant) {
  return &run_widened_linear<&linear_data_gradient_cuda_kernel_of, -1>;
}

CudaKernel quantized_linear_weight_gradient_cuda_kernel(GroupedVariant) {
  return &run_widened_linear<&linear_weight_gradient_cuda_kernel_of, -1>;
}

}  // namespace troupe
