#include "ops/norms/gated_norm/gated_norm.h"

#include <fmt/format.h>
#include <vector>

#include "ops/choose_kernel.h"
#include "ops/cpu/row_sums.h"
#include "ops/norms/gated_norm/gated_norm_pieces.h"
#include "program/derivative.h"
#include "program/op_sample.h"

namespace troupe {

CpuKernel gated_norm_cpu_kernel(const OpView& op);
CpuKernel gated_norm_gradient_cpu_kernel(const OpView& op);
CpuKernel gated_norm_weight_gradient_cpu_kernel(const OpView& op);
CudaKernel gated_norm_cuda_kernel(const OpView& op);
CudaKernel gated_norm_gradient_cuda_kernel(const OpView& op);
CudaKernel gated_norm_weight_gradient_cuda_kernel(const OpView& op);

namespace {

// Inputs of the shape of x, from 0 to `last`.
void check_gated_norm(const InferContext& context, int last) {
  const Value& x = context.input(0);
  const int64_t head_dim = context.attributes<GatedNormAttributes>().head_dim;
  TROUPE_CHECK(is_float(x.dtype) && x.shape.rank() == 2 && !x.rows.valid() && head_dim > 0 &&
                   x.shape[1] % head_dim == 0,
               "gated_norm: x is not [T, H d]: " + x.name + " " + x.shape.to_string());
  for (int i = 1; i <= last; ++i) {
    const Value& other = context.input(i);
    TROUPE_CHECK(other.dtype == x.dtype && other.shape == x.shape && !other.rows.valid(),
                 "gated_norm: " + other.name + " differs in type from " + x.name);
  }
}

void check_gain(const InferContext& context, int input) {
  const Value& gamma = context.input(input);
  TROUPE_CHECK(gamma.dtype == accumulation_dtype(context.input(0).dtype) &&
                   gamma.shape == Shape({context.attributes<GatedNormAttributes>().head_dim}),
               "gated_norm: gamma is not [d] in the accumulation dtype: " + gamma.name);
}

void infer_gated_norm(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 3, "gated_norm: takes x, z and gamma");
  check_gated_norm(context, 1);
  check_gain(context, 2);
  const Value x = context.input(0);
  context.output("", x.dtype, x.shape);
}

void infer_gated_norm_gradient(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 4, "gated_norm_gradient: takes dy, x, z and gamma");
  check_gated_norm(context, 2);
  check_gain(context, 3);
  const Value x = context.input(1);
  context.output("", x.dtype, x.shape);
  context.output("d_gate", x.dtype, x.shape);
}

void infer_gated_norm_weight_gradient(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 4, "gated_norm_weight_gradient: takes dy, x, z and target");
  check_gated_norm(context, 2);
  declare_weight_gradient(context, 3, "", accumulation_dtype(context.input(1).dtype),
                          {context.attributes<GatedNormAttributes>().head_dim});
}

void differentiate_gated_norm(DerivativeContext& context) {
  Builder& builder = context.builder();
  GatedNormAttributes attributes = context.attributes<GatedNormAttributes>();
  const ValueId dy = context.output_gradient(0);
  // First: the other may be stored over dy.
  if (context.wants(2)) {
    const auto target = context.weight_target(2);
    GatedNormAttributes of_gain = attributes;
    of_gain.accumulate = target.accumulate;
    context.add_weight_gradient(
        2, builder.emit(kGatedNormWeightGradient, Attributes(of_gain),
                        {dy, context.input(0), context.input(1), target.target},
                        "d_" + context.input_name(2))[0]);
  }
  if (!context.wants(0) && !context.wants(1)) return;
  const auto gradients = builder.emit(kGatedNormGradient, Attributes(attributes),
                                      {dy, context.input(0), context.input(1), context.input(2)},
                                      "d_" + context.input_name(0));
  if (context.wants(0)) context.add_gradient(0, gradients[0]);
  if (context.wants(1)) context.add_gradient(1, gradients[1]);
}

Cost cost_gated_norm(const OpView& op) {
  return {.flops = 9 * static_cast<double>(op.input(0).shape.elements()),
          .bytes = 3 * static_cast<double>(op.input(0).bytes())};
}

Cost cost_gated_norm_gradient(const OpView& op) {
  return {.flops = 22 * static_cast<double>(op.input(0).shape.elements()),
          .bytes = 5 * static_cast<double>(op.input(0).bytes())};
}

Cost cost_gated_norm_weight_gradient(const OpView& op) {
  return {.flops = 10 * static_cast<double>(op.input(0).shape.elements()),
          .bytes = 3 * static_cast<double>(op.input(0).bytes())};
}

uint64_t workspace_gated_norm_weight_gradient(const OpView& op) {
  const Shape& shape = op.input(0).shape;
  return static_cast<uint64_t>(row_pieces(shape[0], shape[1]).count) * op.output(0).bytes();
}

uint64_t gated_norm_scratch_bytes(const OpView& op) {
  const int64_t head_dim = op.attributes<GatedNormAttributes>().head_dim;
  return static_cast<uint64_t>(gated_norm_pieces(op.input(0).shape.elements() / head_dim) *
                               head_dim) *
         size_of(accumulation_dtype(op.input(0).dtype));
}

std::string print_gated_norm(const Attributes& attributes) {
  const auto& values = attributes.as<GatedNormAttributes>();
  return fmt::format("head_dim={} epsilon={}{}", values.head_dim, values.epsilon,
                     values.accumulate ? " accumulate=1" : "");
}

std::vector<OpSample> samples_gated_norm() {
  const auto norm = [](int64_t rows, int64_t heads, int64_t head_dim, double epsilon,
                       bool constant = false) {
    return [=](SampleBuilder& sample) {
      const SampleBuilder::Options options{.differentiable = !constant};
      const ValueId x = sample.tensor("x", {rows, heads * head_dim}, options);
      const ValueId z = sample.tensor("z", {rows, heads * head_dim}, options);
      const ValueId gamma = sample.tensor("gamma", {head_dim}, {.accumulation = true});
      sample.result(gated_norm(sample.builder(), x, z, gamma,
                               {.head_dim = head_dim, .epsilon = epsilon}, "y"));
    };
  };
  // One gain for two norms: the second gradient is added to the first.
  const auto chain = [](SampleBuilder& sample) {
    const ValueId x = sample.tensor("x", {3, 10});
    const ValueId z = sample.tensor("z", {3, 10});
    const ValueId gamma = sample.tensor("gamma", {5}, {.accumulation = true});
    const GatedNormAttributes attributes{.head_dim = 5, .epsilon = 0.01};
    const ValueId once = gated_norm(sample.builder(), x, z, gamma, attributes, "once");
    sample.result(gated_norm(sample.builder(), once, z, gamma, attributes, "y"));
  };
  return {{"three heads", norm(4, 3, 7, 1e-6)},
          {"one by one", norm(1, 1, 1, 0.5)},
          {"wider than a warp", norm(2, 2, 40, 1e-3)},
          {"chain", chain},
          {"several pieces", norm(900, 2, 33, 1e-6, true)}};
}

}  // namespace

ValueId gated_norm(Builder& builder, ValueId x, ValueId gate, ValueId gamma,
                   const GatedNormAttributes& attributes, const std::string& name) {
  return builder.emit(kGatedNorm, Attributes(attributes), {x, gate, gamma}, name)[0];
}

const OpSpec kGatedNorm{.name = "gated_norm",
                        .infer = infer_gated_norm,
                        .differentiate = differentiate_gated_norm,
                        .cost = cost_gated_norm,
                        .cpu = {.kernel = gated_norm_cpu_kernel},
                        .cuda = only_kernel<TROUPE_CUDA(gated_norm_cuda_kernel)>,
                        .print_attributes = print_gated_norm,
                        .samples = samples_gated_norm};

const OpSpec kGatedNormGradient{.name = "gated_norm_gradient",
                                .infer = infer_gated_norm_gradient,
                                .cost = cost_gated_norm_gradient,
                                .cpu = {.kernel = gated_norm_gradient_cpu_kernel},
                                .cuda = only_kernel<TROUPE_CUDA(gated_norm_gradient_cuda_kernel)>,
                                .in_place = {.output = 0, .input = 0},
                                .print_attributes = print_gated_norm};

const OpSpec kGatedNormWeightGradient{
    .name = "gated_norm_weight_gradient",
    .infer = infer_gated_norm_weight_gradient,
    .cost = cost_gated_norm_weight_gradient,
    .cpu = {.kernel = gated_norm_weight_gradient_cpu_kernel,
            .workspace = workspace_gated_norm_weight_gradient},
    .cuda =
        only_kernel<TROUPE_CUDA(gated_norm_weight_gradient_cuda_kernel), gated_norm_scratch_bytes>,
    .print_attributes = print_gated_norm};

}  // namespace troupe
