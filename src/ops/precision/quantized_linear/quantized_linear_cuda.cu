#include "ops/precision/cuda/widen_codes.h"
#include "ops/precision/quantized_kernels.h"
#include "ops/precision/quantized_linear/quantized_linear.h"
#include "ops/product_scratch.h"
#include "ops/products/linear/linear_kernels.h"

namespace troupe {
namespace {

void run_widened_linear(const CudaKernelArguments& args) {
  const DType wide = widened_dtype(args.attributes->as<QuantizedProductAttributes>());
  const Attributes attributes(NoAttributes{});
  run_widened(args, {.kernel = linear_cuda_kernel_of(wide, args.output(0).dtype),
                     .attributes = &attributes,
                     .wide = wide,
                     .own_scratch = kProductScratchBytes,
                     .bias = 4});
}

void run_widened_data_gradient(const CudaKernelArguments& args) {
  const DType wide = widened_dtype(args.attributes->as<QuantizedProductAttributes>());
  const Attributes attributes(NoAttributes{});
  run_widened(args, {.kernel = linear_data_gradient_cuda_kernel_of(wide, args.output(0).dtype),
                     .attributes = &attributes,
                     .wide = wide,
                     .own_scratch = kProductScratchBytes});
}

void run_widened_weight_gradient(const CudaKernelArguments& args) {
  const auto& own = args.attributes->as<QuantizedProductAttributes>();
  const DType wide = widened_dtype(own);
  const Attributes attributes = linear_weight_gradient_attributes(own.accumulate);
  run_widened(args, {.kernel = linear_weight_gradient_cuda_kernel_of(wide, args.output(0).dtype),
                     .attributes = &attributes,
                     .wide = wide,
                     .own_scratch = kProductScratchBytes});
}

}  // namespace

CudaKernel quantized_linear_cuda_kernel(const OpView&, GroupedVariant) {
  return &run_widened_linear;
}

CudaKernel quantized_linear_data_gradient_cuda_kernel(const OpView&, GroupedVariant) {
  return &run_widened_data_gradient;
}

CudaKernel quantized_linear_weight_gradient_cuda_kernel(const OpView&, GroupedVariant) {
  return &run_widened_weight_gradient;
}

}  // namespace troupe
