#include "ops/norms/layer_norm/layer_norm.h"

#include <fmt/format.h>

#include "ops/choose_kernel.h"
#include "ops/cpu/row_sums.h"
#include "ops/row_sum_pieces.h"
#include "program/derivative.h"
#include "program/op_sample.h"

namespace troupe {

CpuKernel layer_norm_cpu_kernel(const OpView& op);
CpuKernel layer_norm_gradient_cpu_kernel(const OpView& op);
CpuKernel layer_norm_weight_gradient_cpu_kernel(const OpView& op);
CpuKernel layer_norm_bias_gradient_cpu_kernel(const OpView& op);
CudaKernel layer_norm_cuda_kernel(const OpView& op);
CudaKernel layer_norm_gradient_cuda_kernel(const OpView& op);
CudaKernel layer_norm_weight_gradient_cuda_kernel(const OpView& op);
CudaKernel layer_norm_bias_gradient_cuda_kernel(const OpView& op);

namespace {

bool is_layer_norm_input(const Value& x) {
  return is_float(x.dtype) && x.shape.rank() == 2 && x.shape[1] > 0;
}

bool is_like_layer_norm_input(const Value& value, const Value& x) {
  return value.dtype == x.dtype && value.shape == x.shape && value.rows == x.rows;
}

bool is_layer_norm_vector(const Value& vector, const Value& x) {
  return vector.dtype == accumulation_dtype(x.dtype) && vector.shape == Shape({x.shape[1]});
}

bool is_layer_norm_statistic(const Value& statistic, const Value& x) {
  return statistic.dtype == accumulation_dtype(x.dtype) && statistic.shape == Shape({x.shape[0]}) &&
         statistic.rows == x.rows;
}

void infer_layer_norm(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 4, "layer_norm: takes x, gamma, beta and delta");
  const Value x = context.input(0);
  TROUPE_CHECK(is_layer_norm_input(x),
               "layer_norm: x is not [T, h]: " + x.name + " " + x.shape.to_string());
  TROUPE_CHECK(
      is_layer_norm_vector(context.input(1), x) && is_layer_norm_vector(context.input(2), x),
      "layer_norm: gamma or beta is not [h] in the accumulation dtype: " + context.input(1).name +
          ", " + context.input(2).name);
  const bool has_delta = context.has_input(3);
  TROUPE_CHECK(!has_delta || is_like_layer_norm_input(context.input(3), x),
               "layer_norm: delta differs in type from " + x.name);
  context.output("", x.dtype, x.shape, x.rows);
  context.output("mean", accumulation_dtype(x.dtype), {x.shape[0]}, x.rows);
  context.output("rstd", accumulation_dtype(x.dtype), {x.shape[0]}, x.rows);
  if (has_delta) context.output("sum", x.dtype, x.shape, x.rows);
}

void infer_layer_norm_gradient(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 6,
               "layer_norm_gradient: takes dy, s, gamma, mean, rstd and d_s");
  const Value s = context.input(1);
  TROUPE_CHECK(is_layer_norm_input(s) && is_like_layer_norm_input(context.input(0), s) &&
                   is_layer_norm_vector(context.input(2), s) &&
                   is_layer_norm_statistic(context.input(3), s) &&
                   is_layer_norm_statistic(context.input(4), s) &&
                   (!context.has_input(5) || is_like_layer_norm_input(context.input(5), s)),
               "layer_norm_gradient: operands do not belong to " + s.name);
  context.output("", s.dtype, s.shape, s.rows);
}

void infer_layer_norm_weight_gradient(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 5,
               "layer_norm_weight_gradient: takes dy, s, mean, rstd and target");
  const Value s = context.input(1);
  TROUPE_CHECK(is_layer_norm_input(s) && is_like_layer_norm_input(context.input(0), s) &&
                   is_layer_norm_statistic(context.input(2), s) &&
                   is_layer_norm_statistic(context.input(3), s),
               "layer_norm_weight_gradient: operands do not belong to " + s.name);
  declare_weight_gradient(context, 4, "", accumulation_dtype(s.dtype), {s.shape[1]});
}

void infer_layer_norm_bias_gradient(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 2, "layer_norm_bias_gradient: takes dy and target");
  const Value dy = context.input(0);
  TROUPE_CHECK(is_layer_norm_input(dy), "layer_norm_bias_gradient: dy is not [T, h]: " + dy.name +
                                            " " + dy.shape.to_string());
  declare_weight_gradient(context, 1, "", accumulation_dtype(dy.dtype), {dy.shape[1]});
}

void differentiate_layer_norm(DerivativeContext& context) {
  Builder& builder = context.builder();
  const bool has_delta = context.input(3).valid();
  const ValueId dy = context.output_gradient(0);
  const ValueId mean = context.output(1);
  const ValueId rstd = context.output(2);
  const ValueId d_sum = has_delta ? context.output_gradient(3) : ValueId{};
  const ValueId s = has_delta ? context.output(3) : context.input(0);
  if (context.wants(0) || context.wants(3)) {
    ValueId dx = d_sum;
    if (dy.valid()) {
      dx = builder.emit(kLayerNormGradient, Attributes(context.attributes<LayerNormAttributes>()),
                        {dy, s, context.input(1), mean, rstd, d_sum},
                        "d_" + builder.value(s).name)[0];
    }
    for (const int input : {0, 3}) {
      if (dx.valid() && context.wants(input)) context.add_gradient(input, dx);
    }
  }
  if (dy.valid() && context.wants(1)) {
    const auto target = context.weight_target(1);
    const LayerNormWeightGradientAttributes attributes{.accumulate = target.accumulate};
    context.add_weight_gradient(
        1, builder.emit(kLayerNormWeightGradient, Attributes(attributes),
                        {dy, s, mean, rstd, target.target}, "d_" + context.input_name(1))[0]);
  }
  if (dy.valid() && context.wants(2)) {
    const auto target = context.weight_target(2);
    const LayerNormBiasGradientAttributes attributes{.accumulate = target.accumulate};
    context.add_weight_gradient(
        2, builder.emit(kLayerNormBiasGradient, Attributes(attributes), {dy, target.target},
                        "d_" + context.input_name(2))[0]);
  }
}

Cost cost_layer_norm(const OpView& op) {
  const bool has_delta = op.has_input(3);
  const auto elements = static_cast<double>(op.input(0).shape.elements());
  return {.flops = (has_delta ? 9 : 8) * elements,
          .bytes = (has_delta ? 4 : 2) * static_cast<double>(op.input(0).bytes()) +
                   static_cast<double>(2 * op.input(1).bytes() + 2 * op.output(1).bytes())};
}

Cost cost_layer_norm_gradient(const OpView& op) {
  const bool has_base = op.has_input(5);
  const auto elements = static_cast<double>(op.input(0).shape.elements());
  return {.flops = (has_base ? 13 : 12) * elements,
          .bytes = (has_base ? 4 : 3) * static_cast<double>(op.input(0).bytes()) +
                   static_cast<double>(op.input(2).bytes() + 2 * op.input(3).bytes())};
}

Cost cost_layer_norm_weight_gradient(const OpView& op) {
  const double passes = op.attributes<LayerNormWeightGradientAttributes>().accumulate ? 2 : 1;
  return {.flops = 4 * static_cast<double>(op.input(0).shape.elements()),
          .bytes = static_cast<double>(2 * op.input(0).bytes() + 2 * op.input(2).bytes()) +
                   passes * static_cast<double>(op.output(0).bytes())};
}

Cost cost_layer_norm_bias_gradient(const OpView& op) {
  const double passes = op.attributes<LayerNormBiasGradientAttributes>().accumulate ? 2 : 1;
  return {.flops = static_cast<double>(op.input(0).shape.elements()),
          .bytes = static_cast<double>(op.input(0).bytes()) +
                   passes * static_cast<double>(op.output(0).bytes())};
}

uint64_t workspace_layer_norm_sum(const OpView& op) {
  const Shape& shape = op.input(0).shape;
  return static_cast<uint64_t>(row_pieces(shape[0], shape[1]).count) * op.output(0).bytes();
}

std::string print_layer_norm(const Attributes& attributes) {
  const auto& values = attributes.as<LayerNormAttributes>();
  return fmt::format("epsilon={} zero_centered={}", values.epsilon, values.zero_centered ? 1 : 0);
}

std::string print_layer_norm_weight_gradient(const Attributes& attributes) {
  return attributes.as<LayerNormWeightGradientAttributes>().accumulate ? "accumulate=1" : "";
}

std::string print_layer_norm_bias_gradient(const Attributes& attributes) {
  return attributes.as<LayerNormBiasGradientAttributes>().accumulate ? "accumulate=1" : "";
}

uint64_t layer_norm_sums_cuda_scratch_bytes(const OpView& op) {
  const Shape& shape = op.input(0).shape;
  return row_sums_bytes(op.input(0).dtype, shape[0], shape[1]);
}

std::vector<OpSample> samples_layer_norm() {
  // The rows have a mean well away from zero, which the variance must not feel.
  const SampleBuilder::Options shifted{.mean = 2};
  const auto plain = [=](int64_t rows, int64_t hidden, double epsilon, bool zero_centered) {
    return [=](SampleBuilder& sample) {
      const ValueId x = sample.tensor("x", {rows, hidden}, shifted);
      const ValueId gamma = sample.tensor("gamma", {hidden}, {.accumulation = true});
      const ValueId beta = sample.tensor("beta", {hidden}, {.accumulation = true});
      const LayerNormAttributes attributes{.epsilon = epsilon, .zero_centered = zero_centered};
      sample.result(layer_norm(sample.builder(), x, gamma, beta, attributes, "y").normalized);
    };
  };
  enum class Used { both, normalized, sum };
  const auto with_delta = [=](int64_t rows, int64_t hidden, bool zero_centered, Used used) {
    return [=](SampleBuilder& sample) {
      const ValueId x = sample.tensor("x", {rows, hidden}, shifted);
      const ValueId delta = sample.tensor("delta", {rows, hidden});
      const ValueId gamma = sample.tensor("gamma", {hidden}, {.accumulation = true});
      const ValueId beta = sample.tensor("beta", {hidden}, {.accumulation = true});
      const LayerNormAttributes attributes{.epsilon = 0.01, .zero_centered = zero_centered};
      const auto [y, sum] =
          add_layer_norm(sample.builder(), x, delta, gamma, beta, attributes, "y");
      used == Used::sum ? sample.result_without_gradient(y) : sample.result(y);
      used == Used::normalized ? sample.result_without_gradient(sum) : sample.result(sum);
    };
  };
  // The residual stream of two blocks: gradients reach the first sum on two paths, and one gain
  // and one bias serve all norms.
  const auto residual = [](SampleBuilder& sample) {
    const ValueId x = sample.tensor("x", {4, 9});
    const ValueId delta = sample.tensor("delta", {4, 9});
    const ValueId gamma = sample.tensor("gamma", {9}, {.accumulation = true});
    const ValueId beta = sample.tensor("beta", {9}, {.accumulation = true});
    const LayerNormAttributes attributes{.epsilon = 1e-3, .zero_centered = false};
    const auto first = layer_norm(sample.builder(), x, gamma, beta, attributes, "first");
    const auto second =
        add_layer_norm(sample.builder(), first.sum, delta, gamma, beta, attributes, "second");
    const auto third = add_layer_norm(sample.builder(), second.sum, second.normalized, gamma, beta,
                                      attributes, "third");
    sample.result(first.normalized);
    sample.result(third.normalized);
  };
  const auto ragged = [](int32_t live) {
    return [=](SampleBuilder& sample) {
      const ValueId rows = sample.integers("rows", {1}, {live});
      const ValueId x = sample.tensor("x", {6, 7}, {.rows = rows});
      const ValueId delta = sample.tensor("delta", {6, 7}, {.rows = rows});
      const ValueId gamma = sample.tensor("gamma", {7}, {.accumulation = true});
      const ValueId beta = sample.tensor("beta", {7}, {.accumulation = true});
      const LayerNormAttributes attributes{.epsilon = 1e-5, .zero_centered = false};
      const auto result = add_layer_norm(sample.builder(), x, delta, gamma, beta, attributes, "y");
      sample.result(result.normalized);
      sample.result(result.sum);
    };
  };
  // Several pieces in the sums over rows; x is constant, there would be too much to perturb.
  const auto many_rows = [](SampleBuilder& sample) {
    const ValueId x = sample.tensor("x", {5003, 21}, {.differentiable = false});
    const ValueId gamma = sample.tensor("gamma", {21}, {.accumulation = true});
    const ValueId beta = sample.tensor("beta", {21}, {.accumulation = true});
    const LayerNormAttributes attributes{.epsilon = 1e-5, .zero_centered = false};
    sample.result(layer_norm(sample.builder(), x, gamma, beta, attributes, "y").normalized);
  };
  return {{"plain", plain(3, 37, 1e-5, false)},
          {"zero centered", plain(5, 16, 1e-5, true)},
          {"one row of two", plain(1, 2, 1, false)},
          {"sum, both used", with_delta(3, 19, false, Used::both)},
          {"sum, zero centered", with_delta(2, 33, true, Used::both)},
          // The norm of one element is constant: only the gradient of the sum is left.
          {"sum, one by one", with_delta(1, 1, false, Used::both)},
          {"sum, only normalized used", with_delta(3, 8, false, Used::normalized)},
          {"sum, only sum used", with_delta(3, 8, false, Used::sum)},
          {"residual stream", residual},
          {"ragged", ragged(4)},
          {"ragged without rows", ragged(0)},
          {"many rows", many_rows}};
}

}  // namespace

LayerNormResult layer_norm(Builder& builder, ValueId x, ValueId gamma, ValueId beta,
                           const LayerNormAttributes& attributes, const std::string& name) {
  const auto outputs =
      builder.emit(kLayerNorm, Attributes(attributes), {x, gamma, beta, ValueId{}}, name);
  return {.normalized = outputs[0], .sum = x};
}

LayerNormResult add_layer_norm(Builder& builder, ValueId x, ValueId delta, ValueId gamma,
                               ValueId beta, const LayerNormAttributes& attributes,
                               const std::string& name) {
  const auto outputs =
      builder.emit(kLayerNorm, Attributes(attributes), {x, gamma, beta, delta}, name);
  return {.normalized = outputs[0], .sum = outputs[3]};
}

const OpSpec kLayerNorm{
    .name = "layer_norm",
    .infer = infer_layer_norm,
    .differentiate = differentiate_layer_norm,
    .cost = cost_layer_norm,
    .cpu = {.kernel = layer_norm_cpu_kernel},
    .cuda = packs_kernel<TROUPE_CUDA(layer_norm_cuda_kernel), row_elements_of_input>,
    .print_attributes = print_layer_norm,
    .samples = samples_layer_norm};

const OpSpec kLayerNormGradient{
    .name = "layer_norm_gradient",
    .infer = infer_layer_norm_gradient,
    .cost = cost_layer_norm_gradient,
    .cpu = {.kernel = layer_norm_gradient_cpu_kernel},
    .cuda = packs_kernel<TROUPE_CUDA(layer_norm_gradient_cuda_kernel), row_elements_of_input>,
    .in_place = {.output = 0, .input = 5},
    .print_attributes = print_layer_norm};

const OpSpec kLayerNormWeightGradient{
    .name = "layer_norm_weight_gradient",
    .infer = infer_layer_norm_weight_gradient,
    .cost = cost_layer_norm_weight_gradient,
    .cpu = {.kernel = layer_norm_weight_gradient_cpu_kernel, .workspace = workspace_layer_norm_sum},
    .cuda = packs_kernel<TROUPE_CUDA(layer_norm_weight_gradient_cuda_kernel), row_elements_of_input,
                         layer_norm_sums_cuda_scratch_bytes>,
    .print_attributes = print_layer_norm_weight_gradient};

const OpSpec kLayerNormBiasGradient{
    .name = "layer_norm_bias_gradient",
    .infer = infer_layer_norm_bias_gradient,
    .cost = cost_layer_norm_bias_gradient,
    .cpu = {.kernel = layer_norm_bias_gradient_cpu_kernel, .workspace = workspace_layer_norm_sum},
    .cuda = packs_kernel<TROUPE_CUDA(layer_norm_bias_gradient_cuda_kernel), row_elements_of_input,
                         layer_norm_sums_cuda_scratch_bytes>,
    .print_attributes = print_layer_norm_bias_gradient};

}  // namespace troupe
