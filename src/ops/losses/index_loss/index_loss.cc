#include "ops/losses/index_loss/index_loss.h"

#include <fmt/format.h>
#include <vector>

#include "ops/attention/attention/document_starts.h"
#include "ops/attention/sparse_attention/choice_samples.h"
#include "ops/choose_kernel.h"
#include "ops/costs.h"
#include "ops/losses/index_loss/index_loss_cpu.h"
#include "program/derivative.h"
#include "program/op_sample.h"

namespace troupe {

CudaKernel index_loss_cuda_kernel(const OpView& op);
CudaKernel index_loss_gradient_cuda_kernel(const OpView& op);

namespace {

enum IndexLossInput : uint8_t {
  kIndexQueries,
  kIndexKeys,
  kIndexWeights,
  kIndexTarget,
  kIndexChosen,
  kIndexStarts,
  kIndexDLoss
};

// Of a query.
int64_t most_index_keys(const OpView& op) {
  const KeyRows rows = op.attributes<IndexLossAttributes>().index.rows();
  return op.has_input(kIndexChosen) ? op.input(kIndexChosen).shape[1] : rows.sequence();
}

void check_index_loss(const InferContext& context) {
  const auto& a = context.attributes<IndexLossAttributes>();
  const KeyRows rows = a.index.rows();
  check_index_inputs(context, a.index, kIndexStarts);
  int64_t keys = rows.sequence();
  if (context.has_input(kIndexChosen)) {
    const Value& chosen = context.input(kIndexChosen);
    TROUPE_CHECK(chosen.dtype == DType::i32 && chosen.shape.rank() == 2 &&
                     chosen.shape[0] == rows.queries() && chosen.shape[1] <= keys,
                 "index_loss: chosen " + chosen.shape.to_string());
    keys = chosen.shape[1];
  }
  TROUPE_CHECK(!context.has_input(kIndexTarget) ||
                   (context.input(kIndexTarget).dtype == context.input(kIndexWeights).dtype &&
                    context.input(kIndexTarget).shape == Shape({rows.queries(), keys})),
               "index_loss: target");
}

void infer_index_loss(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 6, "index_loss: takes q, k, w, target, chosen and starts");
  check_index_loss(context);
  context.output("", context.input(kIndexWeights).dtype, {1});
}

void infer_index_loss_gradient(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 7,
               "index_loss_gradient: takes q, k, w, target, chosen, starts and d_loss");
  check_index_loss(context);
  const Value q = context.input(kIndexQueries);
  const Value k = context.input(kIndexKeys);
  const Value w = context.input(kIndexWeights);
  TROUPE_CHECK(
      context.input(kIndexDLoss).dtype == w.dtype && context.input(kIndexDLoss).shape == Shape({1}),
      "index_loss_gradient: d_loss");
  context.output("", q.dtype, q.shape);
  context.output("keys", k.dtype, k.shape);
  context.output("weights", w.dtype, w.shape);
}

void differentiate_index_loss(DerivativeContext& context) {
  if (!context.wants(kIndexQueries) && !context.wants(kIndexKeys) && !context.wants(kIndexWeights))
    return;
  std::vector<ValueId> inputs;
  for (int i = kIndexQueries; i <= kIndexStarts; ++i) inputs.push_back(context.input(i));
  inputs.push_back(context.output_gradient(0));
  const auto gradients = context.builder().emit(
      kIndexLossGradient, Attributes(context.attributes<IndexLossAttributes>()), inputs,
      "d_" + context.input_name(kIndexQueries));
  for (const IndexLossInput input : {kIndexQueries, kIndexKeys, kIndexWeights}) {
    if (context.wants(input)) context.add_gradient(input, gradients[input]);
  }
}

// `products`: of queries and keys.
Cost cost_of_index_loss(const OpView& op, int products) {
  const IndexAttributes& a = op.attributes<IndexLossAttributes>().index;
  const KeyRows rows = a.rows();
  const double pairs =
      op.has_input(kIndexTarget)
          ? most_chosen_pairs(rows.sequence(), most_index_keys(op)) / rows.ranks * rows.batch
          : 0;
  double bytes = 0;
  for (int i = kIndexQueries; i <= kIndexTarget; ++i) {
    if (op.has_input(i)) bytes += static_cast<double>(op.input(i).bytes());
  }
  return product_cost(2.0 * products * pairs * a.heads * a.head_dim, op.input(kIndexQueries).dtype,
                      bytes);
}

Cost cost_index_loss(const OpView& op) {
  return cost_of_index_loss(op, 1);
}

Cost cost_index_loss_gradient(const OpView& op) {
  return cost_of_index_loss(op, 4);  // the scores twice
}

std::string print_index_loss(const Attributes& attributes) {
  const auto& a = attributes.as<IndexLossAttributes>();
  return fmt::format("coefficient={}{}", a.coefficient, text_of(a.index));
}

uint64_t scratch_index_loss(const OpView& op) {
  return index_loss_scratch_bytes(op.attributes<IndexLossAttributes>().index, most_index_keys(op),
                                  op.input(kIndexQueries).dtype);
}

uint64_t workspace_index_loss(const OpView& op) {
  return index_loss_workspace_bytes(op.attributes<IndexLossAttributes>().index,
                                    op.input(kIndexQueries).dtype);
}

uint64_t scratch_index_loss_gradient(const OpView& op) {
  return index_loss_gradient_scratch_bytes(op.attributes<IndexLossAttributes>().index,
                                           most_index_keys(op), op.input(kIndexQueries).dtype);
}

uint64_t workspace_index_loss_gradient(const OpView& op) {
  return index_loss_gradient_workspace_bytes(op.attributes<IndexLossAttributes>().index,
                                             op.input(kIndexQueries).dtype);
}

// A number for each query, and a row of scores for each block.
uint64_t index_loss_cuda_scratch_bytes(const OpView& op) {
  const IndexAttributes& index = op.attributes<IndexLossAttributes>().index;
  const int64_t elements = index.rows().queries() + index_blocks(index) * most_index_keys(op);
  return op.has_input(kIndexTarget)
             ? static_cast<uint64_t>(elements) * size_of(op.input(kIndexWeights).dtype)
             : 0;
}

// The gradients of all scores.
uint64_t index_loss_gradient_cuda_scratch_bytes(const OpView& op) {
  return op.has_input(kIndexTarget) ? op.input(kIndexTarget).bytes() : 0;
}

// `most`: chosen keys of a query; 0: all that it sees.
OpSample sample_index_loss(const std::string& name, const IndexAttributes& a, int64_t most,
                           bool documents = false) {
  return {
      name, [=](SampleBuilder& sample) {
        const KeyRows rows = a.rows();
        ValueId chosen;
        ValueId starts;
        if (most > 0) {
          chosen = sample.integers("chosen", {rows.queries(), most}, strided_choice(rows, most, 2));
        }
        if (documents) {
          starts = sample.integers("starts", {rows.queries()},
                                   document_starts(a.batch, a.sequence, a.chunks, {2, 3}));
        }
        const int64_t keys = most > 0 ? most : rows.sequence();
        std::vector<double> target;  // positive, and not normalised
        for (int64_t i = 0; i < rows.queries() * keys; ++i) {
          target.push_back(0.25 + static_cast<double>(i * 37 % 11) / 8);
        }
        const SampleBuilder::Options wide{.accumulation = true};
        const SampleBuilder::Options constant{.differentiable = false, .accumulation = true};
        sample.result(index_loss(
            sample.builder(),
            {.queries = sample.tensor("q", {rows.queries(), int64_t{a.heads} * a.head_dim}),
             .keys = sample.tensor("k", {rows.keys(), int64_t{a.head_dim}}),
             .weights = sample.tensor("w", {rows.queries(), int64_t{a.heads}}, wide),
             .starts = starts},
            sample.values("target", {rows.queries(), keys}, target, constant), chosen,
            {.index = a, .coefficient = 1.5}, "loss"));
      }};
}

std::vector<OpSample> samples_index_loss() {
  const IndexAttributes small{.batch = 2, .sequence = 7, .heads = 3, .head_dim = 5};
  const IndexAttributes of_two{
      .batch = 2, .sequence = 4, .heads = 2, .head_dim = 6, .chunks = {.ranks = 2, .rank = 1}};
  const auto untrained = [=](SampleBuilder& sample) {
    const SampleBuilder::Options wide{.accumulation = true};
    sample.result(index_loss(sample.builder(),
                             {.queries = sample.tensor("q", {14, 15}),
                              .keys = sample.tensor("k", {14, 5}),
                              .weights = sample.tensor("w", {14, 3}, wide)},
                             {}, {}, {.index = small}, "loss"));
  };
  return {sample_index_loss("chosen keys", small, 3),
          sample_index_loss("all keys", small, 0),
          sample_index_loss("all keys of documents", small, 0, true),
          sample_index_loss("chosen keys of two ranks", of_two, 4),
          sample_index_loss("all keys of two ranks", of_two, 0),
          sample_index_loss("blocks of keys and pieces", {.sequence = 140, .head_dim = 1}, 0),
          {"untrained", untrained}};
}

}  // namespace

ValueId index_loss(Builder& builder, const IndexInputs& inputs, ValueId target, ValueId chosen,
                   const IndexLossAttributes& attributes, const std::string& name) {
  return builder.emit(kIndexLoss, Attributes(attributes),
                      {inputs.queries, inputs.keys, inputs.weights, target, chosen, inputs.starts},
                      name)[0];
}

const OpSpec kIndexLoss{
    .name = "index_loss",
    .infer = infer_index_loss,
    .differentiate = differentiate_index_loss,
    .cost = cost_index_loss,
    .cpu = {.kernel = index_loss_cpu_kernel,
            .workspace = workspace_index_loss,
            .scratch = scratch_index_loss},
    .cuda = only_kernel<TROUPE_CUDA(index_loss_cuda_kernel), index_loss_cuda_scratch_bytes>,
    .print_attributes = print_index_loss,
    .samples = samples_index_loss};

const OpSpec kIndexLossGradient{.name = "index_loss_gradient",
                                .infer = infer_index_loss_gradient,
                                .cost = cost_index_loss_gradient,
                                .cpu = {.kernel = index_loss_gradient_cpu_kernel,
                                        .workspace = workspace_index_loss_gradient,
                                        .scratch = scratch_index_loss_gradient},
                                .cuda = only_kernel<TROUPE_CUDA(index_loss_gradient_cuda_kernel),
                                                    index_loss_gradient_cuda_scratch_bytes>,
                                .print_attributes = print_index_loss};

}  // namespace troupe
