#include "ops/routing/expert_bias_update/expert_bias_update.h"

#include <fmt/format.h>

#include "ops/choose_kernel.h"

namespace troupe {

void expert_bias_update_cpu(const KernelArguments& args);
CudaKernel expert_bias_update_cuda_kernel(const OpView& op);

namespace {

void infer_expert_bias_update(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 3, "expert_bias_update takes bias, counts, skip");
  const Value& bias = context.input(0);
  const Value& counts = context.input(1);
  const Value& skip = context.input(2);
  TROUPE_CHECK(
      bias.dtype == DType::f32 && bias.shape.rank() == 1 && bias.role == Role::router_state,
      "expert_bias_update needs an f32 bias [E] of the router's state: " + bias.name);
  TROUPE_CHECK(counts.dtype == DType::f64 && counts.shape == bias.shape,
               "expert_bias_update needs f64 counts [E]: " + counts.name);
  TROUPE_CHECK(skip.dtype == DType::i32 && skip.shape == Shape({1}),
               "expert_bias_update: skip is i32 [1]: " + skip.name);
  context.mutates(0);
}

// Compares and adds; the bias is read and written.
Cost cost_expert_bias_update(const OpView& view) {
  return {.flops = 4 * static_cast<double>(view.input(0).shape.elements()),
          .bytes = static_cast<double>(2 * view.input(0).bytes() + view.input(1).bytes())};
}

CpuKernel expert_bias_update_kernel(const OpView&) {
  return &expert_bias_update_cpu;
}

std::string print_expert_bias_update(const Attributes& attributes) {
  return fmt::format("rate={}", attributes.as<ExpertBiasUpdateAttributes>().rate);
}

}  // namespace

void expert_bias_update(Builder& builder, ValueId bias, ValueId counts, ValueId skip,
                        const ExpertBiasUpdateAttributes& attributes) {
  const std::string name = builder.value(bias).name;
  builder.emit(kExpertBiasUpdate, Attributes(attributes), {bias, counts, skip}, name);
}

const OpSpec kExpertBiasUpdate{.name = "expert_bias_update",
                               .infer = infer_expert_bias_update,
                               .cost = cost_expert_bias_update,
                               .cpu = {.kernel = expert_bias_update_kernel},
                               .cuda = only_kernel<TROUPE_CUDA(expert_bias_update_cuda_kernel)>,
                               .print_attributes = print_expert_bias_update};

}  // namespace troupe
