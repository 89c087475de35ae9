#include "ops/precision/quantize_activation/quantize_activation.h"

namespace troupe {
namespace {

template <bool kIsGradient>
void quantize_activation(const KernelArguments& args) {
  const DType dtype = args.input(0).dtype;
  const ActivationSteps<KernelArguments> steps(args, &KernelArguments::workspace, kIsGradient);
  (kIsGradient ? activation_gradient_cpu_kernel_of : activation_cpu_kernel_of)(dtype)(steps.first);
  quantize_cpu_kernel_of(dtype)(steps.second);
}

}  // namespace

CpuKernel quantize_activation_cpu_kernel(const OpView& op) {
  return op.op.spec == &kQuantizeActivationGradient ? &quantize_activation<true>
                                                    : &quantize_activation<false>;
}

}  // namespace troupe
