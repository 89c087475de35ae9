#include "ops/experts/grouped_linear/grouped_linear.h"

#include <algorithm>
#include <fmt/format.h>
#include <vector>

#include "ops/choose_kernel.h"
#include "ops/costs.h"
#include "ops/cpu/grouped_gemm.h"
#include "ops/experts/grouped_linear/grouped_linear_cpu.h"
#include "ops/experts/grouped_linear/grouped_variant.h"
#include "ops/precision/quantized_grouped_linear/quantized_grouped_linear.h"
#include "program/derivative.h"
#include "program/op_sample.h"

namespace troupe {

CudaKernel grouped_linear_cuda_kernel(const OpView& op, GroupedVariant variant);
CudaKernel grouped_linear_data_gradient_cuda_kernel(const OpView& op, GroupedVariant variant);
CudaKernel grouped_linear_weight_gradient_cuda_kernel(const OpView& op, GroupedVariant variant);

namespace {

bool is_group_offsets(const Value& offsets, int64_t experts) {
  return offsets.dtype == DType::i32 && offsets.shape == Shape({experts + 1});
}

// How many experts the weights are of: inputs 1 and 3.
int64_t experts_of(const InferContext& context, const std::string& kind) {
  const Value& weight = context.input(1);
  if (context.input_count() == 3) return weight.shape[0];
  const Value& more = context.input(3);
  TROUPE_CHECK(
      more.dtype == weight.dtype && more.shape.rank() == 3 && more.shape[1] == weight.shape[1] &&
          more.shape[2] == weight.shape[2],
      kind + ": weight " + weight.shape.to_string() + " and more " + more.shape.to_string());
  return weight.shape[0] + more.shape[0];
}

void infer_grouped_linear(InferContext& context) {
  const Value& x = context.input(0);
  const Value& weight = context.input(1);
  TROUPE_CHECK(
      is_float(x.dtype) && x.dtype == weight.dtype && x.shape.rank() == 2 &&
          weight.shape.rank() == 3 && x.shape[1] == weight.shape[2],
      "grouped_linear: x " + x.shape.to_string() + " and weight " + weight.shape.to_string());
  TROUPE_CHECK(is_group_offsets(context.input(2), experts_of(context, "grouped_linear")),
               "grouped_linear: offsets " + context.input(2).shape.to_string());
  context.output("", x.dtype, {x.shape[0], weight.shape[1]}, x.rows);
}

void infer_grouped_linear_data_gradient(InferContext& context) {
  const Value& dy = context.input(0);
  const Value& weight = context.input(1);
  TROUPE_CHECK(is_float(dy.dtype) && dy.dtype == weight.dtype && dy.shape.rank() == 2 &&
                   weight.shape.rank() == 3 && dy.shape[1] == weight.shape[1],
               "grouped_linear_data_gradient: dy " + dy.shape.to_string() + " and weight " +
                   weight.shape.to_string());
  TROUPE_CHECK(
      is_group_offsets(context.input(2), experts_of(context, "grouped_linear_data_gradient")),
      "grouped_linear_data_gradient: offsets " + context.input(2).shape.to_string());
  context.output("", dy.dtype, {dy.shape[0], weight.shape[2]}, dy.rows);
}

void infer_grouped_linear_weight_gradient(InferContext& context) {
  const Value& dy = context.input(0);
  const Value& x = context.input(1);
  const Value& offsets = context.input(2);
  TROUPE_CHECK(is_float(dy.dtype) && dy.dtype == x.dtype && dy.shape.rank() == 2 &&
                   x.shape.rank() == 2 && dy.shape[0] == x.shape[0],
               "grouped_linear_weight_gradient: dy " + dy.shape.to_string() + " and x " +
                   x.shape.to_string());
  const int64_t experts = offsets.shape[0] - 1;
  TROUPE_CHECK(experts >= 1 && is_group_offsets(offsets, experts),
               "grouped_linear_weight_gradient: offsets " + offsets.shape.to_string());
  const auto& a = context.attributes<GroupedLinearWeightGradientAttributes>();
  TROUPE_CHECK(a.first >= 0 && a.experts >= 0 && a.first + a.experts <= experts,
               "grouped_linear_weight_gradient: of experts that are not there");
  declare_weight_gradient(context, 3, "", x.dtype,
                          {a.experts == 0 ? experts : int64_t{a.experts}, dy.shape[1], x.shape[1]});
}

void differentiate_grouped_linear(DerivativeContext& context) {
  Builder& builder = context.builder();
  const ValueId dy = context.output_gradient(0);
  const ValueId offsets = context.input(2);
  const bool has_more = context.op().op.input_count > 3;
  std::vector<ValueId> operands = {dy, context.input(1), offsets};
  if (has_more) operands.push_back(context.input(3));
  if (context.wants(0)) {
    context.add_gradient(0, builder.emit(kGroupedLinearDataGradient, Attributes(NoAttributes()),
                                         operands, "d_" + context.input_name(0))[0]);
  }
  const auto differentiate_weight = [&](int input, int32_t first, int64_t experts) {
    if (!context.wants(input)) return;
    const auto target = context.weight_target(input);
    const GroupedLinearWeightGradientAttributes attributes{
        .accumulate = target.accumulate,
        .first = first,
        .experts = has_more ? static_cast<int32_t>(experts) : 0};
    context.add_weight_gradient(input,
                                builder.emit(kGroupedLinearWeightGradient, Attributes(attributes),
                                             {dy, context.input(0), offsets, target.target},
                                             "d_" + context.input_name(input))[0]);
  };
  const int64_t experts = builder.value(context.input(1)).shape[0];
  differentiate_weight(1, 0, experts);
  if (!has_more) return;
  differentiate_weight(3, static_cast<int32_t>(experts), builder.value(context.input(3)).shape[0]);
}

double grouped_bytes(const Value& value) {
  return static_cast<double>(value.bytes());
}

bool has_more_weights(const OpView& op) {
  return op.op.input_count > 3;
}

int64_t experts_of(const OpView& op) {
  return op.input(2).shape[0] - 1;
}

// Each row meets the weight of one expert.
Cost cost_grouped_linear(const OpView& op) {
  const double rows = static_cast<double>(op.input(0).shape[0]);
  const Shape& weight = op.input(1).shape;
  return product_cost(2 * rows * static_cast<double>(weight.row_elements()), op.input(0).dtype,
                      grouped_bytes(op.input(0)) + grouped_bytes(op.input(1)) +
                          grouped_bytes(op.input(2)) + grouped_bytes(op.output(0)) +
                          (has_more_weights(op) ? grouped_bytes(op.input(3)) : 0));
}

Cost cost_grouped_linear_weight_gradient(const OpView& op) {
  const bool accumulate = op.attributes<GroupedLinearWeightGradientAttributes>().accumulate;
  // Of the rows of some experts as many as they are of all.
  const double share =
      static_cast<double>(op.output(0).shape[0]) / static_cast<double>(experts_of(op));
  const double rows = share * static_cast<double>(op.input(0).shape[0]);
  return product_cost(
      2 * rows * static_cast<double>(op.output(0).shape.row_elements()), op.input(0).dtype,
      share * (grouped_bytes(op.input(0)) + grouped_bytes(op.input(1))) +
          grouped_bytes(op.input(2)) + (accumulate ? 2 : 1) * grouped_bytes(op.output(0)));
}

uint64_t workspace_grouped_linear(const OpView& op) {
  return grouped_rows_bytes(experts_of(op));
}

uint64_t scratch_grouped_linear(const OpView& op) {
  const Shape& x = op.input(0).shape;
  const DType dtype = op.input(0).dtype;
  return gemm_scratch_bytes(grouped_tiles(x[0], op.output(0).shape[1], x[1]), dtype, dtype, dtype);
}

uint64_t scratch_grouped_linear_weight_gradient(const OpView& op) {
  return gemm_scratch_bytes(
      grouped_weight_gradient_tiles(op.input(0).shape, op.input(1).shape, op.output(0).shape[0]),
      op.input(0).dtype, op.input(1).dtype, op.output(0).dtype);
}

// The kernel of grouped_product_sm90.cuh is for bf16 and f16 on Hopper.
SlowKernel slow_grouped_product(const OpView& op, const DeviceTraits& device) {
  if (!is_half(op.input(0).dtype)) return SlowKernel::dtype;
  if (device.major() != 9) return SlowKernel::compute_capability;
  return has_tiled_operands(op, op.input(0).dtype) ? SlowKernel::no : SlowKernel::row_bytes;
}

const char* name_of_grouped(GroupedVariant variant) {
  switch (variant) {
    case GroupedVariant::plain:
      return "plain tiles";
    case GroupedVariant::sm90:
      return "sm90";
    case GroupedVariant::sm90_pair:
      return "sm90 pair";
  }
  return nullptr;
}

// `rows`: of a group's result. `select`: the function for a variant, nullptr without CUDA.
KernelChoice choose_grouped(const OpView& op, const DeviceTraits& device, int64_t rows,
                            CudaKernel (*select)(const OpView&, GroupedVariant)) {
  const SlowKernel slow = slow_grouped_product(op, device);
  GroupedVariant variant = GroupedVariant::plain;
  if (slow == SlowKernel::no) {
    variant = tiled_variant(rows);
  }
  KernelChoice choice = make_choice(op, device, name_of_grouped(variant), nullptr);
  if (select != nullptr) choice.function = select(op, variant);
  choice.slow = slow;
  // The tiled ones are persistent: each tile is summed by one block, whichever that is.
  if (variant != GroupedVariant::plain) {
    choice.multiprocessors = multiprocessors_of(op, device);
  }
  return choice;
}

KernelChoice choose_grouped_linear(const OpView& op, const DeviceTraits& device) {
  return choose_grouped(op, device, expected_rows_of_group(op.input(0), experts_of(op)),
                        TROUPE_CUDA(grouped_linear_cuda_kernel));
}

KernelChoice choose_grouped_linear_data_gradient(const OpView& op, const DeviceTraits& device) {
  return choose_grouped(op, device, expected_rows_of_group(op.input(0), experts_of(op)),
                        TROUPE_CUDA(grouped_linear_data_gradient_cuda_kernel));
}

KernelChoice choose_grouped_linear_weight_gradient(const OpView& op, const DeviceTraits& device) {
  return choose_grouped(op, device, op.output(0).shape[1],
                        TROUPE_CUDA(grouped_linear_weight_gradient_cuda_kernel));
}

bool grouped_weight_gradient_accumulates(const Attributes& attributes) {
  return attributes.as<GroupedLinearWeightGradientAttributes>().accumulate;
}

using Operand = QuantizedForm::Operand;

const QuantizedForm kQuantizedForm{
    .kind = &kQuantizedGroupedLinear,
    .operands = {Operand{Operand::Kind::activation, true}, Operand{Operand::Kind::weight, true}},
    .offsets = 2};

const QuantizedForm kQuantizedDataGradientForm{
    .kind = &kQuantizedGroupedLinearDataGradient,
    .operands = {Operand{Operand::Kind::gradient, true}, Operand{Operand::Kind::weight, false}},
    .offsets = 2};

const QuantizedForm kQuantizedWeightGradientForm{
    .kind = &kQuantizedGroupedLinearWeightGradient,
    .operands = {Operand{Operand::Kind::gradient, false},
                 Operand{Operand::Kind::activation, false}},
    .offsets = 2,
    .accumulates = grouped_weight_gradient_accumulates};

std::string print_grouped_linear_weight_gradient(const Attributes& attributes) {
  const auto& a = attributes.as<GroupedLinearWeightGradientAttributes>();
  std::string text = a.accumulate ? "accumulate=1" : "";
  if (a.experts > 0) {
    text += fmt::format("{}first={} experts={}", text.empty() ? "" : " ", a.first, a.experts);
  }
  return text;
}

std::vector<OpSample> samples_grouped_linear() {
  struct Sizes {
    int64_t rows;  // the bound; the live count is the last offset
    int64_t inputs;
    int64_t outputs;
    std::vector<int32_t> offsets;
    bool ragged = true;
  };
  const auto with = [](const Sizes& sizes) {
    return [=](SampleBuilder& sample) {
      const auto experts = static_cast<int32_t>(sizes.offsets.size()) - 1;
      const ValueId offsets = sample.integers("offsets", {experts + 1}, sizes.offsets);
      SampleBuilder::Options options;
      if (sizes.ragged) {
        options.rows = offsets;
        options.rows_element = experts;
      }
      const ValueId x = sample.tensor("x", {sizes.rows, sizes.inputs}, options);
      const ValueId weight = sample.tensor("weight", {experts, sizes.outputs, sizes.inputs});
      sample.result(grouped_linear(sample.builder(), x, weight, offsets, "y"));
    };
  };
  // One weight in two products, so that its gradients from both must be summed, also for the expert
  // without rows.
  const auto shared = [](SampleBuilder& sample) {
    const ValueId offsets = sample.integers("offsets", {4}, {0, 4, 4, 9});
    SampleBuilder::Options options;
    options.rows = offsets;
    options.rows_element = 3;
    const ValueId x = sample.tensor("x", {12, 5}, options);
    const ValueId weight = sample.tensor("weight", {3, 5, 5});
    const ValueId hidden = grouped_linear(sample.builder(), x, weight, offsets, "hidden");
    sample.result(grouped_linear(sample.builder(), hidden, weight, offsets, "y"));
  };
  // One expert with several row tiles and another with less than one.
  const auto uneven = [](SampleBuilder& sample) {
    const ValueId offsets = sample.integers("offsets", {4}, {0, 530, 530, 577});
    SampleBuilder::Options options;
    options.rows = offsets;
    options.rows_element = 3;
    options.differentiable = false;
    const ValueId x = sample.tensor("x", {640, 9}, options);
    const ValueId weight = sample.tensor("weight", {3, 4, 9});
    sample.result(grouped_linear(sample.builder(), x, weight, offsets, "y"));
  };
  // The last experts have weights of their own, which are used by themselves as well.
  const auto two_weights = [](const std::vector<int32_t>& offsets_of, int64_t more_experts) {
    return [=](SampleBuilder& sample) {
      const auto experts = static_cast<int32_t>(offsets_of.size()) - 1;
      const ValueId offsets = sample.integers("offsets", {experts + 1}, offsets_of);
      SampleBuilder::Options options;
      options.rows = offsets;
      options.rows_element = experts;
      const ValueId x = sample.tensor("x", {19, 6}, options);
      const ValueId weight = sample.tensor("weight", {experts - more_experts, 5, 6});
      const ValueId more = sample.tensor("more", {more_experts, 5, 6});
      sample.result(grouped_linear(sample.builder(), x, weight, offsets, "y", more));
    };
  };
  return {{"zero_row_experts", with({20, 7, 5, {0, 0, 6, 6, 17, 17}})},
          {"no_rows_at_all", with({4, 3, 2, {0, 0, 0}})},
          {"one_expert", with({9, 4, 3, {0, 8}})},
          {"one_of_everything", with({1, 1, 1, {0, 1}})},
          {"dense", with({10, 6, 17, {0, 3, 10}, false})},
          {"shared_weight", shared},
          {"uneven_tiles", uneven},
          {"two_weights", two_weights({0, 4, 4, 9, 12, 17}, 2)},
          {"more_in_the_second_weight", two_weights({0, 3, 3, 8}, 2)},
          {"no_rows_of_the_second_weight", two_weights({0, 7, 11, 11}, 1)}};
}

}  // namespace

ValueId grouped_linear(Builder& builder, ValueId x, ValueId weight, ValueId offsets,
                       const std::string& name, ValueId more) {
  std::vector<ValueId> inputs = {x, weight, offsets};
  if (more.valid()) inputs.push_back(more);
  return builder.emit(kGroupedLinear, Attributes(NoAttributes()), inputs, name)[0];
}

const OpSpec kGroupedLinear{.name = "grouped_linear",
                            .infer = infer_grouped_linear,
                            .differentiate = differentiate_grouped_linear,
                            .cost = cost_grouped_linear,
                            .cpu = {.kernel = grouped_linear_cpu_kernel,
                                    .workspace = workspace_grouped_linear,
                                    .scratch = scratch_grouped_linear},
                            .cuda = choose_grouped_linear,
                            .quantized = &kQuantizedForm,
                            .samples = samples_grouped_linear};

const OpSpec kGroupedLinearDataGradient{.name = "grouped_linear_data_gradient",
                                        .infer = infer_grouped_linear_data_gradient,
                                        .cost = cost_grouped_linear,
                                        .cpu = {.kernel = grouped_linear_data_gradient_cpu_kernel,
                                                .workspace = workspace_grouped_linear,
                                                .scratch = scratch_grouped_linear},
                                        .cuda = choose_grouped_linear_data_gradient,
                                        .quantized = &kQuantizedDataGradientForm};

const OpSpec kGroupedLinearWeightGradient{
    .name = "grouped_linear_weight_gradient",
    .infer = infer_grouped_linear_weight_gradient,
    .cost = cost_grouped_linear_weight_gradient,
    .cpu = {.kernel = grouped_linear_weight_gradient_cpu_kernel,
            .scratch = scratch_grouped_linear_weight_gradient},
    .cuda = choose_grouped_linear_weight_gradient,
    .print_attributes = print_grouped_linear_weight_gradient,
    .quantized = &kQuantizedWeightGradientForm};

}  // namespace troupe
