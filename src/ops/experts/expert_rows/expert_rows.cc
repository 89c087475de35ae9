#include "ops/experts/expert_rows/expert_rows.h"

#include <fmt/format.h>
#include <vector>

#include "ops/choose_kernel.h"
#include "program/op_sample.h"

namespace troupe {

void limit_expert_rows_cpu(const KernelArguments& args);
void keep_tokens_cpu(const KernelArguments& args);
CudaKernel limit_expert_rows_cuda_kernel(const OpView& op);
CudaKernel keep_tokens_cuda_kernel(const OpView& op);

namespace {

// The chosen experts are the first input; the first output is like them.
void infer_kept(InferContext& context, const std::string& kind) {
  const Value& indices = context.input(0);
  TROUPE_CHECK(indices.dtype == DType::i32 && indices.shape.rank() == 2 && !indices.rows.valid(),
               kind + " needs i32 indices [T, k]: " + indices.name);
  const Shape shape = indices.shape;
  context.output("", DType::i32, shape);
}

void infer_limit_expert_rows(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 2, "limit_expert_rows takes indices, loads");
  const Value& loads = context.input(1);
  const auto& attributes = context.attributes<LimitExpertRowsAttributes>();
  TROUPE_CHECK(loads.dtype == DType::i32 && loads.shape.rank() == 1 && attributes.parts >= 1 &&
                   loads.shape[0] % attributes.parts == 0,
               "limit_expert_rows needs i32 loads [E] in equal parts: " + loads.name);
  TROUPE_CHECK(attributes.rows >= 1, "limit_expert_rows: room for at least one row");
  infer_kept(context, "limit_expert_rows");
  context.output("over", DType::i32, {1});
  context.output("fullest", DType::i32, {1});
}

void infer_keep_tokens(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 1, "keep_tokens takes indices");
  const auto& attributes = context.attributes<KeepTokensAttributes>();
  TROUPE_CHECK(attributes.first >= 0 && attributes.count >= 1, "keep_tokens: which tokens");
  infer_kept(context, "keep_tokens");
}

Cost cost_limit_expert_rows(const OpView& view) {
  return {.flops = 0,
          .bytes = static_cast<double>(2 * view.input(0).bytes() + view.input(1).bytes())};
}

Cost cost_keep_tokens(const OpView& view) {
  return {.flops = 0, .bytes = static_cast<double>(2 * view.input(0).bytes())};
}

CpuKernel limit_expert_rows_kernel(const OpView&) {
  return &limit_expert_rows_cpu;
}

CpuKernel keep_tokens_kernel(const OpView&) {
  return &keep_tokens_cpu;
}

std::string print_limit_expert_rows(const Attributes& attributes) {
  const auto& a = attributes.as<LimitExpertRowsAttributes>();
  return fmt::format("parts={} rows={}", a.parts, a.rows);
}

std::string print_keep_tokens(const Attributes& attributes) {
  const auto& a = attributes.as<KeepTokensAttributes>();
  return fmt::format("first={} count={}", a.first, a.count);
}

OpSample sample_limit(const char* name, const std::vector<int32_t>& loads,
                      const LimitExpertRowsAttributes& attributes, int64_t tokens) {
  return {name, [=](SampleBuilder& sample) {
            std::vector<int32_t> chosen;
            for (int64_t slot = 0; slot < 2 * tokens; ++slot) {
              chosen.push_back(static_cast<int32_t>(slot * 7 % 5) - 1);
            }
            const ValueId indices = sample.integers("indices", {tokens, 2}, chosen);
            const ValueId counts =
                sample.integers("loads", {static_cast<int64_t>(loads.size())}, loads);
            const LimitedRows limited =
                limit_expert_rows(sample.builder(), indices, counts, attributes, "kept");
            sample.result_without_gradient(limited.kept);
            sample.result_without_gradient(limited.over);
            sample.result_without_gradient(limited.fullest);
          }};
}

std::vector<OpSample> samples_limit_expert_rows() {
  return {
      sample_limit("room for all", {3, 1, 0, 4}, {.parts = 2, .rows = 4}, 5),
      sample_limit("one row too many in the last part", {3, 1, 1, 4}, {.parts = 2, .rows = 4}, 5),
      sample_limit("one part", {5, 6, 7}, {.parts = 1, .rows = 17}, 3),
      sample_limit("each expert by itself, many tokens", {9, 0, 2, 9, 1, 10},
                   {.parts = 6, .rows = 10}, 20000),
  };
}

std::vector<OpSample> samples_keep_tokens() {
  const auto sample_of = [](const char* name, int64_t tokens,
                            const KeepTokensAttributes& attributes) {
    return OpSample{name, [=](SampleBuilder& sample) {
                      std::vector<int32_t> chosen;
                      for (int64_t slot = 0; slot < 3 * tokens; ++slot) {
                        chosen.push_back(static_cast<int32_t>(slot * 11 % 7) - 1);
                      }
                      const ValueId indices = sample.integers("indices", {tokens, 3}, chosen);
                      sample.result_without_gradient(
                          keep_tokens(sample.builder(), indices, attributes, "kept"));
                    }};
  };
  return {
      sample_of("the first tokens", 7, {.first = 0, .count = 3}),
      sample_of("the last tokens, fewer than a round has", 7, {.first = 6, .count = 3}),
      sample_of("many chunks", 10000, {.first = 4095, .count = 3000}),
  };
}

}  // namespace

LimitedRows limit_expert_rows(Builder& builder, ValueId indices, ValueId loads,
                              const LimitExpertRowsAttributes& attributes,
                              const std::string& name) {
  const auto outputs =
      builder.emit(kLimitExpertRows, Attributes(attributes), {indices, loads}, name);
  return {.kept = outputs[0], .over = outputs[1], .fullest = outputs[2]};
}

ValueId keep_tokens(Builder& builder, ValueId indices, const KeepTokensAttributes& attributes,
                    const std::string& name) {
  return builder.emit(kKeepTokens, Attributes(attributes), {indices}, name)[0];
}

const OpSpec kLimitExpertRows{.name = "limit_expert_rows",
                              .infer = infer_limit_expert_rows,
                              .cost = cost_limit_expert_rows,
                              .cpu = {.kernel = limit_expert_rows_kernel},
                              .cuda = only_kernel<TROUPE_CUDA(limit_expert_rows_cuda_kernel)>,
                              .print_attributes = print_limit_expert_rows,
                              .samples = samples_limit_expert_rows};

const OpSpec kKeepTokens{.name = "keep_tokens",
                         .infer = infer_keep_tokens,
                         .cost = cost_keep_tokens,
                         .cpu = {.kernel = keep_tokens_kernel},
                         .cuda = only_kernel<TROUPE_CUDA(keep_tokens_cuda_kernel)>,
                         .print_attributes = print_keep_tokens,
                         .samples = samples_keep_tokens};

}  // namespace troupe
