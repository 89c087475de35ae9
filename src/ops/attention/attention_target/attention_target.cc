#include "ops/attention/attention_target/attention_target.h"

#include <fmt/format.h>
#include <vector>

#include "ops/attention/attention/document_starts.h"
#include "ops/attention/sparse_attention/choice_samples.h"
#include "ops/choose_kernel.h"
#include "ops/costs.h"
#include "program/op_sample.h"

namespace troupe {

CpuKernel attention_target_cpu_kernel(const OpView& op);
uint64_t attention_target_scratch_bytes(const OpView& op);
CudaKernel attention_target_cuda_kernel(const OpView& op);

namespace {

void infer_attention_target(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 4, "attention_target: takes q, k, chosen and starts");
  const auto& a = context.attributes<SparseAttentionAttributes>();
  const KeyRows rows = a.rows();
  const Value q = context.input(0);
  const Value k = context.input(1);
  TROUPE_CHECK(is_float(q.dtype) && k.dtype == q.dtype && !q.rows.valid() && !k.rows.valid() &&
                   q.shape == Shape({rows.queries(), int64_t{a.heads} * a.key_dim}) &&
                   k.shape == Shape({rows.keys(), int64_t{a.key_dim}}),
               "attention_target: q " + q.shape.to_string() + " and k " + k.shape.to_string());
  TROUPE_CHECK(!context.has_input(2) || !context.has_input(3),
               "attention_target: starts say nothing about a choice");
  int64_t keys = rows.sequence();
  if (context.has_input(2)) {
    const Value& chosen = context.input(2);
    TROUPE_CHECK(chosen.dtype == DType::i32 && chosen.shape.rank() == 2 &&
                     chosen.shape[0] == rows.queries() && chosen.shape[1] <= keys,
                 "attention_target: chosen " + chosen.shape.to_string());
    keys = chosen.shape[1];
  }
  TROUPE_CHECK(!context.has_input(3) || (context.input(3).dtype == DType::i32 &&
                                         context.input(3).shape == Shape({rows.queries()})),
               "attention_target: starts are not i32, one for each row");
  context.output("", accumulation_dtype(q.dtype), {rows.queries(), keys});
}

Cost cost_attention_target(const OpView& op) {
  const auto& a = op.attributes<SparseAttentionAttributes>();
  const double pairs = most_chosen_pairs(a.rows().sequence(), op.output(0).shape[1]) /
                       a.chunks.ranks * a.batch * a.heads;
  return product_cost(
      2 * pairs * a.key_dim, op.input(0).dtype,
      static_cast<double>(op.input(0).bytes() + op.input(1).bytes() + op.output(0).bytes()));
}

std::string print_attention_target(const Attributes& attributes) {
  const auto& a = attributes.as<SparseAttentionAttributes>();
  return fmt::format("batch={} sequence={} heads={} key_dim={} scale={:.6g}{}", a.batch, a.sequence,
                     a.heads, a.key_dim, a.scale, text_of(RowOrigin{.chunks = a.chunks}));
}

std::vector<OpSample> samples_attention_target() {
  // `most`: chosen keys of a query; 0: all that it sees.
  const auto target = [](const SparseAttentionAttributes& a, int64_t most, bool documents) {
    return [=](SampleBuilder& sample) {
      const KeyRows rows = a.rows();
      const SampleBuilder::Options constant{.differentiable = false};
      ValueId chosen;
      ValueId starts;
      if (most > 0) {
        chosen = sample.integers("chosen", {rows.queries(), most}, strided_choice(rows, most, 2));
      }
      if (documents) {
        starts = sample.integers("starts", {rows.queries()},
                                 document_starts(a.batch, a.sequence, a.chunks, {2, 3}));
      }
      sample.result_without_gradient(attention_target(
          sample.builder(),
          sample.tensor("q", {rows.queries(), int64_t{a.heads} * a.key_dim}, constant),
          sample.tensor("k", {rows.keys(), int64_t{a.key_dim}}, constant), chosen, starts, a,
          "target"));
    };
  };
  const SparseAttentionAttributes small{
      .batch = 2, .sequence = 7, .heads = 3, .key_dim = 6, .scale = 0.4};
  const SparseAttentionAttributes of_two{.batch = 2,
                                         .sequence = 4,
                                         .heads = 2,
                                         .key_dim = 5,
                                         .scale = 0.3,
                                         .chunks = {.ranks = 2, .rank = 1}};
  return {{"chosen keys", target(small, 3, false)},
          {"all keys", target(small, 0, false)},
          {"all keys of documents", target(small, 0, true)},
          {"chosen keys of two ranks", target(of_two, 4, false)},
          {"all keys of two ranks", target(of_two, 0, false)}};
}

}  // namespace

ValueId attention_target(Builder& builder, ValueId q, ValueId k, ValueId chosen, ValueId starts,
                         const SparseAttentionAttributes& attributes, const std::string& name) {
  return builder.emit(kAttentionTarget, Attributes(attributes), {q, k, chosen, starts}, name)[0];
}

const OpSpec kAttentionTarget{
    .name = "attention_target",
    .infer = infer_attention_target,
    .cost = cost_attention_target,
    .cpu = {.kernel = attention_target_cpu_kernel, .scratch = attention_target_scratch_bytes},
    .cuda = only_kernel<TROUPE_CUDA(attention_target_cuda_kernel)>,
    .print_attributes = print_attention_target,
    .samples = samples_attention_target};

}  // namespace troupe
