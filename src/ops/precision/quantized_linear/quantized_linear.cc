#include "ops/precision/quantized_linear/quantized_linear.h"

#include "ops/costs.h"
#include "ops/precision/quantized_kernels.h"
#include "ops/precision/quantized_product.h"
#include "program/derivative.h"
#include "program/op_sample.h"

namespace troupe {

CpuKernel quantized_linear_cpu_kernel(const OpView& op);
CpuKernel quantized_linear_data_gradient_cpu_kernel(const OpView& op);
CpuKernel quantized_linear_weight_gradient_cpu_kernel(const OpView& op);
uint64_t scratch_quantized_linear(const OpView& op);
uint64_t scratch_quantized_linear_data_gradient(const OpView& op);
uint64_t scratch_quantized_linear_weight_gradient(const OpView& op);
uint64_t workspace_quantized_linear(const OpView& op);
uint64_t workspace_quantized_linear_weight_gradient(const OpView& op);
CudaKernel quantized_linear_cuda_kernel(GroupedVariant variant);
CudaKernel quantized_linear_data_gradient_cuda_kernel(GroupedVariant variant);
CudaKernel quantized_linear_weight_gradient_cuda_kernel(GroupedVariant variant);

namespace {

using Form = QuantizedProductAttributes;

// The shapes of both operands, which are matrices.
std::array<Shape, 2> check_matrices(InferContext& context, const char* kind,
                                    std::array<bool, 2> transposed) {
  check_quantized_operands(context, kind, transposed, -1);
  const auto operands = context.attributes<Form>().operands;
  const std::array<Shape, 2> shapes = {operands[0].shape(context.input(0).shape),
                                       operands[1].shape(context.input(1).shape)};
  TROUPE_CHECK(shapes[0].rank() == 2 && shapes[1].rank() == 2,
               std::string(kind) + ": operands that are no matrices");
  return shapes;
}

void infer_quantized_linear(InferContext& context) {
  const auto [x, weight] = check_matrices(context, "quantized_linear", {false, false});
  const DType compute = context.attributes<Form>().compute;
  TROUPE_CHECK(x[1] == weight[1],
               "quantized_linear: x " + x.to_string() + " and weight " + weight.to_string());
  if (context.has_input(4)) {
    const Value& bias = context.input(4);
    TROUPE_CHECK(bias.dtype == compute && bias.shape == Shape({weight[0]}),
                 "quantized_linear: bias " + bias.shape.to_string());
  }
  context.output("", compute, {x[0], weight[0]});
}

void infer_quantized_linear_data_gradient(InferContext& context) {
  const auto [dy, weight] =
      check_matrices(context, "quantized_linear_data_gradient", {false, true});
  TROUPE_CHECK(dy[1] == weight[0], "quantized_linear_data_gradient: dy " + dy.to_string() +
                                       " and weight " + weight.to_string());
  context.output("", context.attributes<Form>().compute, {dy[0], weight[1]});
}

void infer_quantized_linear_weight_gradient(InferContext& context) {
  const auto [dy, x] = check_matrices(context, "quantized_linear_weight_gradient", {true, true});
  TROUPE_CHECK(dy[0] == x[0], "quantized_linear_weight_gradient: dy " + dy.to_string() + " and x " +
                                  x.to_string());
  declare_weight_gradient(context, 4, "", context.attributes<Form>().compute, {dy[1], x[1]});
}

// With `reduced` numbers in each sum.
Cost cost_of(const OpView& op, int64_t reduced) {
  const auto& attributes = op.attributes<Form>();
  const double elements = static_cast<double>(op.output(0).shape.elements());
  const double bytes = static_cast<double>(op.output(0).bytes()) * (attributes.accumulate ? 2 : 1);
  return product_cost(2 * elements * static_cast<double>(reduced), attributes.compute,
                      quantized_operand_bytes(op) + bytes);
}

Cost cost_quantized_linear(const OpView& op) {
  return cost_of(op, quantized_shape(op, 0)[1]);
}

Cost cost_quantized_linear_weight_gradient(const OpView& op) {
  return cost_of(op, quantized_shape(op, 0)[0]);
}

KernelChoice choose_quantized_linear(const OpView& op, const DeviceTraits& device) {
  return choose_quantized_product(op, device, GroupedProduct::forward, false,
                                  TROUPE_CUDA(quantized_linear_cuda_kernel));
}

KernelChoice choose_quantized_linear_data_gradient(const OpView& op, const DeviceTraits& device) {
  return choose_quantized_product(op, device, GroupedProduct::data_gradient, false,
                                  TROUPE_CUDA(quantized_linear_data_gradient_cuda_kernel));
}

KernelChoice choose_quantized_linear_weight_gradient(const OpView& op, const DeviceTraits& device) {
  return choose_quantized_product(op, device, GroupedProduct::weight_gradient, false,
                                  TROUPE_CUDA(quantized_linear_weight_gradient_cuda_kernel));
}

// `last`: the bias, or the gradient's target; of a data gradient there is none.
void emit_product(SampleBuilder& sample, const OpSpec& kind, const std::array<Codes, 2>& read,
                  const std::array<Form::Operand, 2>& operands, ValueId last) {
  const Form attributes{.compute = sample.dtype(), .operands = operands};
  std::vector<ValueId> inputs = {read[0].codes, read[1].codes, read[0].scales, read[1].scales};
  if (&kind != &kQuantizedLinearDataGradient) inputs.push_back(last);
  sample.result_without_gradient(
      sample.builder().emit(kind, Attributes(attributes), inputs, "y")[0]);
}

// Forward and both gradients of one product, as a pass makes them, with codes of constants.
std::vector<OpSample> samples_quantized_linear() {
  const auto products = [](int64_t rows, int64_t inputs, int64_t outputs, bool blocks, bool bias) {
    return [=](SampleBuilder& sample) {
      Builder& builder = sample.builder();
      SampleBuilder::Options constant;
      constant.differentiable = false;
      constant.dtype = DType::bf16;  // the same codes in all dtypes
      const ValueId x = sample.tensor("x", {rows, inputs}, constant);
      const ValueId weight = sample.tensor("weight", {outputs, inputs}, constant);
      const ValueId dy = sample.tensor("dy", {rows, outputs}, constant);
      SampleBuilder::Options plain;
      plain.differentiable = false;
      const ValueId b = bias ? sample.tensor("bias", {outputs}, plain) : ValueId{};
      const ScaleRule rule = blocks ? ScaleRule::power_of_two : ScaleRule::ratio;
      const DType of_gradient = blocks ? DType::f8e4m3 : DType::f8e5m2;
      const BlockShape along_rows = blocks ? BlockShape{1, 16} : BlockShape{};
      const BlockShape along_columns = blocks ? BlockShape{16, 1} : BlockShape{};
      const BlockShape square = blocks ? BlockShape{16, 16} : BlockShape{};
      const auto narrow = [&](ValueId value, DType format, BlockShape block, CodesOrder order,
                              BlockShape columns) {
        return quantize(builder, value, {}, {}, {format, rule, block, order, columns}, "q");
      };
      const auto transposed = [&](ValueId value, BlockShape block) {
        return Form::transposed(block, builder.value(value).shape);
      };
      const auto emit = [&](const OpSpec& kind, Codes one, Codes other, const Form::Operand& of_one,
                            const Form::Operand& of_other, ValueId last) {
        emit_product(sample, kind, {one, other}, {of_one, of_other}, last);
      };
      const Quantized w = narrow(weight, DType::f8e4m3, square, CodesOrder::both, square);
      const Quantized of_dy = narrow(dy, of_gradient, along_rows, CodesOrder::both, along_columns);
      emit(kQuantizedLinear, narrow(x, DType::f8e4m3, along_rows, CodesOrder::rows, {}).rows,
           w.rows, Form::Operand{along_rows}, Form::Operand{square}, b);
      emit(kQuantizedLinearDataGradient, of_dy.rows, w.transposed, Form::Operand{along_rows},
           transposed(weight, square), {});
      emit(kQuantizedLinearWeightGradient, of_dy.transposed,
           narrow(x, DType::f8e4m3, {}, CodesOrder::transposed, along_columns).transposed,
           transposed(dy, along_columns), transposed(x, along_columns), {});
    };
  };
  // In 4 bits, both operands of the weight gradient rotated.
  const auto fp4 = [](int64_t rows, int64_t inputs, int64_t outputs) {
    return [=](SampleBuilder& sample) {
      Builder& builder = sample.builder();
      SampleBuilder::Options constant;
      constant.differentiable = false;
      constant.dtype = DType::bf16;
      constexpr BlockShape kRow{1, 16};
      constexpr BlockShape kColumn{16, 1};
      constexpr BlockShape kSquare{16, 16};
      const auto codes = [&](ValueId x, CodesOrder order, BlockShape block, bool stochastic) {
        const bool rotates = block == kColumn;
        const ValueId amax = block_amax(builder, x, {}, {.rotates = rotates}, "amax");
        return quantize(builder, x, {}, amax,
                        {.rule = ScaleRule::fp4,
                         .block = order == CodesOrder::transposed ? BlockShape{} : block,
                         .order = order,
                         .transposed_block = order == CodesOrder::rows ? BlockShape{} : block,
                         .rotates = rotates,
                         .is_stochastic = stochastic},
                        "q");
      };
      const ValueId x = sample.tensor("x", {rows, inputs}, constant);
      const ValueId weight = sample.tensor("weight", {outputs, inputs}, constant);
      const ValueId dy = sample.tensor("dy", {rows, outputs}, constant);
      const auto emit = [&](const OpSpec& kind, Codes one, Codes other, const Form::Operand& of_one,
                            const Form::Operand& of_other) {
        emit_product(sample, kind, {one, other}, {of_one, of_other}, {});
      };
      const Quantized w = codes(weight, CodesOrder::both, kSquare, false);
      emit(kQuantizedLinear, codes(x, CodesOrder::rows, kRow, false).rows, w.rows,
           Form::Operand{kRow}, Form::Operand{kSquare});
      emit(kQuantizedLinearDataGradient, codes(dy, CodesOrder::rows, kRow, true).rows, w.transposed,
           Form::Operand{kRow}, Form::transposed(kSquare, builder.value(weight).shape));
      emit(kQuantizedLinearWeightGradient,
           codes(dy, CodesOrder::transposed, kColumn, true).transposed,
           codes(x, CodesOrder::transposed, kColumn, false).transposed,
           Form::transposed(kColumn, builder.value(dy).shape),
           Form::transposed(kColumn, builder.value(x).shape));
    };
  };
  return {{"fp4", fp4(37, 50, 35)},
          {"tensors", products(9, 17, 5, false, false)},
          {"tensors_bias", products(6, 8, 19, false, true)},
          {"blocks", products(37, 50, 33, true, true)},
          {"one_by_one", products(1, 1, 1, true, false)},
          {"many_rows", products(8200, 16, 16, true, false)}};
}

}  // namespace

const OpSpec kQuantizedLinear{.name = "quantized_linear",
                              .infer = infer_quantized_linear,
                              .cost = cost_quantized_linear,
                              .cpu = {.kernel = quantized_linear_cpu_kernel,
                                      .workspace = workspace_quantized_linear,
                                      .scratch = scratch_quantized_linear},
                              .cuda = choose_quantized_linear,
                              .print_attributes = print_quantized_product,
                              .samples = samples_quantized_linear};

const OpSpec kQuantizedLinearDataGradient{
    .name = "quantized_linear_data_gradient",
    .infer = infer_quantized_linear_data_gradient,
    .cost = cost_quantized_linear,
    .cpu = {.kernel = quantized_linear_data_gradient_cpu_kernel,
            .workspace = workspace_quantized_linear,
            .scratch = scratch_quantized_linear_data_gradient},
    .cuda = choose_quantized_linear_data_gradient,
    .print_attributes = print_quantized_product};

const OpSpec kQuantizedLinearWeightGradient{
    .name = "quantized_linear_weight_gradient",
    .infer = infer_quantized_linear_weight_gradient,
    .cost = cost_quantized_linear_weight_gradient,
    .cpu = {.kernel = quantized_linear_weight_gradient_cpu_kernel,
            .workspace = workspace_quantized_linear_weight_gradient,
            .scratch = scratch_quantized_linear_weight_gradient},
    .cuda = choose_quantized_linear_weight_gradient,
    .print_attributes = print_quantized_product};

}  // namespace troupe
