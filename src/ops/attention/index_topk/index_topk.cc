#include "ops/attention/index_topk/index_topk.h"

#include <fmt/format.h>
#include <vector>

#include "ops/attention/attention/document_starts.h"
#include "ops/choose_kernel.h"
#include "ops/costs.h"
#include "program/op_sample.h"

namespace troupe {

CpuKernel index_topk_cpu_kernel(const OpView& op);
uint64_t index_topk_scratch_bytes(const OpView& op);
CudaKernel index_topk_cuda_kernel(const OpView& op);

namespace {

void infer_index_topk(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 4, "index_topk: takes q, k, w and starts");
  const auto& a = context.attributes<IndexTopkAttributes>();
  TROUPE_CHECK(a.top_k >= 1, "index_topk: a query has a key at least");
  check_index_inputs(context, a.index, 3);
  context.output("", DType::i32, {a.index.rows().queries(), a.most()});
}

// Of the queries that see more than top_k keys: their products with all of these.
Cost cost_index_topk(const OpView& op) {
  const auto& a = op.attributes<IndexTopkAttributes>();
  const KeyRows rows = a.index.rows();
  const double scored =
      most_chosen_pairs(rows.sequence(), rows.sequence()) - most_chosen_pairs(a.most(), a.most());
  const double pairs = a.most() < rows.sequence() ? scored / a.index.chunks.ranks * rows.batch : 0;
  double bytes = static_cast<double>(op.output(0).bytes());
  for (int i = 0; i < 3; ++i) bytes += static_cast<double>(op.input(i).bytes());
  return product_cost(2 * pairs * a.index.heads * a.index.head_dim, op.input(0).dtype, bytes);
}

uint64_t index_topk_cuda_scratch_bytes(const OpView& op) {
  const IndexAttributes& index = op.attributes<IndexTopkAttributes>().index;
  return uint64_t{index_blocks(index)} * static_cast<uint64_t>(index.rows().sequence()) *
         size_of(op.input(2).dtype);
}

std::string print_index_topk(const Attributes& attributes) {
  const auto& a = attributes.as<IndexTopkAttributes>();
  return fmt::format("top_k={}{}", a.top_k, text_of(a.index));
}

std::vector<OpSample> samples_index_topk() {
  // `begins`: rows of the micro-batch at which a document begins.
  const auto choose = [](const IndexTopkAttributes& a, const std::vector<int64_t>& begins) {
    return [=](SampleBuilder& sample) {
      const IndexAttributes& index = a.index;
      const KeyRows rows = index.rows();
      const SampleBuilder::Options wide{.differentiable = false, .accumulation = true};
      const SampleBuilder::Options constant{.differentiable = false};
      const ValueId starts =
          begins.empty()
              ? ValueId{}
              : sample.integers("starts", {rows.queries()},
                                document_starts(index.batch, index.sequence, index.chunks, begins));
      sample.result_without_gradient(
          index_topk(sample.builder(),
                     {.queries = sample.tensor(
                          "q", {rows.queries(), int64_t{index.heads} * index.head_dim}, constant),
                      .keys = sample.tensor("k", {rows.keys(), int64_t{index.head_dim}}, constant),
                      .weights = sample.tensor("w", {rows.queries(), int64_t{index.heads}}, wide),
                      .starts = starts},
                     a, "chosen"));
    };
  };
  // Most scores are equal: those at lower positions are taken.
  const auto ties = [](SampleBuilder& sample) {
    const SampleBuilder::Options wide{.differentiable = false, .accumulation = true};
    const SampleBuilder::Options constant{.differentiable = false};
    const std::vector<double> ones(6, 1.0);
    sample.result_without_gradient(
        index_topk(sample.builder(),
                   {.queries = sample.values("q", {6, 1}, ones, constant),
                    .keys = sample.values("k", {6, 1}, {2, -1, 3, 2, 2, -5}, constant),
                    .weights = sample.values("w", {6, 1}, ones, wide)},
                   {.index = {.sequence = 6}, .top_k = 2}, "chosen"));
  };
  return {
      {"two sequences",
       choose({.index = {.batch = 2, .sequence = 9, .heads = 3, .head_dim = 4}, .top_k = 4}, {})},
      {"documents",
       choose({.index = {.sequence = 12, .heads = 2, .head_dim = 6}, .top_k = 3}, {4, 5})},
      {"more than there are", choose({.index = {.sequence = 4, .head_dim = 3}, .top_k = 9}, {})},
      {"of one rank of two", choose({.index = {.batch = 2,
                                               .sequence = 6,
                                               .heads = 2,
                                               .head_dim = 4,
                                               .chunks = {.ranks = 2, .rank = 1}},
                                     .top_k = 5},
                                    {})},
      {"blocks of keys",
       choose({.index = {.sequence = 300, .heads = 2, .head_dim = 8}, .top_k = 40}, {150})},
      {"ties", ties}};
}

}  // namespace

ValueId index_topk(Builder& builder, const IndexInputs& inputs,
                   const IndexTopkAttributes& attributes, const std::string& name) {
  return builder.emit(kIndexTopk, Attributes(attributes),
                      {inputs.queries, inputs.keys, inputs.weights, inputs.starts}, name)[0];
}

const OpSpec kIndexTopk{
    .name = "index_topk",
    .infer = infer_index_topk,
    .cost = cost_index_topk,
    .cpu = {.kernel = index_topk_cpu_kernel, .scratch = index_topk_scratch_bytes},
    .cuda = only_kernel<TROUPE_CUDA(index_topk_cuda_kernel), index_topk_cuda_scratch_bytes>,
    .print_attributes = print_index_topk,
    .samples = samples_index_topk};

}  // namespace troupe
