#include "ops/norms/rms_norm/rms_norm.h"

#include <fmt/format.h>

#include "ops/choose_kernel.h"
#include "ops/cpu/row_sums.h"
#include "ops/row_sum_pieces.h"
#include "program/derivative.h"
#include "program/op_sample.h"

namespace troupe {

CpuKernel rms_norm_cpu_kernel(const OpView& op);
CpuKernel rms_norm_gradient_cpu_kernel(const OpView& op);
CpuKernel rms_norm_weight_gradient_cpu_kernel(const OpView& op);
CudaKernel rms_norm_cuda_kernel(const OpView& op);
CudaKernel rms_norm_gradient_cuda_kernel(const OpView& op);
CudaKernel rms_norm_weight_gradient_cuda_kernel(const OpView& op);

namespace {

bool same_rows_type(const Value& a, const Value& b) {
  return a.dtype == b.dtype && a.shape == b.shape && a.rows == b.rows;
}

void infer_rms_norm(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 3, "rms_norm: takes x, gamma and delta");
  const Value x = context.input(0);
  const Value& gamma = context.input(1);
  TROUPE_CHECK(is_float(x.dtype) && x.shape.rank() == 2 && x.shape[1] > 0,
               "rms_norm: x is not [T, h]: " + x.name + " " + x.shape.to_string());
  TROUPE_CHECK(gamma.dtype == accumulation_dtype(x.dtype) && gamma.shape == Shape({x.shape[1]}),
               "rms_norm: gamma is not [h] in the accumulation dtype: " + gamma.name + " " +
                   gamma.shape.to_string());
  const bool has_delta = context.has_input(2);
  TROUPE_CHECK(!has_delta || same_rows_type(context.input(2), x),
               "rms_norm: delta differs in type from " + x.name);
  context.output("", x.dtype, x.shape, x.rows);
  context.output("rstd", accumulation_dtype(x.dtype), {x.shape[0]}, x.rows);
  if (has_delta) context.output("sum", x.dtype, x.shape, x.rows);
}

void infer_rms_norm_gradient(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 5, "rms_norm_gradient: takes dy, s, gamma, rstd and d_s");
  const Value s = context.input(1);
  const Value& gamma = context.input(2);
  const Value& rstd = context.input(3);
  TROUPE_CHECK(is_float(s.dtype) && s.shape.rank() == 2 && same_rows_type(context.input(0), s),
               "rms_norm_gradient: dy differs in type from " + s.name);
  TROUPE_CHECK(gamma.dtype == accumulation_dtype(s.dtype) && gamma.shape == Shape({s.shape[1]}) &&
                   rstd.dtype == accumulation_dtype(s.dtype) && rstd.shape == Shape({s.shape[0]}),
               "rms_norm_gradient: gamma or rstd does not belong to " + s.name);
  TROUPE_CHECK(!context.has_input(4) || same_rows_type(context.input(4), s),
               "rms_norm_gradient: d_s differs in type from " + s.name);
  context.output("", s.dtype, s.shape, s.rows);
}

void infer_rms_norm_weight_gradient(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 4,
               "rms_norm_weight_gradient: takes dy, s, rstd and target");
  const Value s = context.input(1);
  const Value& rstd = context.input(2);
  TROUPE_CHECK(is_float(s.dtype) && s.shape.rank() == 2 && same_rows_type(context.input(0), s) &&
                   rstd.dtype == accumulation_dtype(s.dtype) && rstd.shape == Shape({s.shape[0]}),
               "rms_norm_weight_gradient: dy or rstd does not belong to " + s.name);
  declare_weight_gradient(context, 3, "", accumulation_dtype(s.dtype), {s.shape[1]});
}

void differentiate_rms_norm(DerivativeContext& context) {
  Builder& builder = context.builder();
  const bool has_delta = context.input(2).valid();
  const ValueId dy = context.output_gradient(0);
  const ValueId d_sum = has_delta ? context.output_gradient(2) : ValueId{};
  const ValueId s = has_delta ? context.output(2) : context.input(0);
  if (context.wants(0) || context.wants(2)) {
    ValueId dx = d_sum;
    if (dy.valid()) {
      dx = builder.emit(kRmsNormGradient, Attributes(context.attributes<RmsNormAttributes>()),
                        {dy, s, context.input(1), context.output(1), d_sum},
                        "d_" + builder.value(s).name)[0];
    }
    for (const int input : {0, 2}) {
      if (dx.valid() && context.wants(input)) context.add_gradient(input, dx);
    }
  }
  if (dy.valid() && context.wants(1)) {
    const auto target = context.weight_target(1);
    const RmsNormWeightGradientAttributes attributes{.accumulate = target.accumulate};
    context.add_weight_gradient(1, builder.emit(kRmsNormWeightGradient, Attributes(attributes),
                                                {dy, s, context.output(1), target.target},
                                                "d_" + context.input_name(1))[0]);
  }
}

Cost cost_rms_norm(const OpView& op) {
  const bool has_delta = op.has_input(2);
  const auto elements = static_cast<double>(op.input(0).shape.elements());
  return {.flops = (has_delta ? 5 : 4) * elements,
          .bytes = (has_delta ? 4 : 2) * static_cast<double>(op.input(0).bytes()) +
                   static_cast<double>(op.input(1).bytes() + op.output(1).bytes())};
}

Cost cost_rms_norm_gradient(const OpView& op) {
  const bool has_base = op.has_input(4);
  const auto elements = static_cast<double>(op.input(0).shape.elements());
  return {.flops = (has_base ? 9 : 8) * elements,
          .bytes = (has_base ? 4 : 3) * static_cast<double>(op.input(0).bytes()) +
                   static_cast<double>(op.input(2).bytes() + op.input(3).bytes())};
}

Cost cost_rms_norm_weight_gradient(const OpView& op) {
  const double passes = op.attributes<RmsNormWeightGradientAttributes>().accumulate ? 2 : 1;
  return {.flops = 3 * static_cast<double>(op.input(0).shape.elements()),
          .bytes = static_cast<double>(2 * op.input(0).bytes() + op.input(2).bytes()) +
                   passes * static_cast<double>(op.output(0).bytes())};
}

uint64_t workspace_rms_norm_weight_gradient(const OpView& op) {
  const Shape& shape = op.input(0).shape;
  return static_cast<uint64_t>(row_pieces(shape[0], shape[1]).count) * op.output(0).bytes();
}

std::string print_rms_norm(const Attributes& attributes) {
  const auto& values = attributes.as<RmsNormAttributes>();
  return fmt::format("epsilon={} zero_centered={}", values.epsilon, values.zero_centered ? 1 : 0);
}

std::string print_rms_norm_weight_gradient(const Attributes& attributes) {
  return attributes.as<RmsNormWeightGradientAttributes>().accumulate ? "accumulate=1" : "";
}

uint64_t rms_norm_weight_gradient_cuda_scratch_bytes(const OpView& op) {
  const Shape& shape = op.input(0).shape;
  return row_sums_bytes(op.input(0).dtype, shape[0], shape[1]);
}

std::vector<OpSample> samples_rms_norm() {
  const auto plain = [](int64_t rows, int64_t hidden, double epsilon, bool zero_centered) {
    return [=](SampleBuilder& sample) {
      const ValueId x = sample.tensor("x", {rows, hidden});
      const ValueId gamma = sample.tensor("gamma", {hidden}, {.accumulation = true});
      const RmsNormAttributes attributes{.epsilon = epsilon, .zero_centered = zero_centered};
      sample.result(rms_norm(sample.builder(), x, gamma, attributes, "y").normalized);
    };
  };
  enum class Used { both, normalized, sum };
  const auto with_delta = [](int64_t rows, int64_t hidden, bool zero_centered, Used used) {
    return [=](SampleBuilder& sample) {
      const ValueId x = sample.tensor("x", {rows, hidden});
      const ValueId delta = sample.tensor("delta", {rows, hidden});
      const ValueId gamma = sample.tensor("gamma", {hidden}, {.accumulation = true});
      const RmsNormAttributes attributes{.epsilon = 0.01, .zero_centered = zero_centered};
      const auto [y, sum] = add_rms_norm(sample.builder(), x, delta, gamma, attributes, "y");
      used == Used::sum ? sample.result_without_gradient(y) : sample.result(y);
      used == Used::normalized ? sample.result_without_gradient(sum) : sample.result(sum);
    };
  };
  // The residual stream of two blocks: gradients reach the first sum on two paths, and one gain
  // serves both norms.
  const auto residual = [](SampleBuilder& sample) {
    const ValueId x = sample.tensor("x", {4, 9});
    const ValueId delta = sample.tensor("delta", {4, 9});
    const ValueId gamma = sample.tensor("gamma", {9}, {.accumulation = true});
    const RmsNormAttributes attributes{.epsilon = 1e-3, .zero_centered = false};
    const auto first = rms_norm(sample.builder(), x, gamma, attributes, "first");
    const auto second =
        add_rms_norm(sample.builder(), first.sum, delta, gamma, attributes, "second");
    const auto third =
        add_rms_norm(sample.builder(), second.sum, second.normalized, gamma, attributes, "third");
    sample.result(first.normalized);
    sample.result(third.normalized);
  };
  const auto ragged = [](int32_t live) {
    return [=](SampleBuilder& sample) {
      const ValueId rows = sample.integers("rows", {1}, {live});
      const ValueId x = sample.tensor("x", {6, 7}, {.rows = rows});
      const ValueId delta = sample.tensor("delta", {6, 7}, {.rows = rows});
      const ValueId gamma = sample.tensor("gamma", {7}, {.accumulation = true});
      const RmsNormAttributes attributes{.epsilon = 1e-5, .zero_centered = false};
      const auto result = add_rms_norm(sample.builder(), x, delta, gamma, attributes, "y");
      sample.result(result.normalized);
      sample.result(result.sum);
    };
  };
  // Several pieces in the sum over rows; x is constant, there would be too much to perturb.
  const auto many_rows = [](SampleBuilder& sample) {
    const ValueId x = sample.tensor("x", {5003, 21}, {.differentiable = false});
    const ValueId gamma = sample.tensor("gamma", {21}, {.accumulation = true});
    const RmsNormAttributes attributes{.epsilon = 1e-5, .zero_centered = false};
    sample.result(rms_norm(sample.builder(), x, gamma, attributes, "y").normalized);
  };
  return {{"plain", plain(3, 37, 1e-5, false)},
          {"zero centered", plain(5, 16, 1e-5, true)},
          {"one by one", plain(1, 1, 1, false)},
          {"sum, both used", with_delta(3, 19, false, Used::both)},
          {"sum, zero centered", with_delta(2, 33, true, Used::both)},
          {"sum, only normalized used", with_delta(3, 8, false, Used::normalized)},
          {"sum, only sum used", with_delta(3, 8, false, Used::sum)},
          {"residual stream", residual},
          {"ragged", ragged(4)},
          {"ragged without rows", ragged(0)},
          {"many rows", many_rows}};
}

}  // namespace

RmsNormResult rms_norm(Builder& builder, ValueId x, ValueId gamma,
                       const RmsNormAttributes& attributes, const std::string& name) {
  const auto outputs = builder.emit(kRmsNorm, Attributes(attributes), {x, gamma, ValueId{}}, name);
  return {.normalized = outputs[0], .sum = x};
}

RmsNormResult add_rms_norm(Builder& builder, ValueId x, ValueId delta, ValueId gamma,
                           const RmsNormAttributes& attributes, const std::string& name) {
  const auto outputs = builder.emit(kRmsNorm, Attributes(attributes), {x, gamma, delta}, name);
  return {.normalized = outputs[0], .sum = outputs[2]};
}

const OpSpec kRmsNorm{
    .name = "rms_norm",
    .infer = infer_rms_norm,
    .differentiate = differentiate_rms_norm,
    .cost = cost_rms_norm,
    .cpu = {.kernel = rms_norm_cpu_kernel},
    .cuda = packs_kernel<TROUPE_CUDA(rms_norm_cuda_kernel), row_elements_of_input>,
    .print_attributes = print_rms_norm,
    .samples = samples_rms_norm};

const OpSpec kRmsNormGradient{
    .name = "rms_norm_gradient",
    .infer = infer_rms_norm_gradient,
    .cost = cost_rms_norm_gradient,
    .cpu = {.kernel = rms_norm_gradient_cpu_kernel},
    .cuda = packs_kernel<TROUPE_CUDA(rms_norm_gradient_cuda_kernel), row_elements_of_input>,
    .in_place = {.output = 0, .input = 4},
    .print_attributes = print_rms_norm};

const OpSpec kRmsNormWeightGradient{
    .name = "rms_norm_weight_gradient",
    .infer = infer_rms_norm_weight_gradient,
    .cost = cost_rms_norm_weight_gradient,
    .cpu = {.kernel = rms_norm_weight_gradient_cpu_kernel,
            .workspace = workspace_rms_norm_weight_gradient},
    .cuda = packs_kernel<TROUPE_CUDA(rms_norm_weight_gradient_cuda_kernel), row_elements_of_input,
                         rms_norm_weight_gradient_cuda_scratch_bytes>,
    .print_attributes = print_rms_norm_weight_gradient};

}  // namespace troupe
