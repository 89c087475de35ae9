#include "ops/routing/sinkhorn/sinkhorn.h"

#include <fmt/format.h>
#include <vector>

#include "ops/choose_kernel.h"
#include "ops/routing/sinkhorn/sinkhorn_cpu.h"
#include "ops/routing/sinkhorn/sinkhorn_cuda.h"
#include "program/op_sample.h"

namespace troupe {

CpuKernel sinkhorn_topk_cpu_kernel(DType dtype);
CudaKernel sinkhorn_topk_cuda_kernel(const OpView& op);

namespace {

void infer_sinkhorn_topk(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 1, "sinkhorn_topk takes the logits");
  const Value& logits = context.input(0);
  TROUPE_CHECK((logits.dtype == DType::f32 || logits.dtype == DType::f64) &&
                   logits.shape.rank() == 2 && !logits.rows.valid(),
               "sinkhorn_topk needs f32 or f64 logits [T, E]: " + logits.name);
  const int32_t top_k = context.attributes<SinkhornTopkAttributes>().top_k;
  TROUPE_CHECK(top_k >= 1 && top_k <= logits.shape[1],
               "sinkhorn_topk selects between 1 and E experts");
  context.output("", DType::i32, {logits.shape[0], top_k});
}

// An exponential and two comparisons for each logit, and two multiply-adds in each round: ten
// rounds, which logits of a deviation of about 4 take.
Cost cost_sinkhorn_topk(const OpView& view) {
  constexpr double kRounds = 10;
  const Value& logits = view.input(0);
  return {.flops = (3 + 4 * kRounds) * static_cast<double>(logits.shape.elements()),
          .bytes = static_cast<double>(logits.bytes() + view.output(0).bytes())};
}

CpuKernel sinkhorn_topk_kernel(const OpView& view) {
  return sinkhorn_topk_cpu_kernel(view.input(0).dtype);
}

uint64_t sinkhorn_topk_workspace_bytes(const OpView& view) {
  const Shape& shape = view.input(0).shape;
  return static_cast<uint64_t>(SinkhornWorkspace::elements(shape[0], shape[1])) * sizeof(double);
}

uint64_t sinkhorn_topk_scratch_bytes(const OpView& view) {
  return static_cast<uint64_t>(sinkhorn_scratch_elements(view.input(0).shape[1])) * sizeof(double);
}

std::string print_sinkhorn_topk(const Attributes& attributes) {
  return fmt::format("top_k={}", attributes.as<SinkhornTopkAttributes>().top_k);
}

OpSample sample_sinkhorn_topk(const std::string& name, const Shape& shape, int32_t top_k,
                              double deviation) {
  return {name, [=](SampleBuilder& sample) {
            const ValueId logits = sample.tensor(
                "logits", shape,
                {.deviation = deviation, .differentiable = false, .accumulation = true});
            sample.result_without_gradient(
                sinkhorn_topk(sample.builder(), logits, {.top_k = top_k}, "indices"));
          }};
}

uint64_t sinkhorn_topk_cuda_scratch_bytes(const OpView& op) {
  const Shape& shape = op.input(0).shape;
  return static_cast<uint64_t>(Balance::elements(shape[0], shape[1])) * sizeof(double);
}

std::vector<OpSample> samples_sinkhorn_topk() {
  return {
      sample_sinkhorn_topk("a few tokens", {13, 5}, 2, 2),
      sample_sinkhorn_topk("more experts than lanes", {40, 21}, 3, 4),
      sample_sinkhorn_topk("one token", {1, 7}, 3, 1),
      sample_sinkhorn_topk("every expert", {5, 3}, 3, 1),
      sample_sinkhorn_topk("one expert", {4, 1}, 1, 1),
      sample_sinkhorn_topk("many chunks", {1100, 33}, 1, 2),
  };
}

}  // namespace

ValueId sinkhorn_topk(Builder& builder, ValueId logits, const SinkhornTopkAttributes& attributes,
                      const std::string& name) {
  return builder.emit(kSinkhornTopk, Attributes(attributes), {logits}, name)[0];
}

const OpSpec kSinkhornTopk{
    .name = "sinkhorn_topk",
    .infer = infer_sinkhorn_topk,
    .cost = cost_sinkhorn_topk,
    .cpu = {.kernel = sinkhorn_topk_kernel,
            .workspace = sinkhorn_topk_workspace_bytes,
            .scratch = sinkhorn_topk_scratch_bytes},
    .cuda = only_kernel<TROUPE_CUDA(sinkhorn_topk_cuda_kernel), sinkhorn_topk_cuda_scratch_bytes>,
    .print_attributes = print_sinkhorn_topk,
    .samples = samples_sinkhorn_topk};

}  // namespace troupe
