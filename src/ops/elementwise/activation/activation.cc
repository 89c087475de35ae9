#include "ops/elementwise/activation/activation.h"

#include <cmath>
#include <fmt/format.h>
#include <string_view>

#include "ops/choose_kernel.h"
#include "ops/exchange/coded_rows/coded_block.h"
#include "program/derivative.h"
#include "program/op_sample.h"

namespace troupe {

CpuKernel activation_cpu_kernel(const OpView& op);
CpuKernel activation_gradient_cpu_kernel(const OpView& op);
CudaKernel activation_cuda_kernel(const OpView& op);
CudaKernel activation_gradient_cuda_kernel(const OpView& op);

namespace {

// Columns of x for one of y.
int64_t halves_of(const ActivationAttributes& attributes) {
  return attributes.gated ? 2 : 1;
}

void infer_activation(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 3, "activation: takes x, weights and row_slot");
  const Value x = context.input(0);
  const auto& attributes = context.attributes<ActivationAttributes>();
  context.output("", x.dtype, activated_shape(context, attributes, x, 1), x.rows);
  if (attributes.stores_input) {
    context.output("stored", DType::u8, {x.shape[0], coded_row_bytes(x.shape[1])}, x.rows);
  }
}

void infer_activation_gradient(InferContext& context) {
  const auto& attributes = context.attributes<ActivationAttributes>();
  TROUPE_CHECK(context.input_count() == (attributes.stores_input ? 5 : 4) &&
                   context.has_input(0) != attributes.stores_input,
               "activation_gradient: takes x, dy, weights and row_slot, or stored rows last");
  const Value& dy = context.input(1);
  Value x = dy;
  if (attributes.stores_input) {
    const Value& stored = context.input(4);
    x.shape = {dy.shape[0], dy.shape[1] * halves_of(attributes)};
    TROUPE_CHECK(stored.dtype == DType::u8 && stored.rows == dy.rows &&
                     stored.shape == Shape({x.shape[0], coded_row_bytes(x.shape[1])}),
                 "activation_gradient: dy does not belong to " + stored.name);
  } else {
    x = context.input(0);
  }
  const Shape shape = activated_shape(context, attributes, x, 2);
  TROUPE_CHECK(dy.dtype == x.dtype && dy.rows == x.rows && dy.shape == shape,
               "activation_gradient: dy does not belong to " + x.name);
  context.output("", x.dtype, x.shape, x.rows);
  if (context.has_input(2)) {
    const Value weights = context.input(2);
    context.output("d_weights", weights.dtype, weights.shape);
  }
}

void differentiate_activation(DerivativeContext& context) {
  if (!context.wants(0) && !context.wants(1)) return;
  const auto attributes = context.attributes<ActivationAttributes>();
  std::vector<ValueId> inputs = {attributes.stores_input ? ValueId{} : context.input(0),
                                 context.output_gradient(0), context.input(1), context.input(2)};
  if (attributes.stores_input) inputs.push_back(context.output(1));
  const auto gradients = context.builder().emit(kActivationGradient, Attributes(attributes), inputs,
                                                "d_" + context.input_name(0));
  if (context.wants(0)) context.add_gradient(0, gradients[0]);
  if (context.wants(1)) context.add_gradient(1, gradients[1]);
}

// Flops of phi of one element; an exponential counts as ten.
double activation_function_flops(ActivationFunction function) {
  switch (function) {
    case ActivationFunction::silu:
      return 13;
    case ActivationFunction::gelu:
      return 36;
    case ActivationFunction::gelu_tanh:
      return 17;
    case ActivationFunction::quick_gelu:
      return 14;
    case ActivationFunction::relu:
      return 1;
    case ActivationFunction::squared_relu:
      return 2;
  }
  return 0;
}

Cost cost_activation(const OpView& op) {
  const auto& attributes = op.attributes<ActivationAttributes>();
  const bool weighted = op.has_input(1);
  const auto elements = static_cast<double>(op.output(0).shape.elements());
  return {.flops = activation_flops(attributes, elements, weighted),
          .bytes = static_cast<double>(op.input(0).bytes() + op.output(0).bytes()) +
                   (attributes.stores_input ? static_cast<double>(op.output(1).bytes()) : 0) +
                   (weighted ? activation_weights_bytes(op.input(1), op.input(2)) : 0)};
}

Cost cost_activation_gradient(const OpView& op) {
  const auto& attributes = op.attributes<ActivationAttributes>();
  const bool weighted = op.has_input(2);
  const auto elements = static_cast<double>(op.input(1).shape.elements());
  return {.flops = activation_gradient_flops(attributes, elements, weighted),
          .bytes = static_cast<double>(op.input(attributes.stores_input ? 4 : 0).bytes() +
                                       op.output(0).bytes() + op.input(1).bytes()) +
                   (weighted ? activation_weights_bytes(op.input(2), op.input(3)) +
                                   static_cast<double>(op.output(1).bytes())
                             : 0)};
}

std::string print_activation_attributes(const Attributes& any) {
  return print_activation(any.as<ActivationAttributes>());
}

// Numbers in (-2.4, 2.4), at least 0.05 away from 0 and from +-1.25, where relu and the samples'
// clamp have their kinks.
std::vector<double> activation_sample_values(int64_t count) {
  std::vector<double> values;
  for (int64_t i = 0; i < count; ++i) {
    double value = 2.3 * std::sin(1 + 3.7 * static_cast<double>(i));
    for (const double kink : {-1.25, 0.0, 1.25}) {
      if (std::abs(value - kink) < 0.05) value = kink + (value < kink ? -0.08 : 0.08);
    }
    values.push_back(value);
  }
  return values;
}

int64_t row_elements_of_activated(const OpView& op) {
  return op.output(0).shape.back();
}

KernelChoice choose_gradient_kernel(const OpView& op, const DeviceTraits& device) {
  const bool packs = is_made_of_packs(op.input(1).shape.back(), op.input(1).dtype);
  return make_choice(op, device, packs ? "packs" : "elements",
                     TROUPE_CUDA(activation_gradient_cuda_kernel));
}

std::vector<OpSample> samples_activation() {
  struct Form {
    ActivationAttributes attributes;
    int64_t width() const { return attributes.gated ? 2 : 1; }
  };
  const auto random = [](int64_t rows, int64_t f, double deviation) {
    return [=](SampleBuilder& sample) {
      const ValueId x = sample.tensor("x", {rows, 2 * f}, {.deviation = deviation});
      sample.result(activation(sample.builder(), x, {}, {}, {}, "y"));
    };
  };
  const auto plain = [](const Form& form) {
    return [=](SampleBuilder& sample) {
      const Shape shape{3, 17 * form.width()};
      const ValueId x = sample.values("x", shape, activation_sample_values(shape.elements()), {});
      sample.result(activation(sample.builder(), x, {}, {}, form.attributes, "y"));
    };
  };
  // Not all slots have a row, some rows are fillers, and `live` of the bound's rows are live.
  const auto weighted = [](const Form& form, int64_t f, int32_t live) {
    return [=](SampleBuilder& sample) {
      const ValueId rows = sample.integers("rows", {2}, {0, live});
      const Shape shape{7, f * form.width()};
      const ValueId x = sample.values("x", shape, activation_sample_values(shape.elements()),
                                      {.rows = rows, .rows_element = 1});
      const ValueId weights = sample.tensor("weights", {3, 2}, {.accumulation = true});
      const ValueId row_slot = sample.integers("row_slot", {7}, {3, -1, 0, 5, 1000, 2, -7});
      sample.result(activation(sample.builder(), x, weights, row_slot, form.attributes, "y"));
    };
  };
  const auto constant_weights = [](SampleBuilder& sample) {
    const ValueId x = sample.tensor("x", {4, 10});
    const ValueId weights =
        sample.tensor("weights", {2, 2}, {.differentiable = false, .accumulation = true});
    const ValueId row_slot = sample.integers("row_slot", {4}, {3, 0, 1, 2});
    sample.result(activation(sample.builder(), x, weights, row_slot, {}, "y"));
  };
  const auto only_weights = [](int32_t rows, int64_t f) {
    return [=](SampleBuilder& sample) {
      const ValueId x = sample.tensor("x", {rows, 2 * f}, {.differentiable = false});
      const ValueId weights = sample.tensor("weights", {rows / 2, 2}, {.accumulation = true});
      std::vector<int32_t> slots;
      for (int32_t r = 0; r < rows; ++r) slots.push_back(r * 7 % rows);
      const ValueId row_slot = sample.integers("row_slot", {rows}, slots);
      sample.result(activation(sample.builder(), x, weights, row_slot, {}, "y"));
    };
  };
  // Numbers that codes hold, so that the gradient is that of the function: multiples of 1/8 up to
  // 15/8, none of them at a kink.
  const auto stored = [](bool gated, int64_t f, int32_t live) {
    return [=](SampleBuilder& sample) {
      const Shape shape{7, f * (gated ? 2 : 1)};
      std::vector<double> values;
      for (int64_t i = 0; i < shape.elements(); ++i) {
        values.push_back((i % 3 == 0 ? -1 : 1) * static_cast<double>(1 + i * 7 % 15) / 8);
      }
      const ValueId rows = sample.integers("rows", {2}, {0, live});
      const ValueId x = sample.values("x", shape, values, {.rows = rows, .rows_element = 1});
      const ValueId weights = sample.tensor("weights", {3, 2}, {.accumulation = true});
      const ValueId row_slot = sample.integers("row_slot", {7}, {3, -1, 0, 5, 1000, 2, -7});
      sample.result(activation(sample.builder(), x, weights, row_slot,
                               {.gated = gated, .stores_input = true}, "y"));
    };
  };
  std::vector<OpSample> samples = {
      {"stored, gated", stored(true, 96, 6)},
      {"stored, plain", stored(false, 64, 7)},
      {"random", random(4, 19, 2)},
      {"one by one", random(1, 1, 1)},
      {"steep", random(3, 16, 10)},
      {"weighted without rows", weighted({}, 5, 0)},
      {"constant weights", constant_weights},
      {"weights only, several chunks", only_weights(900, 50)},
      {"weights only, several blocks of a row", only_weights(4, 1100)},
      {"clamp", plain({{.clamp = 1.25}})},
      {"offset", plain({{.linear_offset = 1}})},
      {"clamp and offset, weighted",
       weighted({{.function = ActivationFunction::quick_gelu, .clamp = 1.25, .linear_offset = 1}},
                9, 6)}};
  for (const ActivationFunction function :
       {ActivationFunction::silu, ActivationFunction::gelu, ActivationFunction::gelu_tanh,
        ActivationFunction::quick_gelu, ActivationFunction::relu,
        ActivationFunction::squared_relu}) {
    const std::string name(name_of(function));
    samples.push_back({name + " gated", plain({{.function = function}})});
    samples.push_back({name + " gated, weighted", weighted({{.function = function}}, 18, 6)});
    samples.push_back({name + " plain", plain({{.function = function, .gated = false}})});
    samples.push_back(
        {name + " plain, weighted", weighted({{.function = function, .gated = false}}, 18, 6)});
  }
  return samples;
}

}  // namespace

std::string_view name_of(ActivationFunction function) {
  switch (function) {
    case ActivationFunction::silu:
      return "silu";
    case ActivationFunction::gelu:
      return "gelu";
    case ActivationFunction::gelu_tanh:
      return "gelu_tanh";
    case ActivationFunction::quick_gelu:
      return "quick_gelu";
    case ActivationFunction::relu:
      return "relu";
    case ActivationFunction::squared_relu:
      return "squared_relu";
  }
  return "?";
}

Shape activated_shape(const InferContext& context, const ActivationAttributes& attributes,
                      const Value& x, int weights_input) {
  TROUPE_CHECK(attributes.clamp >= 0, "activation: the clamp is negative");
  TROUPE_CHECK(attributes.gated || (attributes.clamp == 0 && attributes.linear_offset == 0),
               "activation: clamp and offset belong to gated activations");
  const int64_t halves = halves_of(attributes);
  TROUPE_CHECK(
      is_float(x.dtype) && x.shape.rank() == 2 && x.shape[1] > 0 && x.shape[1] % halves == 0,
      "activation: x is not [R, " + std::string(attributes.gated ? "2 f" : "f") + "]: " + x.name +
          " " + x.shape.to_string());
  TROUPE_CHECK(!attributes.stores_input || x.shape[1] / halves % kCodedBlock == 0,
               "activation: halves to be stored are no multiples of 32: " + x.name);
  TROUPE_CHECK(context.has_input(weights_input) == context.has_input(weights_input + 1),
               "activation: weights and row_slot come together");
  if (context.has_input(weights_input)) {
    const Value& weights = context.input(weights_input);
    const Value& row_slot = context.input(weights_input + 1);
    TROUPE_CHECK(weights.dtype == accumulation_dtype(x.dtype) && weights.shape.rank() == 2,
                 "activation: weights are not [T, k] in the accumulation dtype: " + weights.name);
    TROUPE_CHECK(row_slot.dtype == DType::i32 && row_slot.shape == Shape({x.shape[0]}),
                 "activation: row_slot is not i32 [R]: " + row_slot.name);
  }
  return {x.shape[0], x.shape[1] / halves};
}

double activation_flops(const ActivationAttributes& attributes, double elements, bool weighted) {
  return (activation_function_flops(attributes.function) + (attributes.gated ? 1 : 0) +
          (weighted ? 1 : 0)) *
         elements;
}

double activation_gradient_flops(const ActivationAttributes& attributes, double elements,
                                 bool weighted) {
  return (activation_function_flops(attributes.function) + (attributes.gated ? 7 : 5) +
          (weighted ? 4 : 0)) *
         elements;
}

double activation_weights_bytes(const Value& weights, const Value& row_slot) {
  return static_cast<double>(row_slot.bytes()) +
         static_cast<double>(row_slot.shape[0]) * static_cast<double>(size_of(weights.dtype));
}

std::string print_activation(const ActivationAttributes& attributes) {
  std::string text =
      fmt::format("function={} gated={:d}", name_of(attributes.function), attributes.gated);
  if (attributes.clamp > 0) text += fmt::format(" clamp={}", attributes.clamp);
  if (attributes.linear_offset != 0) {
    text += fmt::format(" linear_offset={}", attributes.linear_offset);
  }
  if (attributes.stores_input) text += " stores_input=1";
  return text;
}

ValueId activation(Builder& builder, ValueId x, ValueId weights, ValueId row_slot,
                   const ActivationAttributes& attributes, const std::string& name) {
  return builder.emit(kActivation, Attributes(attributes), {x, weights, row_slot}, name)[0];
}

const OpSpec kActivation{
    .name = "activation",
    .infer = infer_activation,
    .differentiate = differentiate_activation,
    .cost = cost_activation,
    .cpu = {.kernel = activation_cpu_kernel},
    .cuda = packs_kernel<TROUPE_CUDA(activation_cuda_kernel), row_elements_of_activated>,
    .print_attributes = print_activation_attributes,
    .samples = samples_activation};

const OpSpec kActivationGradient{.name = "activation_gradient",
                                 .infer = infer_activation_gradient,
                                 .cost = cost_activation_gradient,
                                 .cpu = {.kernel = activation_gradient_cpu_kernel},
                                 .cuda = choose_gradient_kernel,
                                 .in_place = {.output = 0, .input = 0},
                                 .print_attributes = print_activation_attributes};

}  // namespace troupe
