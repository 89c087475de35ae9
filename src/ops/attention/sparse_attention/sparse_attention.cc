#include "ops/attention/sparse_attention/sparse_attention.h"

#include <fmt/format.h>
#include <vector>

#include "ops/attention/sparse_attention/choice_samples.h"
#include "ops/attention/sparse_attention/cuda/latent_tiles.h"
#include "ops/attention/sparse_attention/sparse_attention_cpu.h"
#include "ops/choose_kernel.h"
#include "ops/costs.h"
#include "program/derivative.h"
#include "program/op_sample.h"

namespace troupe {

CudaKernel sparse_attention_cuda_kernel(const OpView& op);
CudaKernel sparse_attention_gradient_cuda_kernel(const OpView& op);

namespace {

// `first`: the input that is q; k and chosen follow it.
void check_sparse_attention(const InferContext& context, int first) {
  const auto& a = context.attributes<SparseAttentionAttributes>();
  TROUPE_CHECK(a.batch >= 1 && a.sequence >= 1 && a.heads >= 1 && a.value_dim >= 1 &&
                   a.key_dim >= a.value_dim && (a.chunks.ranks == 1 || a.sequence % 2 == 0),
               "sparse_attention: attributes");
  const KeyRows rows = a.rows();
  const Value& q = context.input(first);
  const Value& k = context.input(first + 1);
  const Value& chosen = context.input(first + 2);
  TROUPE_CHECK(is_float(q.dtype) && k.dtype == q.dtype && !q.rows.valid() && !k.rows.valid() &&
                   q.shape == Shape({rows.queries(), int64_t{a.heads} * a.key_dim}) &&
                   k.shape == Shape({rows.keys(), int64_t{a.key_dim}}),
               "sparse_attention: q " + q.shape.to_string() + " and k " + k.shape.to_string());
  TROUPE_CHECK(chosen.dtype == DType::i32 && chosen.shape.rank() == 2 &&
                   chosen.shape[0] == rows.queries() && chosen.shape[1] <= rows.sequence(),
               "sparse_attention: chosen " + chosen.shape.to_string());
}

Shape sparse_attention_out_shape(const SparseAttentionAttributes& a) {
  return {a.rows().queries(), int64_t{a.heads} * a.value_dim};
}

void infer_sparse_attention(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 3, "sparse_attention: takes q, k and chosen");
  const auto& a = context.attributes<SparseAttentionAttributes>();
  check_sparse_attention(context, 0);
  const DType dtype = context.input(0).dtype;
  context.output("", dtype, sparse_attention_out_shape(a));
  context.output("lse", accumulation_dtype(dtype), {a.rows().queries(), int64_t{a.heads}});
}

void infer_sparse_attention_gradient(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 6,
               "sparse_attention_gradient: takes d_out, q, k, chosen, out and lse");
  const auto& a = context.attributes<SparseAttentionAttributes>();
  check_sparse_attention(context, 1);
  const DType dtype = context.input(1).dtype;
  for (const int input : {0, 4}) {
    TROUPE_CHECK(context.input(input).dtype == dtype &&
                     context.input(input).shape == sparse_attention_out_shape(a),
                 "sparse_attention_gradient: " + context.input(input).name);
  }
  TROUPE_CHECK(context.input(5).dtype == accumulation_dtype(dtype) &&
                   context.input(5).shape == Shape({a.rows().queries(), int64_t{a.heads}}),
               "sparse_attention_gradient: lse");
  const Shape keys = context.input(2).shape;
  context.output("", dtype, context.input(1).shape);
  context.output("keys", dtype, keys);
}

void differentiate_sparse_attention(DerivativeContext& context) {
  TROUPE_CHECK(!context.output_gradient(1).valid(), "sparse_attention: no gradient through lse");
  if (!context.wants(0) && !context.wants(1)) return;
  const auto gradients = context.builder().emit(
      kSparseAttentionGradient, Attributes(context.attributes<SparseAttentionAttributes>()),
      {context.output_gradient(0), context.input(0), context.input(1), context.input(2),
       context.output(0), context.output(1)},
      "d_" + context.input_name(0));
  for (const int input : {0, 1}) {
    if (context.wants(input)) context.add_gradient(input, gradients[static_cast<size_t>(input)]);
  }
}

// Pairs of a query head and a chosen key: those of whole sequences, spread evenly over the ranks.
double sparse_pairs(const SparseAttentionAttributes& a, const Value& chosen) {
  return most_chosen_pairs(a.rows().sequence(), chosen.shape[1]) / a.chunks.ranks * a.batch *
         a.heads;
}

double sparse_attention_bytes(const OpView& op, int inputs) {
  double bytes = 0;
  for (int i = 0; i < inputs; ++i) bytes += static_cast<double>(op.input(i).bytes());
  for (int i = 0; i < 2; ++i) bytes += static_cast<double>(op.output(i).bytes());
  return bytes;
}

Cost cost_sparse_attention(const OpView& op) {
  const auto& a = op.attributes<SparseAttentionAttributes>();
  return product_cost(2 * sparse_pairs(a, op.input(2)) * (a.key_dim + a.value_dim),
                      op.input(0).dtype, sparse_attention_bytes(op, 3));
}

Cost cost_sparse_attention_gradient(const OpView& op) {
  const auto& a = op.attributes<SparseAttentionAttributes>();
  return product_cost(2 * sparse_pairs(a, op.input(3)) * (3 * a.key_dim + 2 * a.value_dim),
                      op.input(1).dtype, sparse_attention_bytes(op, 6));
}

uint64_t scratch_sparse_attention(const OpView& op) {
  return sparse_attention_scratch_bytes(op.attributes<SparseAttentionAttributes>(),
                                        op.input(2).shape[1], op.input(0).dtype);
}

uint64_t scratch_sparse_attention_gradient(const OpView& op) {
  return sparse_attention_gradient_scratch_bytes(op.attributes<SparseAttentionAttributes>(),
                                                 op.input(3).shape[1], op.input(1).dtype);
}

uint64_t workspace_sparse_attention_gradient(const OpView& op) {
  return sparse_attention_gradient_workspace_bytes(op.attributes<SparseAttentionAttributes>(),
                                                   op.input(1).dtype);
}

// Why tensor cores cannot do it.
SlowKernel slow_latent_tiles(const SparseAttentionAttributes& a, DType dtype,
                             const DeviceTraits& device) {
  if (dtype != DType::bf16) return SlowKernel::dtype;
  if (a.key_dim != kLatentKeyDim || a.value_dim != kLatentValueDim) return SlowKernel::head_size;
  return device.major() == 9 ? SlowKernel::no : SlowKernel::compute_capability;
}

uint64_t latent_gradient_scratch_bytes(const OpView& op) {
  return latent_sum_bytes(op.attributes<SparseAttentionAttributes>().rows());
}

template <SelectCudaKernel kPlain, SelectCudaKernel kTiles, ScratchRule kTilesScratch>
KernelChoice choose_sparse_attention(const OpView& op, const DeviceTraits& device) {
  const SlowKernel slow =
      slow_latent_tiles(op.attributes<SparseAttentionAttributes>(), op.output(0).dtype, device);
  if (slow == SlowKernel::no) return make_choice(op, device, "tiles", kTiles, kTilesScratch);
  KernelChoice choice = make_choice(op, device, "plain", kPlain);
  choice.slow = slow;
  return choice;
}

std::string print_sparse_attention(const Attributes& attributes) {
  const auto& a = attributes.as<SparseAttentionAttributes>();
  return fmt::format("batch={} sequence={} heads={} key_dim={} value_dim={} scale={:.6g}{}",
                     a.batch, a.sequence, a.heads, a.key_dim, a.value_dim, a.scale,
                     text_of(RowOrigin{.chunks = a.chunks}));
}

std::vector<OpSample> samples_sparse_attention() {
  // Chosen are the own key of a query and every `stride`-th one before it.
  const auto attend = [](const SparseAttentionAttributes& a, int64_t most, int64_t stride) {
    return [=](SampleBuilder& sample) {
      const KeyRows rows = a.rows();
      const ValueId q = sample.tensor("q", {rows.queries(), int64_t{a.heads} * a.key_dim});
      const ValueId k = sample.tensor("k", {rows.keys(), int64_t{a.key_dim}});
      const ValueId chosen =
          sample.integers("chosen", {rows.queries(), most}, strided_choice(rows, most, stride));
      sample.result(sparse_attention(sample.builder(), q, k, chosen, a, "out"));
    };
  };
  const SparseAttentionAttributes small{
      .batch = 2, .sequence = 5, .heads = 3, .key_dim = 6, .value_dim = 4, .scale = 0.4};
  return {
      {"every other key", attend(small, 3, 2)},
      {"all keys", attend(small, 5, 1)},
      {"two keys", attend({.sequence = 4, .heads = 2, .key_dim = 5, .value_dim = 5}, 2, 1)},
      {"of one rank of two", attend({.batch = 2,
                                     .sequence = 4,
                                     .heads = 2,
                                     .key_dim = 8,
                                     .value_dim = 8,
                                     .scale = 0.3,
                                     .chunks = {.ranks = 2, .rank = 1}},
                                    4, 2)},
      {"several pieces",
       attend({.batch = 2, .sequence = 24, .heads = 2, .key_dim = 4, .value_dim = 2, .scale = 0.5},
              7, 3)}};
}

}  // namespace

ValueId sparse_attention(Builder& builder, ValueId q, ValueId k, ValueId chosen,
                         const SparseAttentionAttributes& attributes, const std::string& name) {
  return builder.emit(kSparseAttention, Attributes(attributes), {q, k, chosen}, name)[0];
}

const OpSpec kSparseAttention{
    .name = "sparse_attention",
    .infer = infer_sparse_attention,
    .differentiate = differentiate_sparse_attention,
    .cost = cost_sparse_attention,
    .cpu = {.kernel = sparse_attention_cpu_kernel, .scratch = scratch_sparse_attention},
    .cuda = choose_sparse_attention<TROUPE_CUDA(sparse_attention_cuda_kernel),
                                    TROUPE_CUDA(sparse_attention_latent_kernel), nullptr>,
    .print_attributes = print_sparse_attention,
    .samples = samples_sparse_attention};

const OpSpec kSparseAttentionGradient{
    .name = "sparse_attention_gradient",
    .infer = infer_sparse_attention_gradient,
    .cost = cost_sparse_attention_gradient,
    .cpu = {.kernel = sparse_attention_gradient_cpu_kernel,
            .workspace = workspace_sparse_attention_gradient,
            .scratch = scratch_sparse_attention_gradient},
    .cuda = choose_sparse_attention<TROUPE_CUDA(sparse_attention_gradient_cuda_kernel),
                                    TROUPE_CUDA(sparse_attention_latent_gradient_kernel),
                                    latent_gradient_scratch_bytes>,
    .print_attributes = print_sparse_attention};

}  // namespace troupe
