#include "ops/precision/quantized_grouped_linear/quantized_grouped_linear.h"

#include <algorithm>

#include "ops/costs.h"
#include "ops/precision/quantized_kernels.h"
#include "ops/precision/quantized_product.h"
#include "program/derivative.h"
#include "program/op_sample.h"

namespace troupe {

CpuKernel quantized_grouped_linear_cpu_kernel(const OpView& op);
CpuKernel quantized_grouped_linear_data_gradient_cpu_kernel(const OpView& op);
CpuKernel quantized_grouped_linear_weight_gradient_cpu_kernel(const OpView& op);
uint64_t scratch_quantized_grouped_linear(const OpView& op);
uint64_t scratch_quantized_grouped_linear_weight_gradient(const OpView& op);
uint64_t workspace_quantized_grouped_linear(const OpView& op);
uint64_t workspace_quantized_grouped_linear_weight_gradient(const OpView& op);
CudaKernel quantized_grouped_linear_cuda_kernel(GroupedVariant variant);
CudaKernel quantized_grouped_linear_data_gradient_cuda_kernel(GroupedVariant variant);
CudaKernel quantized_grouped_linear_weight_gradient_cuda_kernel(GroupedVariant variant);

namespace {

using Form = QuantizedProductAttributes;

void check_group_offsets(const InferContext& context, int64_t experts) {
  const Value& offsets = context.input(kQuantizedOffsets);
  TROUPE_CHECK(offsets.dtype == DType::i32 && offsets.shape == Shape({experts + 1}),
               "products of experts in 8 bits: offsets " + offsets.shape.to_string());
}

// Rows times weights; `rows` and `outputs` are the weight's dimensions that they have.
void infer_rows_times_weights(InferContext& context, const char* kind, bool transposed, int rows,
                              int outputs) {
  check_quantized_operands(context, kind, {false, transposed}, kQuantizedOffsets);
  const Value x = context.input(0);
  const Shape weight = context.attributes<Form>().operands[1].shape(context.input(1).shape);
  TROUPE_CHECK(
      x.shape.rank() == 2 && weight.rank() == 3 && x.shape[1] == weight[rows],
      std::string(kind) + ": " + x.shape.to_string() + " and weight " + weight.to_string());
  check_group_offsets(context, weight[0]);
  context.output("", context.attributes<Form>().compute, {x.shape[0], weight[outputs]}, x.rows);
}

void infer_quantized_grouped_linear(InferContext& context) {
  infer_rows_times_weights(context, "quantized_grouped_linear", false, 2, 1);
}

void infer_quantized_grouped_linear_data_gradient(InferContext& context) {
  infer_rows_times_weights(context, "quantized_grouped_linear_data_gradient", true, 1, 2);
}

void infer_quantized_grouped_linear_weight_gradient(InferContext& context) {
  check_quantized_operands(context, "quantized_grouped_linear_weight_gradient", {true, true},
                           kQuantizedOffsets);
  const Form form = context.attributes<Form>();
  const Shape dy = form.operands[0].shape(context.input(0).shape);
  const Shape x = form.operands[1].shape(context.input(1).shape);
  TROUPE_CHECK(
      dy.rank() == 2 && x.rank() == 2 && dy[0] == x[0],
      "quantized_grouped_linear_weight_gradient: dy " + dy.to_string() + " and x " + x.to_string());
  const int64_t experts = context.input(kQuantizedOffsets).shape[0] - 1;
  check_group_offsets(context, experts);
  declare_weight_gradient(context, kQuantizedOffsets + 1, "", form.compute, {experts, dy[1], x[1]});
}

// Each row meets the weight of one expert.
Cost cost_quantized_grouped_linear(const OpView& op) {
  const double rows = static_cast<double>(op.input(0).shape[0]);
  const double products = rows * static_cast<double>(quantized_shape(op, 1).row_elements());
  return product_cost(2 * products, op.attributes<Form>().compute,
                      quantized_operand_bytes(op) + static_cast<double>(op.output(0).bytes()));
}

Cost cost_quantized_grouped_linear_weight_gradient(const OpView& op) {
  const auto& attributes = op.attributes<Form>();
  // Of fewer blocks of rows where fewer rows are expected.
  const int64_t in_blocks = op.input(0).shape[0] * kTransposedRows;
  const double rows = static_cast<double>(std::min(quantized_shape(op, 0)[0], in_blocks));
  const double products = rows * static_cast<double>(op.output(0).shape.row_elements());
  const double stores = attributes.accumulate ? 2 : 1;
  return product_cost(
      2 * products, attributes.compute,
      quantized_operand_bytes(op) + stores * static_cast<double>(op.output(0).bytes()));
}

KernelChoice choose_quantized_grouped_linear(const OpView& op, const DeviceTraits& device) {
  return choose_quantized_product(op, device, GroupedProduct::forward, true,
                                  TROUPE_CUDA(quantized_grouped_linear_cuda_kernel));
}

KernelChoice choose_quantized_grouped_linear_data_gradient(const OpView& op,
                                                           const DeviceTraits& device) {
  return choose_quantized_product(op, device, GroupedProduct::data_gradient, true,
                                  TROUPE_CUDA(quantized_grouped_linear_data_gradient_cuda_kernel));
}

KernelChoice choose_quantized_grouped_linear_weight_gradient(const OpView& op,
                                                             const DeviceTraits& device) {
  return choose_quantized_product(
      op, device, GroupedProduct::weight_gradient, true,
      TROUPE_CUDA(quantized_grouped_linear_weight_gradient_cuda_kernel));
}

// Forward and both gradients of one product, as a pass makes them, with codes of constants.
std::vector<OpSample> samples_quantized_grouped_linear() {
  const auto products = [](int64_t rows, const std::vector<int32_t>& starts, bool blocks) {
    return [=](SampleBuilder& sample) {
      Builder& builder = sample.builder();
      const auto experts = static_cast<int32_t>(starts.size()) - 1;
      const ValueId offsets = sample.integers("offsets", {experts + 1}, starts);
      SampleBuilder::Options constant;
      constant.differentiable = false;
      constant.dtype = DType::bf16;  // the same codes in all dtypes
      SampleBuilder::Options ragged = constant;
      ragged.rows = offsets;
      ragged.rows_element = experts;
      const ValueId x = sample.tensor("x", {rows, 20}, ragged);
      const ValueId weight = sample.tensor("weight", {experts, 18, 20}, constant);
      const ValueId dy = sample.tensor("dy", {rows, 18}, ragged);
      const ScaleRule rule = blocks ? ScaleRule::exponent : ScaleRule::ratio;
      const BlockShape along_rows = blocks ? BlockShape{1, 8} : BlockShape{};
      const BlockShape along_columns = blocks ? BlockShape{8, 1} : BlockShape{};
      const auto narrow = [&](ValueId value, BlockShape block, CodesOrder order,
                              BlockShape columns) {
        const ValueId starts_of = value == weight ? ValueId{} : offsets;
        return quantize(builder, value, starts_of, {}, {DType::f8e4m3, rule, block, order, columns},
                        "q");
      };
      const auto transposed = [&](ValueId value, BlockShape block) {
        return Form::transposed(block, builder.value(value).shape);
      };
      const auto emit = [&](const OpSpec& kind, Codes one, Codes other, const Form::Operand& of_one,
                            const Form::Operand& of_other) {
        const Form attributes{.compute = sample.dtype(), .operands = {of_one, of_other}};
        std::vector<ValueId> inputs = {one.codes, other.codes, one.scales, other.scales, offsets};
        if (&kind == &kQuantizedGroupedLinearWeightGradient) inputs.emplace_back();
        sample.result_without_gradient(builder.emit(kind, Attributes(attributes), inputs, "y")[0]);
      };
      const Quantized of_x = narrow(x, along_rows, CodesOrder::both, along_columns);
      const Quantized of_dy = narrow(dy, along_rows, CodesOrder::both, along_columns);
      const Quantized in_rows = narrow(weight, along_rows, CodesOrder::rows, {});
      const Quantized in_columns = narrow(weight, {}, CodesOrder::transposed, along_columns);
      emit(kQuantizedGroupedLinear, of_x.rows, in_rows.rows, Form::Operand{along_rows},
           Form::Operand{along_rows});
      emit(kQuantizedGroupedLinearDataGradient, of_dy.rows, in_columns.transposed,
           Form::Operand{along_rows}, transposed(weight, along_columns));
      emit(kQuantizedGroupedLinearWeightGradient, of_dy.transposed, of_x.transposed,
           transposed(dy, along_columns), transposed(x, along_columns));
    };
  };
  return {{"tensors", products(20, {0, 0, 6, 6, 17, 17}, false)},
          {"blocks", products(30, {0, 0, 9, 9, 26, 27}, true)},
          {"no_rows", products(4, {0, 0, 0}, true)}};
}

}  // namespace

const OpSpec kQuantizedGroupedLinear{.name = "quantized_grouped_linear",
                                     .infer = infer_quantized_grouped_linear,
                                     .cost = cost_quantized_grouped_linear,
                                     .cpu = {.kernel = quantized_grouped_linear_cpu_kernel,
                                             .workspace = workspace_quantized_grouped_linear,
                                             .scratch = scratch_quantized_grouped_linear},
                                     .cuda = choose_quantized_grouped_linear,
                                     .print_attributes = print_quantized_product,
                                     .samples = samples_quantized_grouped_linear};

const OpSpec kQuantizedGroupedLinearDataGradient{
    .name = "quantized_grouped_linear_data_gradient",
    .infer = infer_quantized_grouped_linear_data_gradient,
    .cost = cost_quantized_grouped_linear,
    .cpu = {.kernel = quantized_grouped_linear_data_gradient_cpu_kernel,
            .workspace = workspace_quantized_grouped_linear,
            .scratch = scratch_quantized_grouped_linear},
    .cuda = choose_quantized_grouped_linear_data_gradient,
    .print_attributes = print_quantized_product};

const OpSpec kQuantizedGroupedLinearWeightGradient{
    .name = "quantized_grouped_linear_weight_gradient",
    .infer = infer_quantized_grouped_linear_weight_gradient,
    .cost = cost_quantized_grouped_linear_weight_gradient,
    .cpu = {.kernel = quantized_grouped_linear_weight_gradient_cpu_kernel,
            .workspace = workspace_quantized_grouped_linear_weight_gradient,
            .scratch = scratch_quantized_grouped_linear_weight_gradient},
    .cuda = choose_quantized_grouped_linear_weight_gradient,
    .print_attributes = print_quantized_product};

}  // namespace troupe
