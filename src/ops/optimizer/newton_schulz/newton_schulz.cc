#include "ops/optimizer/newton_schulz/newton_schulz.h"

#include <fmt/format.h>
#include <vector>

#include "ops/choose_kernel.h"
#include "ops/costs.h"
#include "ops/optimizer/newton_schulz/newton_schulz_cpu.h"
#include "ops/optimizer/newton_schulz/newton_schulz_cuda.h"
#include "program/op_sample.h"

namespace troupe {

CpuKernel newton_schulz_cpu_kernel(const OpView& op);
uint64_t newton_schulz_workspace_bytes(const OpView& op);
CudaKernel newton_schulz_cuda_kernel(const OpView& op);

namespace {

void check_sections(const NewtonSchulzAttributes& attributes, int64_t rows,
                    const std::string& name) {
  int64_t in_sections = 0;
  bool ended = false;
  for (const NewtonSchulzSection& section : attributes.sections) {
    TROUPE_CHECK(section.rows >= 0 && !(ended && section.rows > 0),
                 "newton_schulz: sections must follow each other: " + name);
    ended = section.rows == 0;
    in_sections += section.rows;
  }
  TROUPE_CHECK(in_sections == 0 || in_sections == rows,
               "newton_schulz: sections must have all rows of " + name);
}

void infer_newton_schulz(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 1, "newton_schulz takes x");
  const Value x = context.input(0);
  const auto& attributes = context.attributes<NewtonSchulzAttributes>();
  TROUPE_CHECK((x.dtype == DType::f32 || x.dtype == DType::f64) && !x.rows.valid() &&
                   (x.shape.rank() == 2 || x.shape.rank() == 3) && x.shape.elements() > 0,
               "newton_schulz needs f32 or f64 matrices: " + x.name + " " + x.shape.to_string());
  TROUPE_CHECK(x.dtype == DType::f32 || attributes.arithmetic != NewtonSchulzArithmetic::bf16,
               "newton_schulz: only f32 has products in bf16: " + x.name);
  const bool is_quintic = attributes.coefficients == NewtonSchulzCoefficients::quintic;
  TROUPE_CHECK(
      attributes.steps > 0 &&
          (!is_quintic || attributes.steps % static_cast<int32_t>(kQuinticSteps.size()) == 0),
      "newton_schulz: not a number of steps for these coefficients: " + x.name);
  check_sections(attributes, MatrixBatch(x.shape).rows, x.name);
  context.output("", x.dtype, x.shape);
}

// The products alone; x is read and y written once.
Cost cost_newton_schulz(const OpView& view) {
  const auto& attributes = view.attributes<NewtonSchulzAttributes>();
  const MatrixBatch batch(view.input(0).shape);
  double flops = 0;
  for_sections(attributes, batch, [&](const SectionMatrix& section) {
    const auto side = static_cast<double>(section.side());
    flops += 4 * side * static_cast<double>(section.elements()) + 2 * side * side * side;
  });
  flops *= static_cast<double>(attributes.steps) * static_cast<double>(batch.count);
  return product_cost(flops, newton_schulz_is_in_bf16(view) ? DType::bf16 : view.input(0).dtype,
                      static_cast<double>(view.input(0).bytes() + view.output(0).bytes()));
}

std::string print_newton_schulz(const Attributes& attributes) {
  const auto& a = attributes.as<NewtonSchulzAttributes>();
  const bool is_simple = a.coefficients == NewtonSchulzCoefficients::simple;
  std::string text =
      fmt::format("steps={} coefficients={}", a.steps, is_simple ? "simple" : "quintic");
  if (a.arithmetic == NewtonSchulzArithmetic::bf16) text += " arithmetic=bf16";
  if (a.sections[0].rows == 0) return text + fmt::format(" scale={}", a.sections[0].scale);
  for (const NewtonSchulzSection& section : a.sections) {
    if (section.rows > 0) text += fmt::format(" rows={}*{}", section.rows, section.scale);
  }
  return text;
}

uint64_t newton_schulz_cuda_scratch_bytes(const OpView& op) {
  const DType products = newton_schulz_is_in_bf16(op) ? DType::bf16 : op.input(0).dtype;
  const MatrixBatch batch(op.input(0).shape);
  uint64_t bytes = 0;
  for_sections(op.attributes<NewtonSchulzAttributes>(), batch, [&](const SectionMatrix& section) {
    const SectionScratch scratch(section, batch.count, static_cast<int64_t>(size_of(products)));
    bytes = std::max(bytes, scratch.bytes());
  });
  return bytes;
}

KernelChoice choose_newton_schulz(const OpView& op, const DeviceTraits& device) {
  return make_choice(op, device, "cublaslt", TROUPE_CUDA(newton_schulz_cuda_kernel),
                     newton_schulz_cuda_scratch_bytes);
}

std::vector<OpSample> samples_newton_schulz() {
  const auto sample = [](const std::string& name, const Shape& shape,
                         const NewtonSchulzAttributes& attributes = {}) {
    return OpSample{name, [=](SampleBuilder& builder) {
                      const SampleBuilder::Options options{.differentiable = false,
                                                           .accumulation = true};
                      builder.result_without_gradient(newton_schulz(
                          builder.builder(), builder.tensor("x", shape, options), attributes, "y"));
                    }};
  };
  const auto in_place = [](SampleBuilder& builder) {
    const SampleBuilder::Options options{.differentiable = false, .accumulation = true};
    const ValueId x = builder.tensor("x", {2, 20, 15}, options);
    const ValueId once = newton_schulz(builder.builder(), x, {}, "once");
    builder.result_without_gradient(
        newton_schulz(builder.builder(), once, {.sections = {{{5, 1}, {15, 2}}}}, "twice"));
  };
  using enum NewtonSchulzCoefficients;
  return {
      sample("wide", {12, 40}),
      sample("tall", {33, 9}),
      sample("square", {16, 16}),
      sample("one row", {1, 23}),
      sample("one column", {19, 1}),
      sample("one element", {1, 1}),
      sample("a batch of three", {3, 10, 22}),
      sample("other coefficients", {2, 18, 7}, {.steps = 3, .coefficients = simple}),
      sample("three sections", {24, 14}, {.sections = {{{16, 4}, {4, 2}, {4, 0.5}}}}),
      sample("four sections of a batch", {2, 31, 13},
             {.sections = {{{14, 1}, {15, 1}, {1, 1}, {1, 3}}}}),
      {"in place", in_place},
      sample("several tiles", {150, 260}),
  };
}

}  // namespace

ValueId newton_schulz(Builder& builder, ValueId x, const NewtonSchulzAttributes& attributes,
                      const std::string& name) {
  return builder.emit(kNewtonSchulz, Attributes(attributes), {x}, name)[0];
}

const OpSpec kNewtonSchulz{
    .name = "newton_schulz",
    .infer = infer_newton_schulz,
    .cost = cost_newton_schulz,
    .cpu = {.kernel = newton_schulz_cpu_kernel, .workspace = newton_schulz_workspace_bytes},
    .cuda = choose_newton_schulz,
    .in_place = {.output = 0, .input = 0},
    .print_attributes = print_newton_schulz,
    .samples = samples_newton_schulz};

}  // namespace troupe
