#include "ops/precision/quantize/quantize.h"

#include <fmt/format.h>

#include "ops/choose_kernel.h"
#include "ops/costs.h"
#include "ops/precision/cuda/tile_scales.h"
#include "ops/routing/route/route.h"
#include "program/op_sample.h"

namespace troupe {

CpuKernel quantize_cpu_kernel(const OpView& op);
CpuKernel block_amax_cpu_kernel(const OpView& op);
CudaKernel quantize_cuda_kernel(const OpView& op);
CudaKernel block_amax_cuda_kernel(const OpView& op);

namespace {

// What is quantised: x, or rows gathered from it.
Value source_of(InferContext& context) {
  Value x = context.input(0);
  if (context.input_count() <= 3) return x;
  const Value& row_slot = context.input(3);
  TROUPE_CHECK(x.shape.rank() == 2 && row_slot.dtype == DType::i32 && row_slot.rows.valid() &&
                   row_slot.shape.rank() == 1,
               "quantize: row_slot " + row_slot.shape.to_string() + " of " + x.name);
  x.shape = {row_slot.shape[0], x.shape[1]};
  x.rows = row_slot.rows;
  return x;
}

// Of x with offsets or without, input 1; their number or 0.
int64_t check_blocks(InferContext& context, const Value& x, BlockShape block,
                     const std::string& kind) {
  TROUPE_CHECK(is_float(x.dtype) && (x.shape.rank() == 2 || x.shape.rank() == 3) &&
                   block.rows >= 0 && block.columns >= 0,
               kind + ": x " + x.shape.to_string() + " in blocks of " + to_string(block));
  if (!context.has_input(1)) {
    TROUPE_CHECK(!x.rows.valid() || block.rows == 1,
                 kind + ": ragged rows without offsets share a scale: " + x.name);
    return 0;
  }
  const Value& offsets = context.input(1);
  TROUPE_CHECK(x.shape.rank() == 2 && offsets.dtype == DType::i32 && offsets.shape.rank() == 1,
               kind + ": offsets " + offsets.shape.to_string());
  return offsets.shape[0] - 1;
}

// With `part`, those of its matrices.
Shape shape_of_scales(const Value& x, BlockShape block, int64_t experts, const MatrixRows& part) {
  if (!part.any()) return scales_shape(x.shape, block, experts);
  TROUPE_CHECK(x.shape.rank() == 2 && experts == 0 && !x.rows.valid() && block == BlockShape{} &&
                   part.first + x.shape[0] <= part.matrices * part.rows,
               "quantize: not rows of matrices with one scale each: " + x.name);
  return {part.matrices, 1, 1};
}

RowCount rows_of_scales(const Value& x, BlockShape block) {
  return block.rows == 1 ? x.rows : RowCount{};
}

// Transposed codes with scales of their own, where there are any.
void declare_transposed(InferContext& context, const Value& x, const QuantizeAttributes& attributes,
                        int64_t experts) {
  TROUPE_CHECK(attributes.transposed_block.rows != 1,
               "quantize: transposed codes in blocks of one row: " + x.name);
  // All blocks are written, and fewer expected where fewer rows are.
  const auto blocks_of = [&](int32_t rows) {
    RowCount blocks;
    if (x.rows.expected > 0 && rows > 0) blocks.expected = x.rows.expected / rows + experts;
    return blocks;
  };
  context.output("transposed", attributes.format, transposed_shape(x.shape, experts),
                 blocks_of(kTransposedRows));
  if (attributes.shares_scales()) return;
  const BlockShape block = attributes.transposed_block;
  context.output("transposed_scales", scale_dtype(attributes.rule),
                 scales_shape(x.shape, block, experts), blocks_of(block.rows));
}

void infer_quantize(InferContext& context) {
  const auto attributes = context.attributes<QuantizeAttributes>();
  const Value x = source_of(context);
  TROUPE_CHECK(context.input_count() == (attributes.top_k > 0 ? 4 : 3),
               "quantize: slots of " + x.name);
  declare_codes(context, attributes, x);
}

void infer_block_amax(InferContext& context) {
  const auto [block, part, rounds, rotates] = context.attributes<BlockAmaxAttributes>();
  TROUPE_CHECK(!rotates || (block == BlockShape{} && !part.any()),
               "block_amax: rotated matrices are whole");
  TROUPE_CHECK(!rounds || context.input(0).dtype == DType::f32, "block_amax: bf16 of f32");
  const Value x = context.input(0);
  const int64_t experts = check_blocks(context, x, block, "block_amax");
  context.output("", DType::f32, shape_of_scales(x, block, experts, part),
                 rows_of_scales(x, block));
}

Cost cost_quantize(const OpView& op) {
  const auto& attributes = op.attributes<QuantizeAttributes>();
  const double passes = op.has_input(2) ? 1 : 2;
  // One scale for a whole matrix has to be found before.
  const bool is_whole =
      (attributes.has_rows() ? attributes.block : attributes.transposed_block) == BlockShape{};
  const bool gathers = attributes.top_k > 0;
  const int64_t rows = gathers ? op.input(3).shape[0] : op.input(0).shape[0];
  const int64_t elements = rows * op.input(0).shape.row_elements();
  uint64_t bytes = static_cast<uint64_t>(elements) * size_of(op.input(0).dtype);
  if (is_whole && !op.has_input(2)) bytes *= 2;
  if (gathers) bytes += op.input(3).bytes();
  for (int i = 0; i < op.op.output_count; ++i) bytes += op.output(i).bytes();
  return {.flops = passes * static_cast<double>(elements), .bytes = static_cast<double>(bytes)};
}

Cost cost_block_amax(const OpView& op) {
  return {.flops = static_cast<double>(op.input(0).shape.elements()),
          .bytes = static_cast<double>(op.input(0).bytes() + op.output(0).bytes())};
}

uint64_t workspace_quantize(const OpView& op) {
  return quantize_workspace(op, op.attributes<QuantizeAttributes>());
}

KernelChoice choose_quantize(const OpView& op, const DeviceTraits& device) {
  const bool packs = is_made_of_packs(row_elements_of_input(op), op.input(0).dtype);
  const char* variant = packs ? "packs" : "elements";
  if (op.attributes<QuantizeAttributes>().rule == ScaleRule::fp4) variant = "blocks";
  if (quantizes_tiles(op.attributes<QuantizeAttributes>(), op.input(0))) variant = "tiles";
  return make_choice(op, device, variant, TROUPE_CUDA(quantize_cuda_kernel), workspace_quantize);
}

std::string name_of_rule(ScaleRule rule) {
  switch (rule) {
    case ScaleRule::ratio:
      return "ratio";
    case ScaleRule::power_of_two:
      return "power-of-two";
    case ScaleRule::exponent:
      return "e8m0";
    case ScaleRule::fp4:
      return "fp4";
  }
  return "?";
}

std::string print_source(const MatrixRows& part, bool rounds) {
  std::string text = rounds ? " of=bf16" : "";
  if (part.any()) {
    text += fmt::format(" first={} matrices={}x{}", part.first, part.matrices, part.rows);
  }
  return text;
}

std::string print_quantize_attributes(const Attributes& attributes) {
  return print_quantize(attributes.as<QuantizeAttributes>());
}

std::string print_block_amax(const Attributes& attributes) {
  const auto& values = attributes.as<BlockAmaxAttributes>();
  return "block=" + to_string(values.block) + print_source(values.part, values.rounds) +
         (values.rotates ? " rotated=1" : "");
}

// Codes are no results: products of other samples compare them.
void declare_results(SampleBuilder& sample, const Quantized& quantized) {
  if (quantized.rows.scales.valid()) sample.result_without_gradient(quantized.rows.scales);
  if (quantized.transposed.scales.valid() && quantized.transposed.scales != quantized.rows.scales) {
    sample.result_without_gradient(quantized.transposed.scales);
  }
  if (quantized.amax.valid()) sample.result_without_gradient(quantized.amax);
}

std::vector<OpSample> samples_quantize() {
  const auto dense = [](const Shape& shape, const QuantizeAttributes& attributes, bool given) {
    return [=](SampleBuilder& sample) {
      SampleBuilder::Options constant;
      constant.differentiable = false;
      // The same numbers in all dtypes, so that all have the same codes.
      constant.dtype = DType::bf16;
      const ValueId x = sample.tensor("x", shape, constant);
      ValueId amax;
      if (given) {
        amax = block_amax(sample.builder(), x, {}, {.block = attributes.block}, "amax");
        sample.result_without_gradient(amax);
      }
      const Quantized quantized = quantize(sample.builder(), x, {}, amax, attributes, "q");
      declare_results(sample, quantized);
    };
  };
  // Rows 3 on of four matrices of five rows, of the last of which there are none.
  const auto cut_matrices = [](SampleBuilder& sample) {
    SampleBuilder::Options constant;
    constant.differentiable = false;
    constant.dtype = DType::bf16;
    const ValueId x = sample.tensor("x", {9, 7}, constant);
    const MatrixRows part{.first = 3, .rows = 5, .matrices = 4};
    const ValueId amax = block_amax(sample.builder(), x, {}, {.part = part}, "amax");
    sample.result_without_gradient(amax);
    declare_results(sample,
                    quantize(sample.builder(), x, {}, amax, {.measures = true, .part = part}, "q"));
  };
  // In 4 bits: of a matrix, of several, or of the rows of experts.
  const auto fp4 = [](const Shape& shape, const std::vector<int32_t>& starts,
                      const QuantizeAttributes& attributes) {
    return [=](SampleBuilder& sample) {
      SampleBuilder::Options constant;
      constant.differentiable = false;
      constant.dtype = DType::bf16;
      ValueId offsets;
      if (!starts.empty()) {
        offsets = sample.integers("offsets", {std::ssize(starts)}, starts);
        constant.rows = offsets;
        constant.rows_element = static_cast<int32_t>(starts.size()) - 1;
      }
      const ValueId x = sample.tensor("x", shape, constant);
      const ValueId amax =
          block_amax(sample.builder(), x, offsets, {.rotates = attributes.rotates}, "amax");
      sample.result_without_gradient(amax);
      declare_results(sample, quantize(sample.builder(), x, offsets, amax, attributes, "q"));
    };
  };
  // With `given`, scales are those of other numbers, and the rows' own largest elements measured.
  const auto rows = [](const QuantizeAttributes& attributes, const std::vector<int32_t>& starts,
                       bool given = false) {
    return [=](SampleBuilder& sample) {
      const auto experts = static_cast<int32_t>(starts.size()) - 1;
      const ValueId offsets = sample.integers("offsets", {experts + 1}, starts);
      SampleBuilder::Options options;
      options.rows = offsets;
      options.rows_element = experts;
      options.differentiable = false;
      options.dtype = DType::bf16;
      const ValueId x = sample.tensor("x", {starts.back() + 3, 10}, options);
      ValueId amax;
      if (given) {
        SampleBuilder::Options constant;
        constant.differentiable = false;
        constant.dtype = DType::f32;
        amax = sample.values("amax", {experts, 1},
                             std::vector<double>(static_cast<size_t>(experts), 2), constant);
      }
      const Quantized quantized = quantize(sample.builder(), x, offsets, amax, attributes, "q");
      declare_results(sample, quantized);
    };
  };
  // Rows gathered from tokens; of expert 2 there are none, of the others fillers.
  const auto gathered = [](QuantizeAttributes attributes) {
    attributes.top_k = 2;
    return [=](SampleBuilder& sample) {
      const ValueId indices = sample.integers("indices", {5, 2}, {3, 0, 1, 3, 0, 1, 3, -1, 0, 3});
      const Routing routing =
          route(sample.builder(), indices, {.experts = 4, .row_multiple = 4}, "routing");
      SampleBuilder::Options constant;
      constant.differentiable = false;
      constant.dtype = DType::bf16;
      const ValueId x = sample.tensor("x", {5, 10}, constant);
      ValueId amax;
      if (attributes.measures) {
        constant.dtype = DType::f32;
        amax = sample.values("amax", {4, 1}, std::vector<double>(4, 0.5), constant);
      }
      declare_results(sample, quantize(sample.builder(), x, routing.offsets, amax, attributes, "q",
                                       routing.row_slot));
    };
  };
  constexpr DType kE4 = DType::f8e4m3;
  constexpr DType kE5 = DType::f8e5m2;
  return {
      {"gathered", gathered({.order = CodesOrder::both, .measures = true})},
      {"gathered_in_blocks",
       gathered(
           {kE4, ScaleRule::power_of_two, {1, 8}, CodesOrder::both, /*transposed_block=*/{4, 1}})},
      {"tensor", dense({9, 17}, {kE4, ScaleRule::ratio, {}}, false)},
      {"tensor_e5m2", dense({300, 200}, {kE5, ScaleRule::ratio, {}}, false)},
      {"tensor_amax_given", dense({9, 17}, {kE4, ScaleRule::ratio, {}}, true)},
      {"tensor_measured",
       dense({9, 17}, {.format = kE5, .order = CodesOrder::transposed, .measures = true}, true)},
      {"rows_of_experts_measured",
       rows({.order = CodesOrder::both, .measures = true}, {0, 0, 6, 6, 17, 17}, true)},
      {"experts", dense({3, 5, 7}, {kE4, ScaleRule::ratio, {}}, false)},
      {"matrices_that_are_cut", cut_matrices},
      {"fp4_rows",
       fp4({5, 37}, {}, {.rule = ScaleRule::fp4, .block = {1, 16}, .is_stochastic = true})},
      {"fp4_rows_of_experts",
       fp4({40, 37}, {0, 0, 9, 37}, {.rule = ScaleRule::fp4, .block = {1, 16}})},
      {"fp4_squares", fp4({2, 33, 20}, {},
                          {.rule = ScaleRule::fp4,
                           .block = {16, 16},
                           .order = CodesOrder::both,
                           .transposed_block = {16, 16}})},
      {"fp4_columns", fp4({35, 6}, {},
                          {.rule = ScaleRule::fp4,
                           .order = CodesOrder::transposed,
                           .transposed_block = {16, 1},
                           .rotates = true})},
      {"fp4_columns_of_experts", fp4({60, 6}, {0, 3, 3, 36, 52},
                                     {.rule = ScaleRule::fp4,
                                      .order = CodesOrder::transposed,
                                      .transposed_block = {16, 1},
                                      .rotates = true,
                                      .is_stochastic = true})},
      {"row_blocks", dense({5, 300}, {kE4, ScaleRule::power_of_two, {1, 128}}, false)},
      {"column_blocks", dense({300, 5}, {kE4, ScaleRule::power_of_two, {128, 1}}, false)},
      {"square_blocks", dense({2, 130, 129}, {kE4, ScaleRule::power_of_two, {128, 128}}, false)},
      {"exponents", dense({4, 70}, {kE4, ScaleRule::exponent, {1, 32}}, false)},
      {"rows_of_experts", rows({kE4, ScaleRule::ratio, {}}, {0, 0, 6, 6, 17, 17})},
      {"blocks_of_experts", rows({kE4, ScaleRule::exponent, {32, 1}}, {0, 0, 60, 60, 61, 97})},
      {"ragged_rows", rows({kE4, ScaleRule::power_of_two, {1, 4}}, {0, 5, 9})},
      {"no_rows", rows({kE4, ScaleRule::power_of_two, {32, 1}}, {0, 0, 0})}};
}

}  // namespace

std::string to_string(BlockShape block) {
  const auto extent = [](int32_t size) {
    return size == 0 ? std::string("all") : std::to_string(size);
  };
  return extent(block.rows) + "x" + extent(block.columns);
}

void declare_codes(InferContext& context, const QuantizeAttributes& attributes, const Value& x) {
  const BlockShape block =
      attributes.has_transposed() ? attributes.transposed_block : attributes.block;
  const int64_t experts = check_blocks(context, x, block, "quantize");
  TROUPE_CHECK(!attributes.rounds || x.dtype == DType::f32, "quantize: bf16 of f32: " + x.name);
  TROUPE_CHECK(!attributes.part.any() || !attributes.has_transposed(),
               "quantize: matrices that are cut have codes in rows: " + x.name);
  TROUPE_CHECK(is_f8(attributes.format) &&
                   (attributes.rule == ScaleRule::ratio || attributes.format == DType::f8e4m3),
               "quantize: only scales by ratios are for f8e5m2");
  const bool is_fp4 = attributes.rule == ScaleRule::fp4;
  TROUPE_CHECK(is_fp4 ? context.has_input(2) && !attributes.measures && !attributes.part.any() &&
                            attributes.top_k == 0
                      : !attributes.rotates && !attributes.is_stochastic,
               "quantize: not as 4 bits are: " + x.name);
  if (context.has_input(2)) {
    const Value& amax = context.input(2);
    const BlockShape of_amax = is_fp4 ? BlockShape{} : block;
    const Shape scales = shape_of_scales(x, of_amax, experts, attributes.part);
    TROUPE_CHECK(amax.dtype == DType::f32 && amax.shape.rank() == scales.rank() &&
                     amax.shape.elements() % scales.elements() == 0 && !amax.rows.valid() &&
                     !rows_of_scales(x, of_amax).valid() &&
                     (attributes.order != CodesOrder::both || attributes.shares_scales()),
                 "quantize: amax " + amax.shape.to_string() + " for scales " + scales.to_string());
  }
  if (attributes.has_rows()) {
    context.output("", attributes.format, x.shape, x.rows);
    context.output("scales", scale_dtype(attributes.rule),
                   shape_of_scales(x, attributes.block, experts, attributes.part),
                   rows_of_scales(x, attributes.block));
  }
  if (attributes.has_transposed()) declare_transposed(context, x, attributes, experts);
  if (!attributes.measures) return;
  TROUPE_CHECK(context.has_input(2), "quantize: measured is what is not known before");
  context.output("amax", DType::f32, shape_of_scales(x, block, experts, attributes.part));
}

// What x is multiplied by, of each block of one order after the other.
uint64_t quantize_workspace(const OpView& op, const QuantizeAttributes& attributes) {
  int64_t blocks = 0;
  if (attributes.has_rows()) blocks += op.output(1).shape.elements();
  if (attributes.has_transposed() && !attributes.shares_scales()) {
    blocks += op.output(attributes.transposed_scales_output()).shape.elements();
  }
  return static_cast<uint64_t>(blocks) * sizeof(float);
}

std::string print_quantize(const QuantizeAttributes& attributes) {
  std::string text = "format=" + std::string(name_of(attributes.format));
  if (attributes.has_rows()) text += " block=" + to_string(attributes.block);
  if (attributes.has_transposed()) text += " transposed=" + to_string(attributes.transposed_block);
  return text + " scale=" + name_of_rule(attributes.rule) +
         (attributes.measures ? " measures=1" : "") +
         print_source(attributes.part, attributes.rounds) +
         (attributes.top_k > 0 ? fmt::format(" top_k={}", attributes.top_k) : "") +
         (attributes.rotates ? " rotated=1" : "") +
         (attributes.is_stochastic ? " stochastic=1" : "");
}

Quantized quantized_of(std::span<const ValueId> outputs, const QuantizeAttributes& attributes) {
  const auto output = [&](int i) { return outputs[static_cast<size_t>(i)]; };
  Quantized quantized;
  if (attributes.has_rows()) quantized.rows = {output(0), output(1)};
  if (attributes.has_transposed()) {
    quantized.transposed = {output(attributes.transposed_output()),
                            output(attributes.transposed_scales_output())};
  }
  if (attributes.measures) quantized.amax = output(attributes.measured_output());
  return quantized;
}

Quantized quantize(Builder& builder, ValueId x, ValueId offsets, ValueId amax,
                   const QuantizeAttributes& attributes, const std::string& name,
                   ValueId row_slot) {
  std::vector<ValueId> inputs = {x, offsets, amax};
  if (row_slot.valid()) inputs.push_back(row_slot);
  return quantized_of(builder.emit(kQuantize, Attributes(attributes), inputs, name), attributes);
}

ValueId block_amax(Builder& builder, ValueId x, ValueId offsets,
                   const BlockAmaxAttributes& attributes, const std::string& name) {
  return builder.emit(kBlockAmax, Attributes(attributes), {x, offsets}, name)[0];
}

const OpSpec kQuantize{.name = "quantize",
                       .infer = infer_quantize,
                       .cost = cost_quantize,
                       .cpu = {.kernel = quantize_cpu_kernel, .workspace = workspace_quantize},
                       .cuda = choose_quantize,
                       .print_attributes = print_quantize_attributes,
                       .samples = samples_quantize};

const OpSpec kBlockAmax{
    .name = "block_amax",
    .infer = infer_block_amax,
    .cost = cost_block_amax,
    .cpu = {.kernel = block_amax_cpu_kernel},
    .cuda = packs_kernel<TROUPE_CUDA(block_amax_cuda_kernel), row_elements_of_input>,
    .print_attributes = print_block_amax};

}  // namespace troupe
