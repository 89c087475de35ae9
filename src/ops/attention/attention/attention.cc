#include "ops/attention/attention/attention.h"

#include <fmt/format.h>

#include "ops/attention/attention/attention_cpu.h"
#include "ops/attention/attention/attention_cuda.h"
#include "ops/attention/attention/attention_mask.h"
#include "ops/attention/attention/document_starts.h"
#include "ops/attention/attention_sinks/attention_sinks.h"
#include "ops/costs.h"
#include "ops/products/linear/linear.h"
#include "program/derivative.h"
#include "program/op_sample.h"

namespace troupe {

CudaKernel attention_cuda_kernel(const OpView& op, AttentionVariant variant);
CudaKernel attention_gradient_cuda_kernel(const OpView& op, AttentionVariant variant);

namespace {

int64_t attention_rows_of(const AttentionAttributes& a) {
  return int64_t{a.batch} * a.sequence;
}

Shape attention_query_shape(const AttentionAttributes& a) {
  return {attention_rows_of(a), a.query_stride()};
}

Shape attention_key_shape(const AttentionAttributes& a) {
  return {attention_rows_of(a), a.key_stride()};
}

Shape attention_out_shape(const AttentionAttributes& a) {
  return {attention_rows_of(a), a.out_row()};
}

Shape attention_lse_shape(const AttentionAttributes& a) {
  return {attention_rows_of(a), int64_t{a.heads}};
}

void check_attention_heads(const InferContext& context, int queries, int keys) {
  const auto& a = context.attributes<AttentionAttributes>();
  TROUPE_CHECK(a.batch >= 1 && a.sequence >= 1 && a.groups >= 1 && a.heads >= a.groups &&
                   a.heads % a.groups == 0 && a.head_dim >= 1 && a.value_dim >= 0 &&
                   a.window >= 0 && a.first_head >= 0 &&
                   (a.all_heads == 0 ? a.first_head == 0 : a.first_head + a.heads <= a.all_heads),
               "attention: attributes");
  const bool fused = context.input_id(queries) == context.input_id(keys);
  TROUPE_CHECK(a.key_column == (fused ? a.query_row() : 0),
               "attention: keys do not begin where the queries end");
  const Value& q = context.input(queries);
  const Value& kv = context.input(keys);
  TROUPE_CHECK(
      is_float(q.dtype) && q.shape == attention_query_shape(a) && !q.rows.valid(),
      "attention: q " + q.shape.to_string() + ", expected " + attention_query_shape(a).to_string());
  TROUPE_CHECK(
      kv.dtype == q.dtype && kv.shape == attention_key_shape(a) && !kv.rows.valid(),
      "attention: kv " + kv.shape.to_string() + ", expected " + attention_key_shape(a).to_string());
}

void check_attention_step(const AttentionAttributes& a, const InferContext& context, int input) {
  TROUPE_CHECK(a.probability >= 0 && a.probability < 1, "attention: probability of dropout");
  TROUPE_CHECK(context.has_input(input) == (a.probability > 0),
               "attention: a step belongs to dropout");
  TROUPE_CHECK(!context.has_input(input) || (context.input(input).dtype == DType::i64 &&
                                             context.input(input).shape == Shape({1})),
               "attention: step is not i64 [1]");
}

void check_attention_starts(const AttentionAttributes& a, const InferContext& context, int input) {
  TROUPE_CHECK(
      !context.has_input(input) || (context.input(input).dtype == DType::i32 &&
                                    context.input(input).shape == Shape({attention_rows_of(a)})),
      "attention: starts are not i32, one for each row");
}

void infer_attention(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 5, "attention: takes q, kv, step, starts and sinks");
  const auto& attributes = context.attributes<AttentionAttributes>();
  const DType dtype = context.input(0).dtype;
  check_attention_heads(context, 0, 1);
  check_attention_step(attributes, context, 2);
  check_attention_starts(attributes, context, 3);
  check_attention_sinks(context, 4, attributes.heads, attributes.first_sink);
  context.output("", dtype, attention_out_shape(attributes));
  context.output("lse", accumulation_dtype(dtype), attention_lse_shape(attributes));
}

void infer_attention_gradient(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 7,
               "attention_gradient: takes d_out, q, kv, out, lse, step and starts");
  const auto& attributes = context.attributes<AttentionAttributes>();
  const Value& d_out = context.input(0);
  const Value& out = context.input(3);
  const Value& lse = context.input(4);
  const DType dtype = context.input(1).dtype;
  check_attention_heads(context, 1, 2);
  check_attention_step(attributes, context, 5);
  check_attention_starts(attributes, context, 6);
  TROUPE_CHECK(
      d_out.dtype == dtype && d_out.shape == attention_out_shape(attributes) &&
          out.dtype == dtype && out.shape == attention_out_shape(attributes),
      "attention_gradient: d_out " + d_out.shape.to_string() + " and out " + out.shape.to_string());
  TROUPE_CHECK(
      lse.dtype == accumulation_dtype(dtype) && lse.shape == attention_lse_shape(attributes),
      "attention_gradient: lse " + lse.shape.to_string());
  context.output("", dtype, attention_query_shape(attributes));
  if (!attributes.is_fused()) context.output("kv", dtype, attention_key_shape(attributes));
}

void differentiate_attention(DerivativeContext& context) {
  TROUPE_CHECK(!context.output_gradient(1).valid(), "attention: no gradient flows through lse");
  const auto& attributes = context.attributes<AttentionAttributes>();
  differentiate_attention_sinks(context, 4,
                                {.heads = attributes.heads,
                                 .value_dim = attributes.value_size(),
                                 .first_sink = attributes.first_sink});
  if (!context.wants(0) && !context.wants(1)) return;
  const auto gradients = context.builder().emit(
      kAttentionGradient, Attributes(attributes),
      {context.output_gradient(0), context.input(0), context.input(1), context.output(0),
       context.output(1), context.input(2), context.input(3)},
      "d_" + context.input_name(0));
  for (size_t i = 0; i < gradients.size(); ++i) {
    const int input = static_cast<int>(i);
    if (context.wants(input)) context.add_gradient(input, gradients[i]);
  }
}

// Pairs of query and visible key, over all sequences and query heads. Where documents end is not
// known here: sequences count as one.
double visible_pairs(const AttentionAttributes& a) {
  return static_cast<double>(a.batch) * a.heads * most_visible_pairs(a.sequence, a.window);
}

double attention_bytes(const Value& value) {
  return static_cast<double>(value.bytes());
}

// Of the rows of queries, keys and values, `first` the queries' tensor among the inputs.
double attention_head_bytes(const OpView& op, int first) {
  const double queries = attention_bytes(op.input(first));
  const bool fused = op.attributes<AttentionAttributes>().is_fused();
  return fused ? queries : queries + attention_bytes(op.input(first + 1));
}

// Two products over the visible pairs; the softmax is not counted.
Cost cost_attention(const OpView& op) {
  const auto& attributes = op.attributes<AttentionAttributes>();
  return product_cost(
      2 * visible_pairs(attributes) * (attributes.head_dim + attributes.value_size()),
      op.input(0).dtype,
      attention_head_bytes(op, 0) + attention_bytes(op.output(0)) + attention_bytes(op.output(1)));
}

// Five products over the visible pairs, three of them with queries or keys. What is read of q and
// kv is written of their gradients.
Cost cost_attention_gradient(const OpView& op) {
  const auto& attributes = op.attributes<AttentionAttributes>();
  return product_cost(
      2 * visible_pairs(attributes) * (3 * attributes.head_dim + 2 * attributes.value_size()),
      op.input(1).dtype,
      attention_bytes(op.input(0)) + 2 * attention_head_bytes(op, 1) +
          attention_bytes(op.input(3)) + attention_bytes(op.input(4)));
}

uint64_t scratch_attention(const OpView& op) {
  return attention_scratch_bytes(op.attributes<AttentionAttributes>(), op.input(0).dtype);
}

uint64_t scratch_attention_gradient(const OpView& op) {
  return attention_gradient_scratch_bytes(op.attributes<AttentionAttributes>(), op.input(1).dtype);
}

uint64_t workspace_attention_gradient(const OpView& op) {
  return attention_gradient_workspace_bytes(op.attributes<AttentionAttributes>(),
                                            op.input(1).dtype);
}

// `starts`: which input these are.
AttentionShape gpu_attention_shape(const OpView& op, int starts) {
  return {.attributes = op.attributes<AttentionAttributes>(),
          .dtype = op.output(0).dtype,
          .documents = op.has_input(starts)};
}

KernelChoice choose_attention_forward(const OpView& op, const DeviceTraits& device) {
  const AttentionShape shape = gpu_attention_shape(op, 3);
  const AttentionVariant variant = forward_attention_variant(shape, device);
  return choose_attention(op, device, shape, variant, TROUPE_CUDA(attention_cuda_kernel),
                          attention_call_scratch_bytes(shape, variant));
}

KernelChoice choose_attention_gradient(const OpView& op, const DeviceTraits& device) {
  const AttentionShape shape = gpu_attention_shape(op, 6);
  const AttentionVariant variant = gradient_attention_variant(shape, device);
  return choose_attention(op, device, shape, variant, TROUPE_CUDA(attention_gradient_cuda_kernel),
                          attention_gradient_call_scratch_bytes(shape, variant));
}

std::string print_attention(const Attributes& attributes) {
  const auto& a = attributes.as<AttentionAttributes>();
  std::string text =
      fmt::format("batch={} sequence={} heads={} groups={} head_dim={} scale={:.6g} window={}",
                  a.batch, a.sequence, a.heads, a.groups, a.head_dim, a.scale, a.window);
  if (a.first_sink > 0) text += fmt::format(" first_sink={}", a.first_sink);
  if (a.value_dim > 0) text += fmt::format(" value_dim={}", a.value_dim);
  if (a.is_fused()) text += fmt::format(" key_column={}", a.key_column);
  if (a.probability > 0) {
    text += fmt::format(" seed={} substream={} probability={}", a.seed, a.substream, a.probability);
    if (a.all_heads > 0) text += fmt::format(" first_head={} of={}", a.first_head, a.all_heads);
  }
  return text;
}

std::vector<OpSample> samples_attention() {
  // The rows of the micro-batch at which a document begins; empty: sequences are not cut.
  using Begins = std::vector<int64_t>;
  const auto attend = [](SampleBuilder& sample, const AttentionHeads& heads,
                         AttentionAttributes attributes, const Begins& begins,
                         int64_t sink_count = 0) {
    const ValueId step =
        attributes.probability > 0 ? sample.integers64("step", {1}, {5}) : ValueId{};
    ValueId starts;
    if (!begins.empty()) {
      const auto of_rows = document_starts(attributes.batch, attributes.sequence, {}, begins);
      starts = sample.integers("starts", {attention_rows_of(attributes)}, of_rows);
    }
    ValueId sinks;
    if (sink_count > 0) sinks = sample.tensor("sinks", {sink_count}, {.accumulation = true});
    if (heads.are_fused()) attributes = attributes.fused();
    const auto outputs =
        sample.builder().emit(kAttention, Attributes(attributes),
                              {heads.queries, heads.keys, step, starts, sinks}, "out");
    sample.result(outputs[0]);
    sample.result_without_gradient(outputs[1]);
  };
  const auto fused_shape = [](const AttentionAttributes& a) {
    return attention_query_shape(a.fused());
  };
  const auto with = [=](const AttentionAttributes& attributes, const Begins& begins = {}) {
    return [=](SampleBuilder& sample) {
      const ValueId qkv = sample.tensor("qkv", fused_shape(attributes));
      attend(sample, {qkv, qkv}, attributes, begins);
    };
  };
  // Queries with a tensor of their own.
  const auto with_own_queries = [=](const AttentionAttributes& attributes,
                                    const Begins& begins = {}) {
    return [=](SampleBuilder& sample) {
      const ValueId q = sample.tensor("q", attention_query_shape(attributes));
      const ValueId kv = sample.tensor("kv", attention_key_shape(attributes));
      attend(sample, {q, kv}, attributes, begins);
    };
  };
  // For larger sizes: a projection of constants, so that there are few elements to differentiate.
  const auto with_projection = [=](const AttentionAttributes& attributes,
                                   const Begins& begins = {}) {
    return [=](SampleBuilder& sample) {
      const Shape shape = fused_shape(attributes);
      SampleBuilder::Options constant;
      constant.differentiable = false;
      const ValueId x = sample.tensor("x", {shape[0], 2}, constant);
      const ValueId weight = sample.tensor("weight", {shape[1], 2});
      const ValueId qkv = linear(sample.builder(), x, weight, LinearOptions(), "qkv");
      attend(sample, {qkv, qkv}, attributes, begins);
    };
  };
  const auto with_sinks = [=](const AttentionAttributes& attributes, int64_t sink_count,
                              const Begins& begins = {}) {
    return [=](SampleBuilder& sample) {
      const ValueId qkv = sample.tensor("qkv", fused_shape(attributes));
      attend(sample, {qkv, qkv}, attributes, begins, sink_count);
    };
  };
  const AttentionAttributes packed{
      .batch = 2, .sequence = 11, .heads = 4, .groups = 2, .head_dim = 4, .scale = 0.5};
  AttentionAttributes packed_window = packed;
  packed_window.window = 3;
  AttentionAttributes packed_dropout = packed_window;
  packed_dropout.seed = 3;
  packed_dropout.probability = 0.2;
  // Sequences longer than 128 have several blocks; 257 leaves a last block of one query.
  return {
      {"one_token", with({.head_dim = 4, .scale = 0.5})},
      {"multi_head", with({.sequence = 9, .heads = 3, .groups = 3, .head_dim = 4, .scale = 0.5})},
      {"grouped",
       with({.batch = 2, .sequence = 7, .heads = 4, .groups = 2, .head_dim = 5, .scale = 0.45})},
      {"one_group", with({.sequence = 13, .heads = 4, .groups = 1, .head_dim = 3, .scale = 0.6})},
      {"smaller_values", with({.batch = 2,
                               .sequence = 9,
                               .heads = 4,
                               .groups = 2,
                               .head_dim = 5,
                               .value_dim = 3,
                               .scale = 0.45,
                               .window = 6})},
      {"own_queries", with_own_queries({.batch = 2,
                                        .sequence = 9,
                                        .heads = 4,
                                        .groups = 4,
                                        .head_dim = 5,
                                        .value_dim = 3,
                                        .scale = 0.45})},
      {"own_queries_grouped",
       with_own_queries({.batch = 2, .sequence = 7, .heads = 4, .groups = 2, .head_dim = 8},
                        {3, 9})},
      {"larger_values",
       with({.sequence = 7, .heads = 2, .groups = 2, .head_dim = 2, .value_dim = 5, .scale = 0.6})},
      {"several_blocks_smaller_values", with_projection({.batch = 2,
                                                         .sequence = 261,
                                                         .heads = 4,
                                                         .groups = 4,
                                                         .head_dim = 6,
                                                         .value_dim = 4,
                                                         .scale = 0.4})},
      {"window", with({.batch = 2,
                       .sequence = 11,
                       .heads = 2,
                       .groups = 1,
                       .head_dim = 4,
                       .scale = 0.5,
                       .window = 4})},
      {"window_of_one", with({.sequence = 5, .head_dim = 3, .window = 1})},
      {"window_beyond_sequence", with({.sequence = 6, .head_dim = 3, .window = 50})},
      {"several_blocks", with({.sequence = 257, .head_dim = 1, .scale = 1.5})},
      {"several_blocks_window", with({.sequence = 271, .head_dim = 1, .scale = 1.5, .window = 70})},
      {"several_blocks_grouped",
       with_projection(
           {.batch = 2, .sequence = 261, .heads = 4, .groups = 2, .head_dim = 6, .scale = 0.4})},
      {"several_blocks_grouped_window", with_projection({.batch = 2,
                                                         .sequence = 300,
                                                         .heads = 4,
                                                         .groups = 2,
                                                         .head_dim = 6,
                                                         .scale = 0.4,
                                                         .window = 150})},
      {"dropout", with({.batch = 2,
                        .sequence = 7,
                        .heads = 4,
                        .groups = 2,
                        .head_dim = 5,
                        .scale = 0.45,
                        .substream = 3,
                        .seed = 1,
                        .probability = 0.3})},
      {"dropout_window", with({.batch = 2,
                               .sequence = 11,
                               .heads = 2,
                               .groups = 1,
                               .head_dim = 4,
                               .scale = 0.5,
                               .window = 4,
                               .seed = 2,
                               .probability = 0.1})},
      {"dropout_of_some_heads", with({.batch = 2,
                                      .sequence = 6,
                                      .heads = 2,
                                      .groups = 1,
                                      .head_dim = 3,
                                      .scale = 0.5,
                                      .seed = 2,
                                      .probability = 0.3,
                                      .first_head = 2,
                                      .all_heads = 6})},
      {"dropout_one_token", with({.head_dim = 4, .scale = 0.5, .seed = 3, .probability = 0.25})},
      {"dropout_several_blocks", with_projection({.batch = 2,
                                                  .sequence = 261,
                                                  .heads = 4,
                                                  .groups = 2,
                                                  .head_dim = 6,
                                                  .scale = 0.4,
                                                  .window = 150,
                                                  .seed = 4,
                                                  .probability = 0.2})},
      {"sinks", with_sinks({.batch = 2,
                            .sequence = 7,
                            .heads = 4,
                            .groups = 2,
                            .head_dim = 5,
                            .value_dim = 3,
                            .scale = 0.45},
                           4)},
      {"sinks_of_some_heads", with_sinks({.sequence = 9,
                                          .heads = 2,
                                          .groups = 1,
                                          .head_dim = 4,
                                          .scale = 0.5,
                                          .window = 4,
                                          .seed = 2,
                                          .probability = 0.2,
                                          .first_sink = 3},
                                         6)},
      {"sinks_documents", with_sinks(packed, 4, {1, 4, 5, 10, 15, 21})},
      // Documents of one token at either end of a sequence, and beside each other.
      {"documents", with(packed, {1, 4, 5, 10, 15, 21})},
      {"documents_window", with(packed_window, {2, 8, 12, 13})},
      {"documents_dropout", with(packed_dropout, {6, 18})},
      {"one_document", with({.sequence = 6, .head_dim = 3}, {0})},
      // Documents that end with a block, after its first token and before its last one, and that
      // are several blocks.
      {"documents_several_blocks",
       with_projection(
           {.batch = 2, .sequence = 390, .heads = 2, .groups = 1, .head_dim = 6, .scale = 0.4},
           {128, 257, 383, 391, 700})},
      {"documents_several_blocks_window", with_projection({.batch = 2,
                                                           .sequence = 390,
                                                           .heads = 2,
                                                           .groups = 1,
                                                           .head_dim = 6,
                                                           .scale = 0.4,
                                                           .window = 130},
                                                          {100, 128, 384, 646})}};
}

}  // namespace

ValueId attention(Builder& builder, const AttentionHeads& heads, const AttentionExtras& extras,
                  const AttentionAttributes& attributes, const std::string& name) {
  return builder.emit(kAttention, Attributes(heads.are_fused() ? attributes.fused() : attributes),
                      {heads.queries, heads.keys, extras.step, extras.starts, extras.sinks},
                      name)[0];
}

const OpSpec kAttention{.name = "attention",
                        .infer = infer_attention,
                        .differentiate = differentiate_attention,
                        .cost = cost_attention,
                        .cpu = {.kernel = attention_cpu_kernel, .scratch = scratch_attention},
                        .cuda = choose_attention_forward,
                        .print_attributes = print_attention,
                        .samples = samples_attention};

const OpSpec kAttentionGradient{.name = "attention_gradient",
                                .infer = infer_attention_gradient,
                                .cost = cost_attention_gradient,
                                .cpu = {.kernel = attention_gradient_cpu_kernel,
                                        .workspace = workspace_attention_gradient,
                                        .scratch = scratch_attention_gradient},
                                .cuda = choose_attention_gradient,
                                .print_attributes = print_attention};

}  // namespace troupe
