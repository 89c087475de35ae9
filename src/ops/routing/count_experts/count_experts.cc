#include "ops/routing/count_experts/count_experts.h"

#include <fmt/format.h>
#include <vector>

#include "ops/choose_kernel.h"
#include "ops/cpu/expert_slots.h"
#include "program/op_sample.h"

namespace troupe {

void count_experts_cpu(const KernelArguments& args);
CudaKernel count_experts_cuda_kernel(const OpView& op);

namespace {

void infer_count_experts(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 2 || context.input_count() == 3,
               "count_experts takes indices, previous, and a mask");
  const Value& indices = context.input(0);
  const auto& attributes = context.attributes<CountExpertsAttributes>();
  TROUPE_CHECK(indices.dtype == DType::i32 && indices.shape.rank() == 2 && !indices.rows.valid(),
               "count_experts needs i32 indices [T, k]: " + indices.name);
  TROUPE_CHECK(attributes.experts >= 1, "count_experts needs at least one expert");
  TROUPE_CHECK(attributes.sequences >= 1 &&
                   are_sequences(indices.shape[0], attributes.sequences, attributes.sequence_tokens,
                                 attributes.first_token),
               "count_experts needs sequences of equal length: " + indices.name);
  const Shape shape = expert_counts_shape(attributes.sequences, attributes.experts);
  TROUPE_CHECK(!context.has_input(1) ||
                   (context.input(1).dtype == DType::i32 && context.input(1).shape == shape),
               "count_experts: previous counts of another shape: " + context.input(1).name);
  TROUPE_CHECK(context.input_count() == 2 || (context.input(2).dtype == DType::i32 &&
                                              context.input(2).shape == Shape({indices.shape[0]})),
               "count_experts needs an i32 mask [T]");
  context.output("", DType::i32, shape);
}

Cost cost_count_experts(const OpView& view) {
  const uint64_t counts = (view.has_input(1) ? 2U : 1U) * view.output(0).bytes();
  const uint64_t mask = view.op.input_count == 3 ? view.input(2).bytes() : 0;
  return {.flops = 0, .bytes = static_cast<double>(view.input(0).bytes() + mask + counts)};
}

CpuKernel count_experts_kernel(const OpView&) {
  return &count_experts_cpu;
}

// A histogram for each chunk of each sequence.
uint64_t count_experts_workspace_bytes(const OpView& view) {
  const auto& attributes = view.attributes<CountExpertsAttributes>();
  const Shape& indices = view.input(0).shape;
  const int64_t slots = attributes.sequence_tokens > 0 ? attributes.sequence_tokens * indices[1]
                                                       : indices.elements() / attributes.sequences;
  return static_cast<uint64_t>(slot_chunks(slots) * attributes.sequences * attributes.experts) *
         sizeof(int32_t);
}

std::string print_count_experts(const Attributes& attributes) {
  const auto& a = attributes.as<CountExpertsAttributes>();
  std::string text = fmt::format("experts={} sequences={}", a.experts, a.sequences);
  if (a.sequence_tokens != 0) {
    text += fmt::format(" sequence_tokens={} first_token={}", a.sequence_tokens, a.first_token);
  }
  return text;
}

std::vector<OpSample> samples_count_experts() {
  return {
      {"one sequence, dropped slots",
       [](SampleBuilder& sample) {
         const ValueId indices = sample.integers("indices", {4, 2}, {3, 0, -1, 3, 0, 1, 3, -1});
         sample.result_without_gradient(
             count_experts(sample.builder(), indices, {}, {.experts = 5}, "counts"));
       }},
      {"three sequences, added to previous counts",
       [](SampleBuilder& sample) {
         const CountExpertsAttributes attributes{.experts = 2, .sequences = 3};
         const ValueId first = sample.integers("first", {6, 1}, {0, 1, 1, 1, -1, 0});
         const ValueId second = sample.integers("second", {3, 2}, {1, 0, 1, -1, 0, 1});
         const ValueId counts = count_experts(sample.builder(), first, {}, attributes, "counts");
         sample.result_without_gradient(counts);
         sample.result_without_gradient(
             count_experts(sample.builder(), second, counts, attributes, "sums"));
       }},
      {"the end of one sequence, a whole one and the begin of a third",
       [](SampleBuilder& sample) {
         const ValueId indices =
             sample.integers("indices", {6, 2}, {1, 0, 2, 1, 2, -1, 0, 2, 1, 2, 2, 0});
         sample.result_without_gradient(count_experts(
             sample.builder(), indices, {},
             {.experts = 3, .sequences = 4, .sequence_tokens = 3, .first_token = 2}, "counts"));
       }},
      {"padding, two sequences, added to previous counts",
       [](SampleBuilder& sample) {
         const CountExpertsAttributes attributes{
             .experts = 3, .sequences = 2, .sequence_tokens = 3, .first_token = 1};
         const ValueId indices = sample.integers("indices", {4, 2}, {1, 0, 2, 1, 2, -1, 0, 2});
         const ValueId mask = sample.integers("valid", {4}, {0, 1, 1, 0});
         const ValueId previous = sample.integers("previous", {2, 3}, {5, 0, 2, 1, 1, 1});
         sample.result_without_gradient(
             count_experts(sample.builder(), indices, previous, attributes, "counts", mask));
       }},
      {"many chunks",
       [](SampleBuilder& sample) {
         std::vector<int32_t> indices;
         for (int32_t i = 0; i < 2 * (2 * kSlotChunk + 10); ++i) indices.push_back(i * 31 % 7 - 1);
         const auto tokens = static_cast<int64_t>(indices.size());
         const ValueId chosen = sample.integers("indices", {tokens, 1}, indices);
         sample.result_without_gradient(
             count_experts(sample.builder(), chosen, {}, {.experts = 6, .sequences = 2}, "counts"));
         std::vector<int32_t> valid(indices.size() / 2);
         for (size_t i = 0; i < valid.size(); ++i) valid[i] = i % 3 == 0 ? 0 : 1;
         const ValueId pairs = sample.integers("pairs", {tokens / 2, 2}, indices);
         sample.result_without_gradient(
             count_experts(sample.builder(), pairs, {}, {.experts = 6, .sequences = 2},
                           "counts_of_valid", sample.integers("valid", {tokens / 2}, valid)));
       }},
  };
}

}  // namespace

bool are_sequences(int64_t tokens, int64_t sequences, int64_t sequence_tokens,
                   int64_t first_token) {
  if (sequence_tokens == 0) return tokens % sequences == 0 && first_token == 0;
  return first_token >= 0 && first_token + tokens <= sequences * sequence_tokens;
}

Shape expert_counts_shape(int64_t sequences, int64_t experts) {
  return sequences == 1 ? Shape{experts} : Shape{sequences, experts};
}

ValueId count_experts(Builder& builder, ValueId indices, ValueId previous,
                      const CountExpertsAttributes& attributes, const std::string& name,
                      ValueId mask) {
  std::vector<ValueId> inputs = {indices, previous};
  if (mask.valid()) inputs.push_back(mask);
  return builder.emit(kCountExperts, Attributes(attributes), inputs, name)[0];
}

const OpSpec kCountExperts{
    .name = "count_experts",
    .infer = infer_count_experts,
    .cost = cost_count_experts,
    .cpu = {.kernel = count_experts_kernel, .workspace = count_experts_workspace_bytes},
    .cuda = only_kernel<TROUPE_CUDA(count_experts_cuda_kernel)>,
    .print_attributes = print_count_experts,
    .samples = samples_count_experts};

}  // namespace troupe
