#include "ops/attention/context_attention/context_attention.h"

#include <fmt/format.h>
#include <vector>

#include "comm/staging.h"
#include "ops/attention/attention/attention_mask.h"
#include "ops/attention/attention/document_starts.h"
#include "ops/attention/attention_sinks/attention_sinks.h"
#include "ops/attention/context_attention/context_attention_cpu.h"
#include "ops/attention/context_attention/context_attention_cuda.h"
#include "ops/costs.h"
#include "ops/products/linear/linear.h"
#include "program/derivative.h"
#include "program/op_sample.h"

namespace troupe {

CudaKernel context_attention_cuda_kernel(const OpView& op, AttentionVariant variant);
CudaKernel context_attention_gradient_cuda_kernel(const OpView& op, AttentionVariant variant);
CudaKernel ring_attention_cuda_kernel(const OpView& op, AttentionVariant variant);
CudaKernel ring_attention_gradient_cuda_kernel(const OpView& op, AttentionVariant variant);

namespace {

int64_t own_rows(const ContextAttentionAttributes& a) {
  return int64_t{a.attention.batch} * a.attention.sequence;
}

Shape context_query_shape(const ContextAttentionAttributes& a) {
  return {own_rows(a), a.attention.query_row()};
}

Shape context_out_shape(const ContextAttentionAttributes& a) {
  return {own_rows(a), a.attention.out_row()};
}

Shape context_key_shape(const ContextAttentionAttributes& a, bool ring) {
  return {own_rows(a) * (ring ? 1 : a.chunks.ranks), a.attention.key_value_row()};
}

void check_context_attention(const ContextAttentionAttributes& attributes, const Value& q,
                             const Value& kv, bool ring) {
  const AttentionAttributes& a = attributes.attention;
  const SequenceChunks& chunks = attributes.chunks;
  TROUPE_CHECK(a.batch >= 1 && a.sequence >= 1 && a.groups >= 1 && a.heads >= a.groups &&
                   a.heads % a.groups == 0 && a.head_dim >= 1 && a.value_dim >= 0 &&
                   a.window >= 0 && a.key_column == 0 && chunks.rank >= 0 &&
                   chunks.rank < chunks.ranks && (chunks.ranks == 1 || a.sequence % 2 == 0),
               "context_attention: attributes");
  TROUPE_CHECK(is_float(q.dtype) && q.shape == context_query_shape(attributes) && !q.rows.valid() &&
                   kv.dtype == q.dtype && kv.shape == context_key_shape(attributes, ring) &&
                   !kv.rows.valid(),
               "context_attention: q " + q.shape.to_string() + " and kv " + kv.shape.to_string());
}

void check_context_step(const AttentionAttributes& a, const InferContext& context, int input) {
  TROUPE_CHECK(
      a.probability >= 0 && a.probability < 1 && context.has_input(input) == (a.probability > 0),
      "context_attention: a step belongs to dropout");
  TROUPE_CHECK(!context.has_input(input) || (context.input(input).dtype == DType::i64 &&
                                             context.input(input).shape == Shape({1})),
               "context_attention: step is not i64 [1]");
}

void check_context_starts(const ContextAttentionAttributes& a, const InferContext& context,
                          int input) {
  TROUPE_CHECK(!context.has_input(input) || (context.input(input).dtype == DType::i32 &&
                                             context.input(input).shape == Shape({own_rows(a)})),
               "context_attention: starts are not i32, one for each row of q");
}

void infer_forward(InferContext& context, bool ring) {
  TROUPE_CHECK(context.input_count() == 5,
               "context_attention: takes q, kv, step, starts and sinks");
  const auto& attributes = context.attributes<ContextAttentionAttributes>();
  check_context_attention(attributes, context.input(0), context.input(1), ring);
  check_context_step(attributes.attention, context, 2);
  check_context_starts(attributes, context, 3);
  check_attention_sinks(context, 4, attributes.attention.heads, attributes.attention.first_sink);
  const DType dtype = context.input(0).dtype;
  context.output("", dtype, context_out_shape(attributes));
  context.output("lse", accumulation_dtype(dtype),
                 {own_rows(attributes), attributes.attention.heads});
}

void infer_backward(InferContext& context, bool ring) {
  TROUPE_CHECK(context.input_count() == 7,
               "context_attention_gradient: takes d_out, q, kv, out, lse, step and starts");
  const auto& attributes = context.attributes<ContextAttentionAttributes>();
  const Value& d_out = context.input(0);
  const Value& q = context.input(1);
  const Value& kv = context.input(2);
  const Value& out = context.input(3);
  const Value& lse = context.input(4);
  check_context_attention(attributes, q, kv, ring);
  check_context_step(attributes.attention, context, 5);
  check_context_starts(attributes, context, 6);
  const Shape out_shape = context_out_shape(attributes);
  TROUPE_CHECK(d_out.dtype == q.dtype && d_out.shape == out_shape && out.dtype == q.dtype &&
                   out.shape == out_shape && lse.dtype == accumulation_dtype(q.dtype) &&
                   lse.shape == Shape({own_rows(attributes), attributes.attention.heads}),
               "context_attention_gradient: operands do not belong to " + q.name);
  context.output("", q.dtype, q.shape);
  context.output("kv", kv.dtype, kv.shape);
}

void infer_context_attention(InferContext& context) {
  infer_forward(context, false);
}
void infer_ring_attention(InferContext& context) {
  infer_forward(context, true);
}
void infer_context_attention_gradient(InferContext& context) {
  infer_backward(context, false);
}
void infer_ring_attention_gradient(InferContext& context) {
  infer_backward(context, true);
}

void differentiate_forward(DerivativeContext& context, const OpSpec& spec) {
  TROUPE_CHECK(!context.output_gradient(1).valid(),
               "context_attention: no gradient flows through lse");
  const AttentionAttributes& attention = context.attributes<ContextAttentionAttributes>().attention;
  differentiate_attention_sinks(context, 4,
                                {.heads = attention.heads,
                                 .value_dim = attention.value_size(),
                                 .first_sink = attention.first_sink});
  if (!context.wants(0) && !context.wants(1)) return;
  const auto gradients = context.builder().emit(
      spec, Attributes(context.attributes<ContextAttentionAttributes>()),
      {context.output_gradient(0), context.input(0), context.input(1), context.output(0),
       context.output(1), context.input(2), context.input(3)},
      "d_" + context.input_name(0));
  for (const int i : {0, 1}) {
    if (context.wants(i)) context.add_gradient(i, gradients[static_cast<size_t>(i)]);
  }
}

void differentiate_context_attention(DerivativeContext& context) {
  differentiate_forward(context, kContextAttentionGradient);
}
void differentiate_ring_attention(DerivativeContext& context) {
  differentiate_forward(context, kRingAttentionGradient);
}

// Of products of `elements` of each pair of query and visible key, over all sequences and query
// heads: the pairs of the whole, divided by the ranks, which the chunks balance. Sequences count as
// one document.
double pair_flops(const ContextAttentionAttributes& attributes, double elements) {
  const AttentionAttributes& a = attributes.attention;
  const int64_t whole = int64_t{a.sequence} * attributes.chunks.ranks;
  return 2 * elements * static_cast<double>(a.batch) * a.heads *
         most_visible_pairs(whole, a.window) / attributes.chunks.ranks;
}

double context_operand_bytes(const OpView& op, int inputs, int outputs) {
  uint64_t bytes = 0;
  for (int i = 0; i < inputs; ++i) bytes += op.input(i).bytes();
  for (int i = 0; i < outputs; ++i) bytes += op.output(i).bytes();
  return static_cast<double>(bytes);
}

// Two products over the visible pairs; the softmax is not counted.
Cost cost_context_attention(const OpView& op) {
  const auto& attributes = op.attributes<ContextAttentionAttributes>();
  const AttentionAttributes& a = attributes.attention;
  return product_cost(pair_flops(attributes, a.head_dim + a.value_size()), op.input(0).dtype,
                      context_operand_bytes(op, 2, 2));
}

// Five products, three of them with queries or keys.
Cost cost_context_attention_gradient(const OpView& op) {
  const auto& attributes = op.attributes<ContextAttentionAttributes>();
  const AttentionAttributes& a = attributes.attention;
  return product_cost(pair_flops(attributes, 3 * a.head_dim + 2 * a.value_size()),
                      op.input(1).dtype, context_operand_bytes(op, 5, 2));
}

uint64_t scratch_context_attention(const OpView& op) {
  return context_attention_scratch_bytes(op.attributes<ContextAttentionAttributes>(),
                                         op.input(0).dtype);
}
uint64_t scratch_context_attention_gradient(const OpView& op) {
  return context_attention_gradient_scratch_bytes(op.attributes<ContextAttentionAttributes>(),
                                                  op.input(1).dtype);
}
uint64_t workspace_context_attention(const OpView& op) {
  return context_attention_workspace_bytes(op.attributes<ContextAttentionAttributes>(),
                                           op.input(0).dtype, false);
}
uint64_t workspace_ring_attention(const OpView& op) {
  return context_attention_workspace_bytes(op.attributes<ContextAttentionAttributes>(),
                                           op.input(0).dtype, true);
}
uint64_t workspace_context_attention_gradient(const OpView& op) {
  return context_attention_gradient_workspace_bytes(op.attributes<ContextAttentionAttributes>(),
                                                    op.input(1).dtype, false);
}
uint64_t workspace_ring_attention_gradient(const OpView& op) {
  return context_attention_gradient_workspace_bytes(op.attributes<ContextAttentionAttributes>(),
                                                    op.input(1).dtype, true);
}

// All ranks' keys and values; later their parts of the gradients of this rank's own.
uint64_t ring_attention_staging_bytes(const OpView& op, int32_t ranks) {
  return staged_section_bytes(static_cast<int64_t>(op.input(1).bytes()), ranks);
}
uint64_t ring_attention_gradient_staging_bytes(const OpView& op, int32_t ranks) {
  const DType wide = accumulation_dtype(op.output(1).dtype);
  return staged_section_bytes(op.output(1).shape.elements() * static_cast<int64_t>(size_of(wide)),
                              ranks);
}

// `starts`: which input these are.
KernelChoice choose_context_attention(const OpView& op, const DeviceTraits& device, int starts,
                                      SelectAttention select, StagingRule staging) {
  const bool gradient = starts > 3;
  const AttentionShape shape = context_shape(op.attributes<ContextAttentionAttributes>(),
                                             op.output(0).dtype, op.has_input(starts));
  const AttentionVariant variant = gradient ? gradient_attention_variant(shape, device)
                                            : forward_attention_variant(shape, device);
  KernelChoice choice = choose_attention(op, device, shape, variant, select,
                                         ContextScratch(shape, gradient, variant).bytes());
  const int32_t ranks = staged_ranks(op);
  if (staging != nullptr && ranks > 0) choice.needs.staging = staging(op, ranks);
  return choice;
}
template <SelectAttention kSelect, StagingRule kStaging = nullptr>
KernelChoice choose_context(const OpView& op, const DeviceTraits& device) {
  return choose_context_attention(op, device, 3, kSelect, kStaging);
}
template <SelectAttention kSelect, StagingRule kStaging = nullptr>
KernelChoice choose_context_gradient(const OpView& op, const DeviceTraits& device) {
  return choose_context_attention(op, device, 6, kSelect, kStaging);
}

LinkTraffic links_of_ring_attention(const OpView& op, int32_t ranks) {
  return copied_traffic(static_cast<double>(op.input(1).bytes()), ranks);
}

LinkTraffic links_of_ring_attention_gradient(const OpView& op, int32_t ranks) {
  const auto parts = static_cast<double>(op.output(1).shape.elements()) *
                     static_cast<double>(size_of(accumulation_dtype(op.output(1).dtype)));
  const LinkTraffic keys = copied_traffic(static_cast<double>(op.input(2).bytes()), ranks);
  return {.bytes = keys.bytes + copied_traffic(parts, ranks).bytes, .messages = 2 * keys.messages};
}

RankGroup group_of_ring(const Attributes&) {
  return RankGroup::cp;
}

std::string print_context_attention(const Attributes& attributes) {
  const auto& values = attributes.as<ContextAttentionAttributes>();
  return kAttention.print_attributes(Attributes(values.attention)) +
         fmt::format(" ranks={} rank={}", values.chunks.ranks, values.chunks.rank);
}

std::vector<OpSample> samples_context_attention() {
  // The rows of the whole micro-batch at which a document begins; empty: sequences are not cut.
  using Begins = std::vector<int64_t>;
  const auto attend = [](SampleBuilder& sample, ValueId q, ValueId kv,
                         const ContextAttentionAttributes& attributes, const Begins& begins,
                         int64_t sink_count = 0) {
    const AttentionAttributes& a = attributes.attention;
    const ValueId step = a.probability > 0 ? sample.integers64("step", {1}, {5}) : ValueId{};
    ValueId starts;
    if (!begins.empty()) {
      starts = sample.integers("starts", {own_rows(attributes)},
                               document_starts(a.batch, a.sequence, attributes.chunks, begins));
    }
    ValueId sinks;
    if (sink_count > 0) sinks = sample.tensor("sinks", {sink_count}, {.accumulation = true});
    const auto outputs = sample.builder().emit(kContextAttention, Attributes(attributes),
                                               {q, kv, step, starts, sinks}, "out");
    sample.result(outputs[0]);
    sample.result_without_gradient(outputs[1]);
  };
  const auto with = [=](const AttentionAttributes& attention, int32_t ranks, int32_t rank,
                        const Begins& begins = {}, int64_t sink_count = 0) {
    return [=](SampleBuilder& sample) {
      const ContextAttentionAttributes attributes{attention, {.ranks = ranks, .rank = rank}};
      attend(sample, sample.tensor("q", context_query_shape(attributes)),
             sample.tensor("kv", context_key_shape(attributes, false)), attributes, begins,
             sink_count);
    };
  };
  // For larger sizes: projections of constants, so that there are few elements to differentiate.
  const auto with_projections = [=](const AttentionAttributes& attention, int32_t ranks,
                                    int32_t rank, const Begins& begins = {}) {
    return [=](SampleBuilder& sample) {
      const ContextAttentionAttributes attributes{attention, {.ranks = ranks, .rank = rank}};
      const auto project = [&](const std::string& name, const Shape& shape) {
        SampleBuilder::Options constant;
        constant.differentiable = false;
        const ValueId x = sample.tensor(name + "_x", {shape[0], 2}, constant);
        const ValueId weight = sample.tensor(name + "_weight", {shape[1], 2});
        return linear(sample.builder(), x, weight, LinearOptions(), name);
      };
      attend(sample, project("q", context_query_shape(attributes)),
             project("kv", context_key_shape(attributes, false)), attributes, begins);
    };
  };
  const AttentionAttributes grouped{
      .batch = 2, .sequence = 4, .heads = 4, .groups = 2, .head_dim = 3, .scale = 0.5};
  AttentionAttributes window = grouped;
  window.window = 3;
  AttentionAttributes odd = grouped;  // chunks of three
  odd.sequence = 6;
  AttentionAttributes odd_window = odd;
  odd_window.window = 7;
  AttentionAttributes smaller_values = window;
  smaller_values.value_dim = 2;
  AttentionAttributes dropout = grouped;
  dropout.seed = 3;
  dropout.probability = 0.3;
  dropout.first_head = 4;
  dropout.all_heads = 8;
  // Chunks of 130: two blocks, of which the second one has two rows.
  const AttentionAttributes blocks{
      .sequence = 260, .heads = 2, .groups = 1, .head_dim = 4, .scale = 0.25};
  AttentionAttributes blocks_window = blocks;
  blocks_window.window = 150;
  return {{"one_rank",
           with({.sequence = 5, .heads = 2, .groups = 1, .head_dim = 3, .scale = 0.5}, 1, 0)},
          {"first_of_two", with(grouped, 2, 0)},
          {"second_of_two", with(grouped, 2, 1)},
          {"second_of_three", with(grouped, 3, 1)},
          {"odd_chunks", with(odd, 2, 0)},
          {"odd_chunks_window", with(odd_window, 3, 2)},
          {"smallest", with({.sequence = 2, .head_dim = 2}, 2, 1)},
          {"window", with(window, 2, 1)},
          {"window_of_two", with({.sequence = 4, .head_dim = 3, .scale = 0.5, .window = 2}, 3, 2)},
          {"smaller_values", with(smaller_values, 2, 1)},
          {"dropout", with(dropout, 2, 1)},
          {"sinks", with(smaller_values, 2, 1, {}, 4)},
          {"sinks_documents", with(grouped, 2, 0, {1, 5, 7, 8, 9}, 4)},
          {"several_blocks", with_projections(blocks, 2, 0)},
          {"several_blocks_window", with_projections(blocks_window, 2, 1)},
          // Documents within a chunk, across the border of two, and from the first chunk to the
          // last one.
          {"documents_first_of_two", with(grouped, 2, 0, {1, 5, 7, 8, 9})},
          {"documents_second_of_two", with(grouped, 2, 1, {3, 11})},
          {"documents_second_of_three", with(odd, 3, 1, {2, 4, 13, 17, 20})},
          {"documents_window", with(odd_window, 3, 2, {5, 30})},
          {"documents_dropout", with(dropout, 2, 1, {3, 10})},
          {"documents_several_blocks", with_projections(blocks, 2, 0, {100, 128, 400})},
          {"documents_several_blocks_window", with_projections(blocks_window, 2, 1, {131, 259})}};
}

}  // namespace

ValueId context_attention(Builder& builder, const AttentionHeads& heads,
                          const AttentionExtras& extras,
                          const ContextAttentionAttributes& attributes, const std::string& name) {
  return builder.emit(kContextAttention, Attributes(attributes),
                      {heads.queries, heads.keys, extras.step, extras.starts, extras.sinks},
                      name)[0];
}

ValueId ring_attention(Builder& builder, const AttentionHeads& heads, const AttentionExtras& extras,
                       const ContextAttentionAttributes& attributes, const std::string& name) {
  return builder.emit(kRingAttention, Attributes(attributes),
                      {heads.queries, heads.keys, extras.step, extras.starts, extras.sinks},
                      name)[0];
}

const OpSpec kContextAttention{.name = "context_attention",
                               .infer = infer_context_attention,
                               .differentiate = differentiate_context_attention,
                               .cost = cost_context_attention,
                               .cpu = {.kernel = context_attention_cpu_kernel,
                                       .workspace = workspace_context_attention,
                                       .scratch = scratch_context_attention},
                               .cuda = choose_context<TROUPE_CUDA(context_attention_cuda_kernel)>,
                               .print_attributes = print_context_attention,
                               .samples = samples_context_attention};

const OpSpec kContextAttentionGradient{
    .name = "context_attention_gradient",
    .infer = infer_context_attention_gradient,
    .cost = cost_context_attention_gradient,
    .cpu = {.kernel = context_attention_gradient_cpu_kernel,
            .workspace = workspace_context_attention_gradient,
            .scratch = scratch_context_attention_gradient},
    .cuda = choose_context_gradient<TROUPE_CUDA(context_attention_gradient_cuda_kernel)>,
    .print_attributes = print_context_attention};

const OpSpec kRingAttention{
    .name = "ring_attention",
    .infer = infer_ring_attention,
    .differentiate = differentiate_ring_attention,
    .cost = cost_context_attention,
    .cpu = {.kernel = ring_attention_cpu_kernel,
            .workspace = workspace_ring_attention,
            .scratch = scratch_context_attention},
    .cuda = choose_context<TROUPE_CUDA(ring_attention_cuda_kernel), ring_attention_staging_bytes>,
    .group = group_of_ring,
    .links = links_of_ring_attention,
    .print_attributes = print_context_attention};

const OpSpec kRingAttentionGradient{
    .name = "ring_attention_gradient",
    .infer = infer_ring_attention_gradient,
    .cost = cost_context_attention_gradient,
    .cpu = {.kernel = ring_attention_gradient_cpu_kernel,
            .workspace = workspace_ring_attention_gradient,
            .scratch = scratch_context_attention_gradient},
    .cuda = choose_context_gradient<TROUPE_CUDA(ring_attention_gradient_cuda_kernel),
                                    ring_attention_gradient_staging_bytes>,
    .group = group_of_ring,
    .links = links_of_ring_attention_gradient,
    .print_attributes = print_context_attention};

}  // namespace troupe
