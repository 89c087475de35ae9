#include "ops/routing/expert_capacity/expert_capacity.h"

#include <cmath>
#include <fmt/format.h>
#include <limits>
#include <vector>

#include "ops/choose_kernel.h"
#include "ops/cpu/expert_slots.h"
#include "program/op_sample.h"

namespace troupe {

CpuKernel expert_capacity_cpu_kernel(const OpView& view);
CudaKernel expert_capacity_cuda_kernel(const OpView& op);

namespace {

void infer_expert_capacity(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 2, "expert_capacity takes probabilities, indices");
  const Value& indices = context.input(1);
  const auto& attributes = context.attributes<ExpertCapacityAttributes>();
  TROUPE_CHECK(indices.dtype == DType::i32 && indices.shape.rank() == 2 && !indices.rows.valid() &&
                   indices.shape.elements() <= std::numeric_limits<int32_t>::max(),
               "expert_capacity needs i32 indices [T, k]: " + indices.name);
  TROUPE_CHECK(attributes.experts >= 1 && attributes.capacity >= 1,
               "expert_capacity needs an expert and a capacity");
  TROUPE_CHECK(attributes.sequence_tokens >= 0 && attributes.first_token >= 0 &&
                   (attributes.policy == DropPolicy::position || attributes.sequence_tokens == 0),
               "expert_capacity: only the policy position looks at sequences");
  TROUPE_CHECK(context.has_input(0) == (attributes.policy == DropPolicy::probs),
               "expert_capacity takes probabilities to compare them");
  if (context.has_input(0)) {
    const Value& probabilities = context.input(0);
    TROUPE_CHECK((probabilities.dtype == DType::f32 || probabilities.dtype == DType::f64) &&
                     probabilities.shape == indices.shape,
                 "expert_capacity needs f32 or f64 probabilities [T, k]: " + probabilities.name);
  }
  context.output("", DType::i32, indices.shape);
}

// The indices are read twice; a comparison or two for each probability.
Cost cost_expert_capacity(const OpView& view) {
  const bool compares = view.has_input(0);
  const uint64_t bytes =
      2 * view.input(1).bytes() + view.output(0).bytes() + (compares ? view.input(0).bytes() : 0);
  return {.flops = (compares ? 2 : 0) * static_cast<double>(view.input(1).shape.elements()),
          .bytes = static_cast<double>(bytes)};
}

// Does the kernel select among the slots of an expert, instead of keeping the first ones?
bool selects(const OpView& view) {
  return view.has_input(0) || view.attributes<ExpertCapacityAttributes>().sequence_tokens > 0;
}

// Ranks of the chunks and loads of the experts; to select also the slots sorted by expert and where
// each expert's begin.
uint64_t expert_capacity_workspace_bytes(const OpView& view) {
  const int64_t experts = view.attributes<ExpertCapacityAttributes>().experts;
  const int64_t slots = view.input(1).shape.elements();
  int64_t numbers = (slot_chunks(slots) + 1) * experts;
  if (selects(view)) numbers += experts + slots;
  return static_cast<uint64_t>(numbers) * sizeof(int32_t);
}

std::string print_expert_capacity(const Attributes& attributes) {
  const auto& a = attributes.as<ExpertCapacityAttributes>();
  std::string text =
      fmt::format("experts={} capacity={} policy={}", a.experts, a.capacity, name_of(a.policy));
  if (a.sequence_tokens != 0) {
    text += fmt::format(" sequence_tokens={} first_token={}", a.sequence_tokens, a.first_token);
  }
  return text;
}

OpSample sample_expert_capacity(const std::string& name, int64_t top_k,
                                const std::vector<int32_t>& indices,
                                const std::vector<double>& probabilities,
                                const ExpertCapacityAttributes& attributes) {
  return {name, [=](SampleBuilder& sample) {
            const Shape shape{static_cast<int64_t>(indices.size()) / top_k, top_k};
            SampleBuilder::Options options;
            options.accumulation = true;
            options.differentiable = false;
            const ValueId p = sample.values("probabilities", shape, probabilities, options);
            const ValueId chosen = sample.integers("indices", shape, indices);
            sample.result_without_gradient(
                limit_to_capacity(sample.builder(), p, chosen, attributes, "kept"));
          }};
}

std::vector<OpSample> samples_expert_capacity() {
  const std::vector<int32_t> indices = {0, 2, 2, 0, 0, 3, 2, 0, -1, 2, 0, 3};
  // All are bf16 numbers: rounding must not make ties of them.
  const std::vector<double> probabilities = {0.5,   0.25,   0.75, 0.125, 0.625, 0.375,
                                             0.875, 0.3125, 0.5,  0.25,  0.5,   0.0625};
  std::vector<int32_t> many_indices;
  std::vector<double> many_probabilities;
  for (int32_t i = 0; i < 2 * kSlotChunk + 100; ++i) {
    many_indices.push_back(i * 31 % 7 - 1);
    many_probabilities.push_back((i * 7919 % 128) / 128.0);
  }
  const auto bound = static_cast<int64_t>(indices.size());
  return {
      sample_expert_capacity("largest probabilities, ties", 2, indices, probabilities,
                             {.experts = 4, .capacity = 2}),
      sample_expert_capacity("earliest tokens", 2, indices, probabilities,
                             {.experts = 4, .capacity = 2, .policy = DropPolicy::position}),
      sample_expert_capacity(
          "earliest places of three sequences", 2, indices, probabilities,
          {.experts = 4, .capacity = 2, .policy = DropPolicy::position, .sequence_tokens = 2}),
      sample_expert_capacity("the end of one sequence and most of the next", 2, indices,
                             probabilities,
                             {.experts = 4,
                              .capacity = 1,
                              .policy = DropPolicy::position,
                              .sequence_tokens = 5,
                              .first_token = 3}),
      sample_expert_capacity("one slot for each expert", 3, indices, probabilities,
                             {.experts = 5, .capacity = 1}),
      sample_expert_capacity("enough for all", 1, indices, probabilities,
                             {.experts = 4, .capacity = bound}),
      sample_expert_capacity("many chunks", 2, many_indices, many_probabilities,
                             {.experts = 6, .capacity = 4000}),
      sample_expert_capacity("many chunks, earliest tokens", 2, many_indices, many_probabilities,
                             {.experts = 6, .capacity = 4000, .policy = DropPolicy::position}),
      sample_expert_capacity("many chunks, earliest places", 2, many_indices, many_probabilities,
                             {.experts = 6,
                              .capacity = 900,
                              .policy = DropPolicy::position,
                              .sequence_tokens = 1111,
                              .first_token = 7}),
  };
}

}  // namespace

std::string_view name_of(DropPolicy policy) {
  return policy == DropPolicy::probs ? "probs" : "position";
}

int64_t expert_capacity(int64_t tokens, int64_t top_k, int64_t experts, double factor) {
  const double share = static_cast<double>(tokens * top_k) / static_cast<double>(experts);
  return std::max<int64_t>(1, static_cast<int64_t>(std::ceil(share * factor)));
}

ValueId limit_to_capacity(Builder& builder, ValueId probabilities, ValueId indices,
                          const ExpertCapacityAttributes& attributes, const std::string& name) {
  const bool compares = attributes.policy == DropPolicy::probs;
  return builder.emit(kExpertCapacity, Attributes(attributes),
                      {compares ? probabilities : ValueId{}, indices}, name)[0];
}

const OpSpec kExpertCapacity{
    .name = "expert_capacity",
    .infer = infer_expert_capacity,
    .cost = cost_expert_capacity,
    .cpu = {.kernel = expert_capacity_cpu_kernel, .workspace = expert_capacity_workspace_bytes},
    .cuda = only_kernel<TROUPE_CUDA(expert_capacity_cuda_kernel)>,
    .print_attributes = print_expert_capacity,
    .samples = samples_expert_capacity};

}  // namespace troupe
