#include "ops/products/embedding/embedding.h"

#include <fmt/format.h>
#include <limits>

#include "ops/choose_kernel.h"
#include "program/derivative.h"
#include "program/op_sample.h"

namespace troupe {

CpuKernel embedding_cpu_kernel(const OpView& op);
CpuKernel embedding_weight_gradient_cpu_kernel(const OpView& op);
CudaKernel embedding_cuda_kernel(const OpView& op);
CudaKernel embedding_weight_gradient_cuda_kernel(const OpView& op);

namespace {

void infer_embedding(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 2, "embedding: takes tokens and weight");
  const Value& tokens = context.input(0);
  const Value& weight = context.input(1);
  TROUPE_CHECK(tokens.dtype == DType::i32 && tokens.shape.rank() == 1 && !tokens.rows.valid(),
               "embedding: tokens are not i32 [T]: " + tokens.name);
  TROUPE_CHECK(is_float(weight.dtype) && weight.shape.rank() == 2 && !weight.rows.valid() &&
                   weight.shape[0] <= std::numeric_limits<int32_t>::max(),
               "embedding: weight is not [V, h]: " + weight.name);
  context.output("", weight.dtype, {tokens.shape[0], weight.shape[1]});
}

void infer_embedding_weight_gradient(InferContext& context) {
  const Value dy = context.input(0);
  const Value& tokens = context.input(1);
  TROUPE_CHECK(is_float(dy.dtype) && dy.shape.rank() == 2 && tokens.dtype == DType::i32 &&
                   tokens.shape == Shape({dy.shape[0]}),
               "embedding_weight_gradient: dy " + dy.shape.to_string() + " and tokens " +
                   tokens.shape.to_string());
  const auto& attributes = context.attributes<EmbeddingWeightGradientAttributes>();
  declare_weight_gradient(context, 2, "", dy.dtype, {attributes.vocabulary, dy.shape[1]});
}

void differentiate_embedding(DerivativeContext& context) {
  if (!context.wants(1)) return;
  Builder& builder = context.builder();
  const auto target = context.weight_target(1);
  const EmbeddingWeightGradientAttributes attributes{
      .vocabulary = static_cast<int32_t>(builder.value(context.input(1)).shape[0]),
      .padding_token = context.attributes<EmbeddingAttributes>().padding_token,
      .accumulate = target.accumulate};
  context.add_weight_gradient(
      1, builder.emit(kEmbeddingWeightGradient, Attributes(attributes),
                      {context.output_gradient(0), context.input(0), target.target},
                      "d_" + context.input_name(1))[0]);
}

Cost cost_embedding(const OpView& op) {
  return {.flops = 0, .bytes = static_cast<double>(op.input(0).bytes() + 2 * op.output(0).bytes())};
}

Cost cost_embedding_weight_gradient(const OpView& op) {
  // When accumulating, only the rows of tokens that occur are touched: at most one per token.
  const double rows = static_cast<double>(op.input(0).shape.elements()) *
                      static_cast<double>(size_of(op.output(0).dtype));
  const double written = static_cast<double>(op.output(0).bytes());
  const bool accumulate = op.attributes<EmbeddingWeightGradientAttributes>().accumulate;
  return {.flops = static_cast<double>(op.input(0).shape.elements()),
          .bytes = static_cast<double>(op.input(0).bytes() + 2 * op.input(1).bytes()) +
                   (accumulate ? 2 * rows : written)};
}

// Where each vocabulary row's tokens end in the sorted list, and the list.
uint64_t workspace_embedding_weight_gradient(const OpView& op) {
  return static_cast<uint64_t>(op.output(0).shape[0] + op.input(1).shape[0]) * sizeof(int32_t);
}

std::string print_padding_token(int32_t token) {
  return token < 0 ? "" : fmt::format("padding_token={}", token);
}

std::string print_embedding(const Attributes& attributes) {
  return print_padding_token(attributes.as<EmbeddingAttributes>().padding_token);
}

std::string print_embedding_weight_gradient(const Attributes& attributes) {
  const auto& values = attributes.as<EmbeddingWeightGradientAttributes>();
  const std::string padding = print_padding_token(values.padding_token);
  return fmt::format("vocabulary={}{}{} accumulate={}", values.vocabulary,
                     padding.empty() ? "" : " ", padding, values.accumulate ? 1 : 0);
}

uint64_t embedding_weight_gradient_cuda_scratch_bytes(const OpView& op) {
  const int64_t vocabulary = op.attributes<EmbeddingWeightGradientAttributes>().vocabulary;
  return static_cast<uint64_t>(vocabulary + op.input(1).shape[0]) * sizeof(int32_t);
}

std::vector<OpSample> samples_embedding() {
  const auto lookup = [](int64_t vocabulary, int64_t hidden, const std::vector<int32_t>& ids) {
    return [=](SampleBuilder& sample) {
      const ValueId tokens = sample.integers("tokens", {static_cast<int64_t>(ids.size())}, ids);
      const ValueId weight = sample.tensor("weight", {vocabulary, hidden});
      sample.result(embedding(sample.builder(), tokens, weight, {}, "y"));
    };
  };
  // Finite differences know nothing of a padding token, so here none of the ids is it;
  // tests/ops/embedding_test.cc has those that are.
  const auto padded = [](SampleBuilder& sample) {
    const ValueId tokens = sample.integers("tokens", {4}, {3, 0, 3, 2});
    const ValueId weight = sample.tensor("weight", {5, 6});
    sample.result(embedding(sample.builder(), tokens, weight, {.padding_token = 1}, "y"));
  };
  // Two lookups in one table: its gradients are summed.
  const auto shared = [](SampleBuilder& sample) {
    const ValueId first = sample.integers("first", {3}, {0, 2, 2});
    const ValueId second = sample.integers("second", {2}, {3, 0});
    const ValueId weight = sample.tensor("weight", {4, 5});
    sample.result(embedding(sample.builder(), first, weight, {}, "a"));
    sample.result(embedding(sample.builder(), second, weight, {}, "b"));
  };
  const auto several_chunks = [](SampleBuilder& sample) {
    std::vector<int32_t> ids;
    for (int32_t t = 0; t < 3000; ++t) ids.push_back(t * t % 7);
    const ValueId tokens = sample.integers("tokens", {3000}, ids);
    const ValueId weight = sample.tensor("weight", {8, 37});
    sample.result(embedding(sample.builder(), tokens, weight, {}, "y"));
  };
  // More tokens than a tile of the CUDA kernel has, and more ids than one of its blocks.
  std::vector<int32_t> several_tiles;
  for (int32_t t = 0; t < 5000; ++t) several_tiles.push_back(t % 3 == 0 ? 230 + t % 67 : t * t % 7);
  return {{"repeated and unused ids", lookup(11, 19, {3, 0, 3, 10, 3, 7, 0})},
          {"one token", lookup(5, 4, {2})},
          {"one by one", lookup(1, 1, {0, 0})},
          {"ids outside the table", lookup(6, 3, {-1, 5, 6, 2147483647, 0, -2147483647})},
          {"padding token that does not occur", padded},
          {"shared table", shared},
          {"several chunks", several_chunks},
          {"several tiles", lookup(300, 8, several_tiles)}};
}

}  // namespace

ValueId embedding(Builder& builder, ValueId tokens, ValueId weight,
                  const EmbeddingAttributes& attributes, const std::string& name) {
  return builder.emit(kEmbedding, Attributes(attributes), {tokens, weight}, name)[0];
}

const OpSpec kEmbedding{.name = "embedding",
                        .infer = infer_embedding,
                        .differentiate = differentiate_embedding,
                        .cost = cost_embedding,
                        .cpu = {.kernel = embedding_cpu_kernel},
                        .cuda = only_kernel<TROUPE_CUDA(embedding_cuda_kernel)>,
                        .print_attributes = print_embedding,
                        .samples = samples_embedding};

const OpSpec kEmbeddingWeightGradient{
    .name = "embedding_weight_gradient",
    .infer = infer_embedding_weight_gradient,
    .cost = cost_embedding_weight_gradient,
    .cpu = {.kernel = embedding_weight_gradient_cpu_kernel,
            .workspace = workspace_embedding_weight_gradient},
    .cuda = packs_kernel<TROUPE_CUDA(embedding_weight_gradient_cuda_kernel), row_elements_of_input,
                         embedding_weight_gradient_cuda_scratch_bytes>,
    .print_attributes = print_embedding_weight_gradient};

}  // namespace troupe
