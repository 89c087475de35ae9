#include "ops/precision/quantize_activation/quantize_activation.h"

#include "ops/choose_kernel.h"
#include "ops/precision/cuda/tile_scales.h"
#include "ops/precision/quantized_grouped_linear/quantized_grouped_linear.h"
#include "ops/precision/quantized_linear/quantized_linear.h"
#include "ops/precision/quantized_product.h"
#include "program/op_sample.h"

namespace troupe {

CpuKernel quantize_activation_cpu_kernel(const OpView& op);
CudaKernel quantize_activation_cuda_kernel(const OpView& op);

namespace {

// Of a kind's first inputs; returns the shape of the activation.
Shape check_activated(const InferContext& context, const Value& x, int weights_input) {
  const auto& [codes, activation] = context.attributes<QuantizeActivationAttributes>();
  TROUPE_CHECK(context.input_count() == weights_input + 2 && !activation.stores_input &&
                   codes.top_k == 0 && codes.rule != ScaleRule::fp4 && !codes.rounds &&
                   !codes.part.any(),
               "quantize_activation: not as activations are quantised: " + x.name);
  return activated_shape(context, activation, x, weights_input);
}

void infer_quantize_activation(InferContext& context) {
  Value x = context.input(0);
  x.shape = check_activated(context, x, 3);
  declare_codes(context, context.attributes<QuantizeActivationAttributes>().codes, x);
}

void infer_quantize_activation_gradient(InferContext& context) {
  const Value x = context.input(0);
  const Value& dy = context.input(3);
  TROUPE_CHECK(
      dy.dtype == x.dtype && dy.rows == x.rows && dy.shape == check_activated(context, x, 4),
      "quantize_activation_gradient: dy does not belong to " + x.name);
  declare_codes(context, context.attributes<QuantizeActivationAttributes>().codes, x);
  if (!context.has_input(4)) return;
  const Value weights = context.input(4);
  context.output("d_weights", weights.dtype, weights.shape);
}

bool is_gradient(const OpView& op) {
  return op.op.spec == &kQuantizeActivationGradient;
}

// Of the activation.
Shape activated_shape_of(const OpView& op) {
  const Shape& x = op.input(0).shape;
  const bool gated = op.attributes<QuantizeActivationAttributes>().activation.gated;
  return {x[0], x[1] / (gated ? 2 : 1)};
}

// Of what is made, and quantised.
Shape made_shape(const OpView& op) {
  return is_gradient(op) ? op.input(0).shape : activated_shape_of(op);
}

uint64_t made_bytes(const OpView& op) {
  return aligned_bytes(made_shape(op), op.input(0).dtype);
}

// Steps store what they make, and read it again.
Cost cost_quantize_activation(const OpView& op) {
  const auto& activation = op.attributes<QuantizeActivationAttributes>().activation;
  const int weights_input = is_gradient(op) ? 4 : 3;
  const bool weighted = op.has_input(weights_input);
  const auto elements = static_cast<double>(activated_shape_of(op).elements());
  double bytes = static_cast<double>(op.input(0).bytes());
  if (is_gradient(op)) bytes += static_cast<double>(op.input(3).bytes());
  if (weighted) {
    bytes += activation_weights_bytes(op.input(weights_input), op.input(weights_input + 1));
  }
  for (int i = 0; i < op.op.output_count; ++i) bytes += static_cast<double>(op.output(i).bytes());
  if (!makes_activation_tiles(op)) bytes += 2 * static_cast<double>(made_bytes(op));
  const double flops = is_gradient(op) ? activation_gradient_flops(activation, elements, weighted)
                                       : activation_flops(activation, elements, weighted);
  const double passes = op.has_input(2) ? 1 : 2;
  return {.flops = flops + passes * static_cast<double>(made_shape(op).elements()), .bytes = bytes};
}

uint64_t codes_workspace(const OpView& op) {
  return quantize_workspace(op, op.attributes<QuantizeActivationAttributes>().codes);
}

// Of both steps, one after the other.
uint64_t memory_of_steps(const OpView& op) {
  return made_bytes(op) + codes_workspace(op);
}

uint64_t scratch_quantize_activation(const OpView& op) {
  if (!makes_activation_tiles(op)) return memory_of_steps(op);
  if (!is_gradient(op)) return codes_workspace(op);
  return aligned_bytes(tile_sums_shape(activated_shape_of(op)), DType::f32) + codes_workspace(op);
}

KernelChoice choose_quantize_activation(const OpView& op, const DeviceTraits& device) {
  return make_choice(op, device, makes_activation_tiles(op) ? "tiles" : "steps",
                     TROUPE_CUDA(quantize_activation_cuda_kernel), scratch_quantize_activation);
}

std::string print_quantize_activation(const Attributes& any) {
  const auto& [codes, activation] = any.as<QuantizeActivationAttributes>();
  return print_activation(activation) + " " + print_quantize(codes);
}

// A sample: rows of experts, which begin at `starts`, with the router's weights; or, without
// starts, those of a dense layer.
struct CodesSample {
  int64_t f = 0;
  std::vector<int32_t> starts = {};
  ActivationAttributes activation = {};
  QuantizeAttributes codes = {};
  bool is_given = false;  // the largest elements are
};

// Multiples of 1 / 8 below 2: with relu and weights that are powers of two, products and sums of
// them are exact in every dtype.
std::vector<double> exact_values(int64_t count, int64_t step) {
  std::vector<double> values;
  for (int64_t i = 0; i < count; ++i) {
    values.push_back(static_cast<double>(i * step % 31 - 15) / 8);
  }
  return values;
}

void declare_codes_sample(SampleBuilder& sample, const CodesSample& form, bool is_gradient) {
  Builder& builder = sample.builder();
  SampleBuilder::Options constant;
  constant.differentiable = false;
  const bool of_experts = !form.starts.empty();
  const auto experts = static_cast<int64_t>(form.starts.size()) - 1;
  const int64_t rows = of_experts ? form.starts.back() + 3 : 37;
  const int64_t width = form.f * (form.activation.gated ? 2 : 1);
  const int64_t columns = is_gradient ? width : form.f;
  SampleBuilder::Options ragged = constant;
  ValueId offsets, weights, row_slot;
  if (of_experts) {
    offsets = sample.integers("offsets", {experts + 1}, form.starts);
    ragged.rows = offsets;
    ragged.rows_element = static_cast<int32_t>(experts);
    SampleBuilder::Options wide = constant;
    wide.accumulation = true;
    std::vector<double> powers;
    std::vector<int32_t> slots;
    for (int32_t row = 0; row < rows; ++row) {
      powers.push_back(0.25 * (1 << row % 3));
      slots.push_back(row % 5 == 3 ? -1 : static_cast<int32_t>(rows) - 1 - row);
    }
    weights = sample.values("weights", {rows, 1}, powers, wide);
    row_slot = sample.integers("row_slot", {rows}, slots);
  }
  const ValueId x = sample.values("x", {rows, width}, exact_values(rows * width, 7), ragged);
  ValueId amax;
  if (form.is_given) {
    SampleBuilder::Options before = constant;
    before.dtype = DType::f32;
    const int64_t matrices = of_experts ? experts : 1;
    amax = sample.values("before", {matrices, 1},
                         std::vector<double>(static_cast<size_t>(matrices), 1.5), before);
  }
  const Attributes attributes(
      QuantizeActivationAttributes{.codes = form.codes, .activation = form.activation});
  std::vector<ValueId> outputs;
  if (is_gradient) {
    const ValueId dy = sample.values("dy", {rows, form.f}, exact_values(rows * form.f, 11), ragged);
    outputs = builder.emit(kQuantizeActivationGradient, attributes,
                           {x, offsets, amax, dy, weights, row_slot}, "q");
    if (of_experts) sample.result_without_gradient(outputs.back());
  } else {
    outputs =
        builder.emit(kQuantizeActivation, attributes, {x, offsets, amax, weights, row_slot}, "q");
  }
  const Quantized q = quantized_of(outputs, form.codes);
  if (q.amax.valid()) sample.result_without_gradient(q.amax);
  if (q.rows.codes.valid()) {
    const Shape shape = of_experts ? Shape{experts, 8, columns} : Shape{8, columns};
    const ValueId w = sample.values("w", shape, exact_values(shape.elements(), 13), constant);
    const Codes of_w =
        quantize(builder, w, {}, {}, {DType::f8e4m3, ScaleRule::power_of_two, {}}, "w_q").rows;
    QuantizedProductAttributes product{.compute = sample.dtype()};
    product.operands[0].block = form.codes.block;
    sample.result_without_gradient(
        builder.emit(of_experts ? kQuantizedGroupedLinear : kQuantizedLinear, Attributes(product),
                     {q.rows.codes, of_w.codes, q.rows.scales, of_w.scales, offsets}, "y")[0]);
  }
  if (!q.transposed.codes.valid()) return;
  const auto transposed =
      QuantizedProductAttributes::transposed(form.codes.transposed_block, {rows, columns});
  std::vector<ValueId> inputs = {q.transposed.codes, q.transposed.codes, q.transposed.scales,
                                 q.transposed.scales};
  if (of_experts) inputs.push_back(offsets);
  inputs.push_back({});
  sample.result_without_gradient(builder.emit(
      of_experts ? kQuantizedGroupedLinearWeightGradient : kQuantizedLinearWeightGradient,
      Attributes(QuantizedProductAttributes{.compute = sample.dtype(),
                                            .operands = {transposed, transposed}}),
      inputs, "dw")[0]);
}

std::vector<OpSample> samples_of(bool is_gradient) {
  constexpr ActivationFunction kRelu = ActivationFunction::relu;
  const ActivationAttributes gated{.function = kRelu};
  const ActivationAttributes plain{.function = kRelu, .gated = false};
  const QuantizeAttributes whole{.order = CodesOrder::both, .measures = true};
  const QuantizeAttributes lines{.rule = ScaleRule::power_of_two,
                                 .block = {1, 128},
                                 .order = CodesOrder::both,
                                 .transposed_block = {128, 1}};
  QuantizeAttributes of_gradients = whole;
  if (is_gradient) of_gradients.format = DType::f8e5m2;
  QuantizeAttributes small = lines;
  small.block = {1, 8};
  small.transposed_block = {4, 1};
  QuantizeAttributes in_rows = lines;
  in_rows.order = CodesOrder::rows;
  const std::vector<int32_t> experts = {0, 0, 131, 131, 150};
  const std::vector<std::pair<std::string, CodesSample>> forms = {
      {"given", {136, experts, gated, of_gradients, true}},
      {"given_dense", {40, {}, gated, whole, true}},
      {"given_plain", {136, {}, plain, whole, true}},
      {"given_odd", {5, experts, gated, whole, true}},
      {"lines", {128, experts, gated, lines}},
      {"lines_dense", {128, {}, plain, lines}},
      {"lines_across_halves", {136, {0, 7}, gated, lines}},
      {"lines_in_rows", {256, {0, 7}, gated, in_rows}},
      {"small_blocks", {24, {0, 5, 9}, gated, small}},
      {"clamped",
       {24, {0, 5, 9}, {.function = kRelu, .clamp = 1.25, .linear_offset = 1}, whole, true}},
      {"no_rows", {16, {0, 0, 0}, gated, whole, true}}};
  std::vector<OpSample> samples;
  for (const auto& named : forms) {
    samples.push_back({named.first, [form = named.second, is_gradient](SampleBuilder& sample) {
                         declare_codes_sample(sample, form, is_gradient);
                       }});
  }
  return samples;
}

std::vector<OpSample> samples_quantize_activation() {
  return samples_of(false);
}

std::vector<OpSample> samples_quantize_activation_gradient() {
  return samples_of(true);
}

}  // namespace

// The elements of a tile of gradients lie within a half of a row. Codes of the activation itself,
// and in blocks, are those of e4m3.
bool makes_activation_tiles(const OpView& op) {
  const auto& [codes, activation] = op.attributes<QuantizeActivationAttributes>();
  const int64_t f = activated_shape_of(op)[1];
  const bool is_cut = is_gradient(op) && activation.gated && f % kTransposedRows != 0;
  const bool is_whole = tile_scales(codes) == TileScales::whole && op.has_input(2);
  const bool is_lines = tile_scales(codes) == TileScales::lines && !is_cut;
  return op.input(0).dtype == DType::bf16 && is_made_of_packs(f, DType::bf16) &&
         (is_whole || is_lines) && (codes.format == DType::f8e4m3 || (is_whole && is_gradient(op)));
}

const OpSpec kQuantizeActivation{
    .name = "quantize_activation",
    .infer = infer_quantize_activation,
    .cost = cost_quantize_activation,
    .cpu = {.kernel = quantize_activation_cpu_kernel, .workspace = memory_of_steps},
    .cuda = choose_quantize_activation,
    .print_attributes = print_quantize_activation,
    .samples = samples_quantize_activation};

const OpSpec kQuantizeActivationGradient{
    .name = "quantize_activation_gradient",
    .infer = infer_quantize_activation_gradient,
    .cost = cost_quantize_activation,
    .cpu = {.kernel = quantize_activation_cpu_kernel, .workspace = memory_of_steps},
    .cuda = choose_quantize_activation,
    .print_attributes = print_quantize_activation,
    .samples = samples_quantize_activation_gradient};

}  // namespace troupe
