#include "ops/experts/grouped_bias/grouped_bias.h"

#include <fmt/format.h>
#include <vector>

#include "ops/choose_kernel.h"
#include "program/derivative.h"
#include "program/op_sample.h"

namespace troupe {

CpuKernel grouped_bias_cpu_kernel(const OpView& op);
CpuKernel grouped_bias_weight_gradient_cpu_kernel(const OpView& op);
CpuKernel grouped_bias_probability_gradient_cpu_kernel(const OpView& op);
CudaKernel grouped_bias_cuda_kernel(const OpView& op);
CudaKernel grouped_bias_weight_gradient_cuda_kernel(const OpView& op);
CudaKernel grouped_bias_probability_gradient_cuda_kernel(const OpView& op);

namespace {

// Checks the rows (input 0) and the operands that the kinds of this room share, at their positions.
void check_grouped_bias_inputs(const InferContext& context, int offsets_input,
                               int probabilities_input) {
  const Value& rows = context.input(0);
  const Value& offsets = context.input(offsets_input);
  TROUPE_CHECK(is_float(rows.dtype) && rows.shape.rank() == 2,
               "grouped_bias: not [R, N]: " + rows.name + " " + rows.shape.to_string());
  TROUPE_CHECK(offsets.dtype == DType::i32 && offsets.shape.rank() == 1 && offsets.shape[0] >= 2,
               "grouped_bias: offsets are not i32 [E + 1]: " + offsets.name);
  TROUPE_CHECK(context.has_input(probabilities_input) == context.has_input(probabilities_input + 1),
               "grouped_bias: probabilities and row_slot come together");
  if (!context.has_input(probabilities_input)) return;
  const Value& probabilities = context.input(probabilities_input);
  const Value& row_slot = context.input(probabilities_input + 1);
  TROUPE_CHECK(
      probabilities.dtype == accumulation_dtype(rows.dtype) && probabilities.shape.rank() == 2,
      "grouped_bias: probabilities are not [T, k] in the accumulation dtype: " +
          probabilities.name);
  TROUPE_CHECK(row_slot.dtype == DType::i32 && row_slot.shape == Shape({rows.shape[0]}),
               "grouped_bias: row_slot is not i32 [R]: " + row_slot.name);
}

void check_grouped_bias_bias(const InferContext& context, int offsets_input) {
  const Value& rows = context.input(0);
  const Value& bias = context.input(1);
  int64_t experts = context.input(offsets_input).shape[0] - 1;
  if (context.input_count() == 6) {
    const Value& more = context.input(5);
    TROUPE_CHECK(more.dtype == rows.dtype && more.shape == Shape({more.shape[0], rows.shape[1]}),
                 "grouped_bias: more is not [C, N]: " + more.name + " " + more.shape.to_string());
    experts -= more.shape[0];
  }
  TROUPE_CHECK(bias.dtype == rows.dtype && bias.shape == Shape({experts, rows.shape[1]}),
               "grouped_bias: bias is not [E, N]: " + bias.name + " " + bias.shape.to_string());
}

void infer_grouped_bias(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 5 || context.input_count() == 6,
               "grouped_bias: takes x, bias, offsets, probabilities, row_slot and more biases");
  check_grouped_bias_inputs(context, 2, 3);
  check_grouped_bias_bias(context, 2);
  const Value x = context.input(0);
  context.output("", x.dtype, x.shape, x.rows);
}

void infer_grouped_bias_weight_gradient(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 5,
               "grouped_bias_weight_gradient: takes dy, offsets, probabilities, row_slot, target");
  check_grouped_bias_inputs(context, 1, 2);
  const Value& dy = context.input(0);
  const int64_t experts = context.input(1).shape[0] - 1;
  const auto& a = context.attributes<GroupedBiasWeightGradientAttributes>();
  TROUPE_CHECK(a.first >= 0 && a.experts >= 0 && a.first + a.experts <= experts,
               "grouped_bias_weight_gradient: of experts that are not there");
  declare_weight_gradient(context, 4, "", dy.dtype,
                          {a.experts == 0 ? experts : int64_t{a.experts}, dy.shape[1]});
}

void infer_grouped_bias_probability_gradient(InferContext& context) {
  TROUPE_CHECK(
      (context.input_count() == 5 || context.input_count() == 6) && context.has_input(3),
      "grouped_bias_probability_gradient: takes dy, bias, offsets, probabilities, row_slot, more");
  check_grouped_bias_inputs(context, 2, 3);
  check_grouped_bias_bias(context, 2);
  const Value& probabilities = context.input(3);
  context.output("", probabilities.dtype, probabilities.shape);
}

void differentiate_grouped_bias(DerivativeContext& context) {
  Builder& builder = context.builder();
  const ValueId dy = context.output_gradient(0);
  const ValueId offsets = context.input(2);
  const ValueId probabilities = context.input(3);
  const ValueId row_slot = context.input(4);
  const bool has_more = context.op().op.input_count > 5;
  if (context.wants(0)) context.add_gradient(0, dy);
  const auto differentiate_bias = [&](int input, int32_t first) {
    if (!context.wants(input)) return;
    const auto target = context.weight_target(input);
    const auto experts = static_cast<int32_t>(builder.value(context.input(input)).shape[0]);
    const GroupedBiasWeightGradientAttributes attributes{
        .accumulate = target.accumulate, .first = first, .experts = has_more ? experts : 0};
    context.add_weight_gradient(input,
                                builder.emit(kGroupedBiasWeightGradient, Attributes(attributes),
                                             {dy, offsets, probabilities, row_slot, target.target},
                                             "d_" + context.input_name(input))[0]);
  };
  differentiate_bias(1, 0);
  if (has_more) {
    differentiate_bias(5, static_cast<int32_t>(builder.value(context.input(1)).shape[0]));
  }
  if (context.wants(3)) {
    std::vector<ValueId> operands = {dy, context.input(1), offsets, probabilities, row_slot};
    if (has_more) operands.push_back(context.input(5));
    context.add_gradient(
        3, builder.emit(kGroupedBiasProbabilityGradient, Attributes(NoAttributes()), operands,
                        "d_" + context.input_name(3))[0]);
  }
}

double grouped_bias_bytes(const OpView& op, int first_input, int last_input) {
  double bytes = 0;
  for (int i = first_input; i <= last_input; ++i) {
    if (op.has_input(i)) bytes += static_cast<double>(op.input(i).bytes());
  }
  return bytes;
}

// A product and a sum for each element of the rows.
Cost cost_grouped_bias(const OpView& op) {
  return {.flops = 2 * static_cast<double>(op.input(0).shape.elements()),
          .bytes = grouped_bias_bytes(op, 0, op.op.input_count - 1) +
                   static_cast<double>(op.output(0).bytes())};
}

Cost cost_grouped_bias_weight_gradient(const OpView& op) {
  const bool accumulate = op.attributes<GroupedBiasWeightGradientAttributes>().accumulate;
  return {.flops = 2 * static_cast<double>(op.input(0).shape.elements()),
          .bytes = grouped_bias_bytes(op, 0, 3) +
                   (accumulate ? 2 : 1) * static_cast<double>(op.output(0).bytes())};
}

std::string print_grouped_bias_weight_gradient(const Attributes& attributes) {
  const auto& a = attributes.as<GroupedBiasWeightGradientAttributes>();
  std::string text = a.accumulate ? "accumulate=1" : "";
  if (a.experts > 0) {
    text += fmt::format("{}first={} experts={}", text.empty() ? "" : " ", a.first, a.experts);
  }
  return text;
}

std::vector<OpSample> samples_grouped_bias() {
  struct Case {
    int64_t rows;  // the bound; the live count is the last offset
    int64_t columns;
    std::vector<int32_t> offsets;
    std::vector<int32_t> row_slot;  // empty: without probabilities
    bool ragged = true;
    bool constant_x = false;
    bool constant_probabilities = false;
    int32_t more = 0;  // experts with biases in the second tensor
  };
  const auto with = [](const Case& c) {
    return [=](SampleBuilder& sample) {
      const auto experts = static_cast<int32_t>(c.offsets.size()) - 1;
      const ValueId offsets = sample.integers("offsets", {experts + 1}, c.offsets);
      SampleBuilder::Options options;
      options.differentiable = !c.constant_x;
      if (c.ragged) {
        options.rows = offsets;
        options.rows_element = experts;
      }
      const ValueId x = sample.tensor("x", {c.rows, c.columns}, options);
      const ValueId bias = sample.tensor("bias", {experts - c.more, c.columns});
      GroupedBiasOptions weighting;
      if (c.more > 0) weighting.more = sample.tensor("more", {c.more, c.columns});
      if (!c.row_slot.empty()) {
        weighting.probabilities =
            sample.tensor("probabilities", {c.rows / 2, 2},
                          {.differentiable = !c.constant_probabilities, .accumulation = true});
        weighting.row_slot = sample.integers("row_slot", {c.rows}, c.row_slot);
      }
      sample.result(grouped_bias(sample.builder(), x, bias, offsets, weighting, "y"));
    };
  };
  // One bias added twice, so that its gradients from both must be summed, also for the expert
  // without rows.
  const auto shared = [](SampleBuilder& sample) {
    const ValueId offsets = sample.integers("offsets", {4}, {0, 4, 4, 9});
    SampleBuilder::Options options;
    options.rows = offsets;
    options.rows_element = 3;
    const ValueId x = sample.tensor("x", {12, 5}, options);
    const ValueId bias = sample.tensor("bias", {3, 5});
    const ValueId once = grouped_bias(sample.builder(), x, bias, offsets, {}, "once");
    sample.result(grouped_bias(sample.builder(), once, bias, offsets, {}, "y"));
  };
  std::vector<int32_t> many_slots;
  for (int32_t r = 0; r < 700; ++r) many_slots.push_back(r % 9 == 4 ? -1 : r * 11 % 700);
  return {
      {"zero row experts", with({20, 5, {0, 0, 6, 6, 17, 17}, {}})},
      {"no rows at all", with({4, 3, {0, 0, 0}, {}})},
      {"one of everything", with({1, 1, {0, 1}, {}})},
      {"dense", with({10, 17, {0, 3, 10}, {}, false})},
      {"probabilities with fillers",
       with({10, 19, {0, 3, 3, 8}, {7, -1, 0, 3, 2, -5, 1000, 9, 4, 4}})},
      {"probabilities without rows", with({4, 3, {0, 0, 0}, {0, 1, 2, 3}})},
      {"constant x", with({6, 4, {0, 2, 5}, {5, 0, 4, 1, 2, 3}, true, true})},
      {"constant probabilities", with({4, 4, {0, 2, 4}, {3, 0, 1, 2}, true, false, true})},
      {"several chunks", with({700, 50, {0, 390, 390, 690}, many_slots, true, true})},
      {"several tiles of columns", with({4, 270, {0, 3}, {3, 0, 1, 2}, true, true})},
      {"two biases", with({20, 5, {0, 3, 6, 6, 17}, {}, true, false, false, 2})},
      {"two biases, probabilities with fillers",
       with({10, 19, {0, 3, 3, 8}, {7, -1, 0, 3, 2, -5, 1000, 9, 4, 4}, true, false, false, 1})},
      {"shared bias", shared}};
}

}  // namespace

ValueId grouped_bias(Builder& builder, ValueId x, ValueId bias, ValueId offsets,
                     const GroupedBiasOptions& options, const std::string& name) {
  std::vector<ValueId> inputs = {x, bias, offsets, options.probabilities, options.row_slot};
  if (options.more.valid()) inputs.push_back(options.more);
  return builder.emit(kGroupedBias, Attributes(NoAttributes()), inputs, name)[0];
}

const OpSpec kGroupedBias{.name = "grouped_bias",
                          .infer = infer_grouped_bias,
                          .differentiate = differentiate_grouped_bias,
                          .cost = cost_grouped_bias,
                          .cpu = {.kernel = grouped_bias_cpu_kernel},
                          .cuda = only_kernel<TROUPE_CUDA(grouped_bias_cuda_kernel)>,
                          .in_place = {.output = 0, .input = 0},
                          .samples = samples_grouped_bias};

const OpSpec kGroupedBiasWeightGradient{
    .name = "grouped_bias_weight_gradient",
    .infer = infer_grouped_bias_weight_gradient,
    .cost = cost_grouped_bias_weight_gradient,
    .cpu = {.kernel = grouped_bias_weight_gradient_cpu_kernel},
    .cuda = only_kernel<TROUPE_CUDA(grouped_bias_weight_gradient_cuda_kernel)>,
    .print_attributes = print_grouped_bias_weight_gradient};

const OpSpec kGroupedBiasProbabilityGradient{
    .name = "grouped_bias_probability_gradient",
    .infer = infer_grouped_bias_probability_gradient,
    .cost = cost_grouped_bias,
    .cpu = {.kernel = grouped_bias_probability_gradient_cpu_kernel},
    .cuda = only_kernel<TROUPE_CUDA(grouped_bias_probability_gradient_cuda_kernel)>};

}  // namespace troupe
