#include "ops/routing/dispatch_plan/dispatch_plan.h"

#include <fmt/format.h>
#include <vector>

#include "ops/choose_kernel.h"
#include "ops/routing/dispatch_plan/dispatch_plan_cpu.h"
#include "program/op_sample.h"

namespace troupe {

void dispatch_plan_cpu(const KernelArguments& args);
CudaKernel dispatch_plan_cuda_kernel(const OpView& op);

namespace {

void infer_dispatch_plan(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 1, "dispatch_plan takes the indices");
  const Value& indices = context.input(0);
  const auto& a = context.attributes<DispatchPlanAttributes>();
  TROUPE_CHECK(indices.dtype == DType::i32 && indices.shape.rank() == 2 && !indices.rows.valid(),
               "dispatch_plan needs i32 indices [T, k]: " + indices.name);
  TROUPE_CHECK(a.parts >= 1 && a.slices >= 1 && a.experts >= 1 && a.experts % a.parts == 0,
               "dispatch_plan: the parts have equally many experts");
  TROUPE_CHECK((a.part_stride == 1 && (a.slice_stride == a.parts || a.slices == 1)) ||
                   (a.slice_stride == 1 && a.part_stride == a.slices),
               "dispatch_plan: the strides number the ranks");
  const int64_t tokens = indices.shape[0];
  context.output("counts", DType::i32, {a.ranks()});
  context.output("slots", DType::i32, {tokens, a.ranks()});
}

Cost cost_dispatch_plan(const OpView& view) {
  return {.flops = 0,
          .bytes = static_cast<double>(view.input(0).bytes() + 2 * view.output(1).bytes())};
}

CpuKernel dispatch_plan_kernel(const OpView&) {
  return &dispatch_plan_cpu;
}

uint64_t dispatch_plan_workspace_bytes(const OpView& view) {
  return static_cast<uint64_t>(plan_chunks(view.input(0).shape[0]) * view.output(0).shape[0]) *
         sizeof(int32_t);
}

std::string print_dispatch_plan(const Attributes& attributes) {
  const auto& a = attributes.as<DispatchPlanAttributes>();
  std::string text = fmt::format("experts={} parts={}", a.experts, a.parts);
  if (a.slices != 1) {
    text += fmt::format(" slices={} strides={},{}", a.slices, a.part_stride, a.slice_stride);
  }
  return text;
}

void sample_dispatch_plan(SampleBuilder& sample, int64_t tokens, int64_t top_k,
                          const DispatchPlanAttributes& attributes,
                          const std::vector<int32_t>& indices) {
  const ValueId chosen = sample.integers("indices", {tokens, top_k}, indices);
  const DispatchPlan plan = dispatch_plan(sample.builder(), chosen, attributes, "plan");
  sample.result_without_gradient(plan.counts);
  sample.result_without_gradient(plan.slots);
}

std::vector<OpSample> samples_dispatch_plan() {
  return {
      {"two experts on each of two ranks",
       [](SampleBuilder& sample) {
         sample_dispatch_plan(sample, 4, 2, {.experts = 4, .parts = 2},
                              {0, 1, 3, 0, 2, -1, -1, -1});
       }},
      {"slices beside each other",
       [](SampleBuilder& sample) {
         sample_dispatch_plan(sample, 3, 1,
                              {.experts = 3, .parts = 3, .slices = 2, .part_stride = 2}, {2, 0, 2});
       }},
      {"parts beside each other, many chunks",
       [](SampleBuilder& sample) {
         const int64_t tokens = 2 * kPlanChunkTokens + 3;
         std::vector<int32_t> indices;
         for (int32_t i = 0; i < 2 * tokens; ++i) indices.push_back(i * i % 7 - 1);
         sample_dispatch_plan(sample, tokens, 2,
                              {.experts = 6, .parts = 3, .slices = 2, .slice_stride = 3}, indices);
       }},
  };
}

}  // namespace

DispatchPlan dispatch_plan(Builder& builder, ValueId indices,
                           const DispatchPlanAttributes& attributes, const std::string& name) {
  const auto outputs = builder.emit(kDispatchPlan, Attributes(attributes), {indices}, name);
  return {.counts = outputs[0], .slots = outputs[1]};
}

const OpSpec kDispatchPlan{
    .name = "dispatch_plan",
    .infer = infer_dispatch_plan,
    .cost = cost_dispatch_plan,
    .cpu = {.kernel = dispatch_plan_kernel, .workspace = dispatch_plan_workspace_bytes},
    .cuda = only_kernel<TROUPE_CUDA(dispatch_plan_cuda_kernel)>,
    .print_attributes = print_dispatch_plan,
    .samples = samples_dispatch_plan};

}  // namespace troupe
