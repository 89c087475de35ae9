#include "ops/products/linear/linear.h"

#include "ops/choose_kernel.h"
#include "ops/costs.h"
#include "ops/precision/quantized_linear/quantized_linear.h"
#include "ops/products/linear/linear_cpu.h"
#include "ops/products/linear/linear_cuda.h"
#include "ops/row_sum_pieces.h"
#include "program/derivative.h"
#include "program/op_sample.h"

namespace troupe {

CudaKernel linear_cuda_kernel(const OpView& op);
CudaKernel linear_data_gradient_cuda_kernel(const OpView& op);
CudaKernel linear_weight_gradient_cuda_kernel(const OpView& op);
CudaKernel linear_bias_gradient_cuda_kernel(const OpView& op);

namespace {

bool is_linear_matrix(const Value& value) {
  return is_float(value.dtype) && value.shape.rank() == 2 && !value.rows.valid();
}

DType linear_output_dtype(LinearOutput output, DType compute) {
  switch (output) {
    case LinearOutput::compute:
      return compute;
    case LinearOutput::accumulation:
      return accumulation_dtype(compute);
    case LinearOutput::f64:
      return DType::f64;
  }
  return compute;
}

// A gradient of the output has the dtype of the output.
bool is_linear_output_dtype(DType dtype, DType compute) {
  return dtype == compute || dtype == accumulation_dtype(compute) || dtype == DType::f64;
}

void infer_linear(InferContext& context) {
  const Value& x = context.input(0);
  const Value& weight = context.input(1);
  TROUPE_CHECK(is_linear_matrix(x) && is_linear_matrix(weight) && x.dtype == weight.dtype &&
                   x.shape[1] == weight.shape[1],
               "linear: x " + x.shape.to_string() + " and weight " + weight.shape.to_string());
  if (context.has_input(2)) {
    const Value& bias = context.input(2);
    TROUPE_CHECK(bias.dtype == x.dtype && bias.shape == Shape({weight.shape[0]}),
                 "linear: bias " + bias.shape.to_string());
  }
  const LinearOutput output = context.attributes<LinearAttributes>().output;
  context.output("", linear_output_dtype(output, x.dtype), {x.shape[0], weight.shape[0]});
}

void infer_linear_data_gradient(InferContext& context) {
  const Value& dy = context.input(0);
  const Value& weight = context.input(1);
  TROUPE_CHECK(is_linear_matrix(dy) && is_linear_matrix(weight) &&
                   is_linear_output_dtype(dy.dtype, weight.dtype) && dy.shape[1] == weight.shape[0],
               "linear_data_gradient: dy " + dy.shape.to_string() + " and weight " +
                   weight.shape.to_string());
  context.output("", weight.dtype, {dy.shape[0], weight.shape[1]});
}

void infer_linear_weight_gradient(InferContext& context) {
  const Value& dy = context.input(0);
  const Value& x = context.input(1);
  TROUPE_CHECK(
      is_linear_matrix(dy) && is_linear_matrix(x) && is_linear_output_dtype(dy.dtype, x.dtype) &&
          dy.shape[0] == x.shape[0],
      "linear_weight_gradient: dy " + dy.shape.to_string() + " and x " + x.shape.to_string());
  declare_weight_gradient(context, 2, "", x.dtype, {dy.shape[1], x.shape[1]});
}

void infer_linear_bias_gradient(InferContext& context) {
  const Value& dy = context.input(0);
  const DType bias_dtype = context.attributes<LinearBiasGradientAttributes>().bias_dtype;
  TROUPE_CHECK(is_linear_matrix(dy) && is_linear_output_dtype(dy.dtype, bias_dtype),
               "linear_bias_gradient: dy " + dy.shape.to_string());
  declare_weight_gradient(context, 1, "", bias_dtype, {dy.shape[1]});
}

void differentiate_linear(DerivativeContext& context) {
  Builder& builder = context.builder();
  const ValueId dy = context.output_gradient(0);
  const auto forward = context.attributes<LinearAttributes>();
  if (context.wants(0) && !forward.detached) {
    const Attributes attributes(LinearDataGradientAttributes{.quantizable = forward.quantizable});
    context.add_gradient(0, builder.emit(kLinearDataGradient, attributes, {dy, context.input(1)},
                                         "d_" + context.input_name(0))[0]);
  }
  if (context.wants(1)) {
    const auto target = context.weight_target(1);
    const Attributes attributes(LinearWeightGradientAttributes{.accumulate = target.accumulate,
                                                               .quantizable = forward.quantizable});
    context.add_weight_gradient(
        1, builder.emit(kLinearWeightGradient, attributes, {dy, context.input(0), target.target},
                        "d_" + context.input_name(1))[0]);
  }
  if (context.wants(2)) add_bias_gradient(context, 2, dy);
}

double linear_bytes(const Value& value) {
  return static_cast<double>(value.bytes());
}

// What a product is computed in: f64 where an operand or the result is; the operands' own dtype for
// gradients of logits in f32, which are split into parts of it.
DType product_dtype(DType one, DType other) {
  if (one == DType::f64 || other == DType::f64) return DType::f64;
  return one == DType::bf16 || other == DType::bf16 ? DType::bf16 : one;
}

Cost cost_linear(const OpView& op) {
  const double rows = static_cast<double>(op.input(0).shape[0]);
  const double bias = op.has_input(2) ? linear_bytes(op.input(2)) : 0;
  return product_cost(
      2 * rows * static_cast<double>(op.input(1).shape.elements()),
      product_dtype(op.input(0).dtype, op.output(0).dtype),
      linear_bytes(op.input(0)) + linear_bytes(op.input(1)) + bias + linear_bytes(op.output(0)));
}

Cost cost_linear_data_gradient(const OpView& op) {
  const double rows = static_cast<double>(op.input(0).shape[0]);
  return product_cost(
      2 * rows * static_cast<double>(op.input(1).shape.elements()),
      product_dtype(op.input(0).dtype, op.input(1).dtype),
      linear_bytes(op.input(0)) + linear_bytes(op.input(1)) + linear_bytes(op.output(0)));
}

Cost cost_linear_weight_gradient(const OpView& op) {
  const bool accumulate = op.attributes<LinearWeightGradientAttributes>().accumulate;
  const double rows = static_cast<double>(op.input(0).shape[0]);
  return product_cost(2 * rows * static_cast<double>(op.output(0).shape.elements()),
                      product_dtype(op.input(0).dtype, op.input(1).dtype),
                      linear_bytes(op.input(0)) + linear_bytes(op.input(1)) +
                          (accumulate ? 2 : 1) * linear_bytes(op.output(0)));
}

Cost cost_linear_bias_gradient(const OpView& op) {
  const bool accumulate = op.attributes<LinearBiasGradientAttributes>().accumulate;
  return {.flops = static_cast<double>(op.input(0).shape.elements()),
          .bytes = linear_bytes(op.input(0)) + (accumulate ? 2 : 1) * linear_bytes(op.output(0))};
}

uint64_t scratch_linear(const OpView& op) {
  return gemm_scratch_bytes(linear_tiles(op.input(0).shape, op.input(1).shape), op.input(0).dtype,
                            op.input(1).dtype, op.output(0).dtype);
}

uint64_t scratch_linear_data_gradient(const OpView& op) {
  return gemm_scratch_bytes(linear_data_gradient_tiles(op.input(0).shape, op.input(1).shape),
                            op.input(0).dtype, op.input(1).dtype, op.output(0).dtype);
}

uint64_t scratch_linear_weight_gradient(const OpView& op) {
  return gemm_scratch_bytes(linear_weight_gradient_tiles(op.input(0).shape, op.input(1).shape),
                            op.input(0).dtype, op.input(1).dtype, op.output(0).dtype);
}

uint64_t workspace_linear_weight_gradient(const OpView& op) {
  const Shape& dy = op.input(0).shape;
  const Shape& x = op.input(1).shape;
  return gemm_workspace_bytes(
      linear_weight_gradient_tiles(dy, x), dy[1], x[1],
      gemm_sum_dtype(op.input(0).dtype, op.input(1).dtype, op.output(0).dtype));
}

uint64_t workspace_linear_bias_gradient(const OpView& op) {
  const Shape& dy = op.input(0).shape;
  return static_cast<uint64_t>(linear_bias_gradient_pieces(dy) * dy[1]) *
         size_of(accumulation_dtype(op.input(0).dtype));
}

// What cuBLASLt multiplies: operands of one dtype, with a result of that or of its accumulation
// dtype.
SlowKernel slow_product(DType left, DType right, DType out) {
  const bool fits = left == right && (out == left || out == accumulation_dtype(left));
  return fits ? SlowKernel::no : SlowKernel::mixed_dtypes;
}

KernelChoice choose_product(const OpView& op, const DeviceTraits& device, SlowKernel slow,
                            SelectCudaKernel select, ScratchRule scratch) {
  KernelChoice choice =
      make_choice(op, device, slow == SlowKernel::no ? "cublaslt" : "plain tiles", select, scratch);
  choice.slow = slow;
  return choice;
}

uint64_t linear_cuda_scratch_bytes(const OpView&) {
  return kProductScratchBytes;
}

// It cannot fuse a bias of another dtype than the result, nor one of f64.
KernelChoice choose_linear(const OpView& op, const DeviceTraits& device) {
  const DType x = op.input(0).dtype;
  const DType y = op.output(0).dtype;
  SlowKernel slow = slow_product(x, op.input(1).dtype, y);
  if (slow == SlowKernel::no && op.has_input(2) && (y != x || x == DType::f64)) {
    slow = SlowKernel::bias_dtype;
  }
  return choose_product(op, device, slow, TROUPE_CUDA(linear_cuda_kernel),
                        linear_cuda_scratch_bytes);
}

// Of both gradients.
uint64_t linear_gradient_cuda_scratch_bytes(const OpView& op) {
  const Shape& dy = op.input(0).shape;
  if (!is_split(op.input(0).dtype, op.input(1).dtype)) return kProductScratchBytes;
  return kProductScratchBytes +
         static_cast<uint64_t>(SplitScratch(dy[0], dy[1], op.input(1).shape[1]).bytes);
}

template <SelectCudaKernel kSelect>
KernelChoice choose_linear_gradient(const OpView& op, const DeviceTraits& device) {
  const DType dy = op.input(0).dtype;
  const DType other = op.input(1).dtype;
  if (is_split(dy, other)) {
    return make_choice(op, device, "cublaslt in three parts", kSelect,
                       linear_gradient_cuda_scratch_bytes);
  }
  SlowKernel slow = slow_product(dy, other, op.output(0).dtype);
  if (slow == SlowKernel::mixed_dtypes && other == DType::f16) slow = SlowKernel::dtype;
  return choose_product(op, device, slow, kSelect, linear_gradient_cuda_scratch_bytes);
}

uint64_t linear_bias_gradient_cuda_scratch_bytes(const OpView& op) {
  const Shape& dy = op.input(0).shape;
  return row_sums_bytes(op.input(0).dtype, dy[0], dy[1]);
}

template <class T>
bool is_quantizable(const Attributes& attributes) {
  return attributes.as<T>().quantizable;
}

bool linear_weight_gradient_accumulates(const Attributes& attributes) {
  return attributes.as<LinearWeightGradientAttributes>().accumulate;
}

using Operand = QuantizedForm::Operand;

const QuantizedForm kQuantizedForm{
    .kind = &kQuantizedLinear,
    .operands = {Operand{Operand::Kind::activation, true}, Operand{Operand::Kind::weight, true}},
    .allowed = is_quantizable<LinearAttributes>};

const QuantizedForm kQuantizedDataGradientForm{
    .kind = &kQuantizedLinearDataGradient,
    .operands = {Operand{Operand::Kind::gradient, true}, Operand{Operand::Kind::weight, false}},
    .allowed = is_quantizable<LinearDataGradientAttributes>};

const QuantizedForm kQuantizedWeightGradientForm{
    .kind = &kQuantizedLinearWeightGradient,
    .operands = {Operand{Operand::Kind::gradient, false},
                 Operand{Operand::Kind::activation, false}},
    .allowed = is_quantizable<LinearWeightGradientAttributes>,
    .accumulates = linear_weight_gradient_accumulates};

std::string print_linear(const Attributes& attributes) {
  const auto& values = attributes.as<LinearAttributes>();
  std::string text;
  if (values.output == LinearOutput::accumulation) text = "output=accumulation";
  if (values.output == LinearOutput::f64) text = "output=f64";
  if (values.detached) text += text.empty() ? "detached=1" : " detached=1";
  return text;
}

std::string print_linear_weight_gradient(const Attributes& attributes) {
  return attributes.as<LinearWeightGradientAttributes>().accumulate ? "accumulate=1" : "";
}

std::string print_linear_bias_gradient(const Attributes& attributes) {
  const auto& values = attributes.as<LinearBiasGradientAttributes>();
  return "bias_dtype=" + std::string(name_of(values.bias_dtype)) +
         (values.accumulate ? " accumulate=1" : "");
}

std::vector<OpSample> samples_linear() {
  const auto plain = [](int64_t rows, int64_t inputs, int64_t outputs, bool bias,
                        LinearOutput output) {
    return [=](SampleBuilder& sample) {
      const ValueId x = sample.tensor("x", {rows, inputs});
      const ValueId weight = sample.tensor("weight", {outputs, inputs});
      const ValueId b = bias ? sample.tensor("bias", {outputs}) : ValueId{};
      const LinearOptions options{.bias = b, .output = output};
      sample.result(linear(sample.builder(), x, weight, options, "y"));
    };
  };
  // One weight in two products, so that its gradients from both must be summed.
  const auto shared = [](SampleBuilder& sample) {
    const ValueId x = sample.tensor("x", {7, 5});
    const ValueId weight = sample.tensor("weight", {5, 5});
    const ValueId bias = sample.tensor("bias", {5});
    const LinearOptions options{.bias = bias, .output = LinearOutput::compute};
    const ValueId hidden = linear(sample.builder(), x, weight, options, "hidden");
    sample.result(linear(sample.builder(), hidden, weight, options, "y"));
  };
  // Long enough that the gradients of weight and bias are summed in several pieces. x is a
  // constant: finite differences of that many elements would take too long.
  const auto many_rows = [](LinearOutput output) {
    return [=](SampleBuilder& sample) {
      SampleBuilder::Options constant;
      constant.differentiable = false;
      const ValueId x = sample.tensor("x", {8200, 16}, constant);
      const ValueId weight = sample.tensor("weight", {16, 16});
      const ValueId bias = sample.tensor("bias", {16});
      const LinearOptions options{.bias = bias, .output = output};
      sample.result(linear(sample.builder(), x, weight, options, "y"));
    };
  };
  // One weight for two products in f64, as a router's in two micro-batches.
  const auto shared_f64 = [](SampleBuilder& sample) {
    const ValueId weight = sample.tensor("weight", {4, 6});
    const ValueId bias = sample.tensor("bias", {4});
    const LinearOptions options{.bias = bias, .output = LinearOutput::f64};
    for (const char* name : {"first", "second"}) {
      const ValueId x = sample.tensor(name, {5, 6});
      sample.result(linear(sample.builder(), x, weight, options, "y"));
    }
  };
  // The gradient of the weight alone; what x is made of is differentiated elsewhere.
  const auto detached = [](SampleBuilder& sample) {
    SampleBuilder::Options constant;
    constant.differentiable = false;
    const ValueId x = sample.tensor("x", {5, 4}, constant);
    const ValueId weight = sample.tensor("weight", {3, 4});
    sample.result(linear(sample.builder(), x, weight, {.detached = true}, "y"));
  };
  constexpr LinearOutput kCompute = LinearOutput::compute;
  constexpr LinearOutput kAccumulation = LinearOutput::accumulation;
  return {{"no_bias", plain(9, 17, 5, false, kCompute)},
          {"bias", plain(6, 8, 19, true, kCompute)},
          {"one_by_one", plain(1, 1, 1, true, kCompute)},
          {"one_row", plain(1, 33, 4, true, kCompute)},
          {"accumulation_output", plain(10, 13, 6, false, kAccumulation)},
          {"accumulation_output_bias", plain(5, 7, 3, true, kAccumulation)},
          {"f64_output", plain(10, 13, 6, false, LinearOutput::f64)},
          {"f64_output_bias", plain(5, 7, 3, true, LinearOutput::f64)},
          {"one_output", plain(7, 21, 1, false, kCompute)},
          {"one_output_accumulation_bias", plain(9, 12, 1, true, kAccumulation)},
          {"detached", detached},
          {"shared_weight", shared},
          {"shared_weight_f64_output", shared_f64},
          {"many_rows", many_rows(kAccumulation)},
          {"many_rows_f64_output", many_rows(LinearOutput::f64)}};
}

}  // namespace

void add_bias_gradient(DerivativeContext& context, int i, ValueId dy) {
  Builder& builder = context.builder();
  const auto target = context.weight_target(i);
  const Attributes attributes(LinearBiasGradientAttributes{
      .bias_dtype = builder.value(context.input(i)).dtype, .accumulate = target.accumulate});
  context.add_weight_gradient(i, builder.emit(kLinearBiasGradient, attributes, {dy, target.target},
                                              "d_" + context.input_name(i))[0]);
}

ValueId linear(Builder& builder, ValueId x, ValueId weight, const LinearOptions& options,
               const std::string& name) {
  const LinearAttributes attributes{.output = options.output,
                                    .detached = options.detached,
                                    .quantizable = options.quantizable && !options.detached &&
                                                   options.output == LinearOutput::compute};
  return builder.emit(kLinear, Attributes(attributes), {x, weight, options.bias}, name)[0];
}

const OpSpec kLinear{.name = "linear",
                     .infer = infer_linear,
                     .differentiate = differentiate_linear,
                     .cost = cost_linear,
                     .cpu = {.kernel = linear_cpu_kernel, .scratch = scratch_linear},
                     .cuda = choose_linear,
                     .print_attributes = print_linear,
                     .quantized = &kQuantizedForm,
                     .samples = samples_linear};

const OpSpec kLinearDataGradient{
    .name = "linear_data_gradient",
    .infer = infer_linear_data_gradient,
    .cost = cost_linear_data_gradient,
    .cpu = {.kernel = linear_data_gradient_cpu_kernel, .scratch = scratch_linear_data_gradient},
    .cuda = choose_linear_gradient<TROUPE_CUDA(linear_data_gradient_cuda_kernel)>,
    .quantized = &kQuantizedDataGradientForm};

const OpSpec kLinearWeightGradient{
    .name = "linear_weight_gradient",
    .infer = infer_linear_weight_gradient,
    .cost = cost_linear_weight_gradient,
    .cpu = {.kernel = linear_weight_gradient_cpu_kernel,
            .workspace = workspace_linear_weight_gradient,
            .scratch = scratch_linear_weight_gradient},
    .cuda = choose_linear_gradient<TROUPE_CUDA(linear_weight_gradient_cuda_kernel)>,
    .print_attributes = print_linear_weight_gradient,
    .quantized = &kQuantizedWeightGradientForm};

const OpSpec kLinearBiasGradient{
    .name = "linear_bias_gradient",
    .infer = infer_linear_bias_gradient,
    .cost = cost_linear_bias_gradient,
    .cpu = {.kernel = linear_bias_gradient_cpu_kernel, .workspace = workspace_linear_bias_gradient},
    .cuda = packs_kernel<TROUPE_CUDA(linear_bias_gradient_cuda_kernel), row_elements_of_input,
                         linear_bias_gradient_cuda_scratch_bytes>,
    .print_attributes = print_linear_bias_gradient};

}  // namespace troupe
