#include "ops/routing/local_experts/local_experts.h"

#include <fmt/format.h>
#include <vector>

#include "ops/choose_kernel.h"
#include "program/op_sample.h"

namespace troupe {

void local_experts_cpu(const KernelArguments& args);
CudaKernel local_experts_cuda_kernel(const OpView& op);

namespace {

void infer_local_experts(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 2, "local_experts takes indices, received");
  const Value& indices = context.input(0);
  const auto& attributes = context.attributes<LocalExpertsAttributes>();
  TROUPE_CHECK(attributes.first >= 0 && attributes.count >= 1, "local_experts: which experts");
  TROUPE_CHECK(indices.dtype == DType::i32 && indices.shape.rank() == 2,
               "local_experts needs i32 indices [T, k]: " + indices.name);
  if (context.has_input(1)) {
    const Value& received = context.input(1);
    TROUPE_CHECK(received.dtype == DType::i32 && received.shape.rank() == 1 &&
                     indices.shape[0] % received.shape[0] == 0 && !indices.rows.valid(),
                 "local_experts: received counts the rows of equal blocks: " + received.name);
  }
  const Shape shape = indices.shape;
  context.output("", DType::i32, shape);
}

Cost cost_local_experts(const OpView& view) {
  return {.flops = 0, .bytes = static_cast<double>(2 * view.input(0).bytes())};
}

CpuKernel local_experts_kernel(const OpView&) {
  return &local_experts_cpu;
}

std::string print_local_experts(const Attributes& attributes) {
  const auto& a = attributes.as<LocalExpertsAttributes>();
  return fmt::format("first={} count={}", a.first, a.count);
}

std::vector<OpSample> samples_local_experts() {
  return {
      {"every row, dropped slots",
       [](SampleBuilder& sample) {
         const ValueId indices = sample.integers("indices", {4, 2}, {3, 0, -1, 5, 2, 1, 4, -1});
         sample.result_without_gradient(
             local_experts(sample.builder(), indices, {}, {.first = 2, .count = 2}, "local"));
       }},
      {"rows received in blocks",
       [](SampleBuilder& sample) {
         const ValueId indices =
             sample.integers("indices", {6, 2}, {3, 0, 2, 5, 9, 9, 4, -1, 3, 3, 2, 3});
         const ValueId received = sample.integers("received", {3}, {2, 0, 1});
         sample.result_without_gradient(
             local_experts(sample.builder(), indices, received, {.first = 2, .count = 3}, "local"));
       }},
      {"many chunks",
       [](SampleBuilder& sample) {
         std::vector<int32_t> chosen;
         for (int32_t i = 0; i < 30000; ++i) chosen.push_back(i * 31 % 9 - 1);
         const ValueId indices = sample.integers("indices", {10000, 3}, chosen);
         sample.result_without_gradient(
             local_experts(sample.builder(), indices, {}, {.first = 0, .count = 4}, "local"));
       }},
  };
}

}  // namespace

ValueId local_experts(Builder& builder, ValueId indices, ValueId received,
                      const LocalExpertsAttributes& attributes, const std::string& name) {
  return builder.emit(kLocalExperts, Attributes(attributes), {indices, received}, name)[0];
}

const OpSpec kLocalExperts{.name = "local_experts",
                           .infer = infer_local_experts,
                           .cost = cost_local_experts,
                           .cpu = {.kernel = local_experts_kernel},
                           .cuda = only_kernel<TROUPE_CUDA(local_experts_cuda_kernel)>,
                           .print_attributes = print_local_experts,
                           .samples = samples_local_experts};

}  // namespace troupe
