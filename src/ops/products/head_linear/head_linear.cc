#include "ops/products/head_linear/head_linear.h"

#include <fmt/format.h>
#include <vector>

#include "ops/choose_kernel.h"
#include "ops/costs.h"
#include "ops/product_scratch.h"
#include "ops/products/head_linear/head_linear_cpu.h"
#include "program/derivative.h"
#include "program/op_sample.h"

namespace troupe {

CudaKernel head_linear_cuda_kernel(const OpView& op);
CudaKernel head_linear_weight_gradient_cuda_kernel(const OpView& op);

namespace {

bool is_head_matrix(const Value& value) {
  return is_float(value.dtype) && value.shape.rank() == 2 && !value.rows.valid();
}

void infer_head_linear(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 2, "head_linear: takes x and W");
  const auto& a = context.attributes<HeadLinearAttributes>();
  const Value x = context.input(0);
  const Value& weight = context.input(1);
  TROUPE_CHECK(a.heads >= 1 && a.first >= 0 && a.rows >= 1 && is_head_matrix(x) &&
                   is_head_matrix(weight) && x.dtype == weight.dtype,
               "head_linear: operands");
  const int64_t width = a.transposed ? a.rows : weight.shape[1];
  TROUPE_CHECK(weight.shape[0] % a.heads == 0 && a.first + a.rows <= weight.shape[0] / a.heads &&
                   x.shape[1] == a.heads * width,
               "head_linear: x " + x.shape.to_string() + " and W " + weight.shape.to_string());
  const int64_t result = a.transposed ? weight.shape[1] : a.rows;
  context.output("", x.dtype, {x.shape[0], a.heads * result});
}

void infer_head_linear_weight_gradient(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 3, "head_linear_weight_gradient: takes r, c and target");
  const auto& a = context.attributes<HeadLinearWeightGradientAttributes>();
  const Value r = context.input(0);
  const Value c = context.input(1);
  TROUPE_CHECK(
      is_head_matrix(r) && is_head_matrix(c) && r.dtype == c.dtype && r.shape[0] == c.shape[0] &&
          r.shape[1] == int64_t{a.heads} * a.rows && c.shape[1] % a.heads == 0 &&
          a.first + a.rows <= a.head_rows,
      "head_linear_weight_gradient: r " + r.shape.to_string() + " and c " + c.shape.to_string());
  declare_weight_gradient(context, 2, "", r.dtype,
                          {int64_t{a.heads} * a.head_rows, c.shape[1] / a.heads});
}

void differentiate_head_linear(DerivativeContext& context) {
  Builder& builder = context.builder();
  HeadLinearAttributes attributes = context.attributes<HeadLinearAttributes>();
  const ValueId dy = context.output_gradient(0);
  const ValueId x = context.input(0);
  const bool x_has_rows = attributes.transposed;
  if (context.wants(0)) {
    attributes.transposed = !attributes.transposed;
    context.add_gradient(
        0, head_linear(builder, dy, context.input(1), attributes, "d_" + context.input_name(0)));
  }
  if (!context.wants(1)) return;
  const auto target = context.weight_target(1);
  const int64_t rows = builder.value(context.input(1)).shape[0];
  const Attributes of_weight(
      HeadLinearWeightGradientAttributes{.heads = attributes.heads,
                                         .first = attributes.first,
                                         .rows = attributes.rows,
                                         .head_rows = static_cast<int32_t>(rows / attributes.heads),
                                         .accumulate = target.accumulate});
  context.add_weight_gradient(
      1, builder.emit(kHeadLinearWeightGradient, of_weight,
                      {x_has_rows ? x : dy, x_has_rows ? dy : x, target.target},
                      "d_" + context.input_name(1))[0]);
}

double head_linear_bytes(const Value& value) {
  return static_cast<double>(value.bytes());
}

Cost cost_head_linear(const OpView& op) {
  const auto& a = op.attributes<HeadLinearAttributes>();
  const double weights = static_cast<double>(a.heads) * a.rows;
  const double width = static_cast<double>(op.input(1).shape[1]);
  return product_cost(2 * static_cast<double>(op.input(0).shape[0]) * weights * width,
                      op.input(0).dtype,
                      head_linear_bytes(op.input(0)) + head_linear_bytes(op.output(0)) +
                          weights * width * static_cast<double>(size_of(op.input(1).dtype)));
}

Cost cost_head_linear_weight_gradient(const OpView& op) {
  const auto& a = op.attributes<HeadLinearWeightGradientAttributes>();
  const double rows = static_cast<double>(op.input(0).shape[0]) * a.rows;
  return product_cost(2 * rows * static_cast<double>(op.input(1).shape[1]), op.input(0).dtype,
                      head_linear_bytes(op.input(0)) + head_linear_bytes(op.input(1)) +
                          (a.accumulate ? 2 : 1) * head_linear_bytes(op.output(0)));
}

uint64_t scratch_head_linear(const OpView& op) {
  return gemm_scratch_bytes(head_linear_tiles(op.attributes<HeadLinearAttributes>(),
                                              op.input(0).shape, op.input(1).shape),
                            op.input(0).dtype, op.input(1).dtype, op.output(0).dtype);
}

uint64_t scratch_head_linear_weight_gradient(const OpView& op) {
  return gemm_scratch_bytes(
      head_linear_weight_gradient_tiles(op.attributes<HeadLinearWeightGradientAttributes>(),
                                        op.input(1).shape),
      op.input(0).dtype, op.input(1).dtype, op.output(0).dtype);
}

uint64_t head_linear_cuda_scratch_bytes(const OpView&) {
  return kProductScratchBytes;
}

std::string print_head_linear(const Attributes& attributes) {
  const auto& a = attributes.as<HeadLinearAttributes>();
  return fmt::format("heads={} first={} rows={} transposed={}", a.heads, a.first, a.rows,
                     a.transposed ? 1 : 0);
}

std::string print_head_linear_weight_gradient(const Attributes& attributes) {
  const auto& a = attributes.as<HeadLinearWeightGradientAttributes>();
  return fmt::format("heads={} first={} rows={} of={}{}", a.heads, a.first, a.rows, a.head_rows,
                     a.accumulate ? " accumulate=1" : "");
}

std::vector<OpSample> samples_head_linear() {
  const auto one = [](int64_t tokens, int64_t head_rows, int64_t width,
                      const HeadLinearAttributes& a) {
    return [=](SampleBuilder& sample) {
      const ValueId x =
          sample.tensor("x", {tokens, a.heads * (a.transposed ? int64_t{a.rows} : width)});
      const ValueId weight = sample.tensor("weight", {a.heads * head_rows, width});
      sample.result(head_linear(sample.builder(), x, weight, a, "y"));
    };
  };
  // The two parts of one weight, as attention uses them.
  const auto both = [](SampleBuilder& sample) {
    const ValueId x = sample.tensor("x", {6, 2 * 3});
    const ValueId weight = sample.tensor("weight", {2 * 7, 5});
    const ValueId latent = head_linear(sample.builder(), x, weight,
                                       {.heads = 2, .rows = 3, .transposed = true}, "latent");
    sample.result(
        head_linear(sample.builder(), latent, weight, {.heads = 2, .first = 3, .rows = 4}, "y"));
  };
  return {{"all rows", one(5, 4, 3, {.heads = 2, .rows = 4})},
          {"last rows", one(9, 7, 6, {.heads = 3, .first = 4, .rows = 3})},
          {"first rows, transposed", one(4, 9, 11, {.heads = 3, .rows = 5, .transposed = true})},
          {"one", one(1, 1, 1, {})},
          {"packs", one(17, 24, 16, {.heads = 2, .first = 8, .rows = 16})},
          {"both parts", both}};
}

}  // namespace

ValueId head_linear(Builder& builder, ValueId x, ValueId weight,
                    const HeadLinearAttributes& attributes, const std::string& name) {
  return builder.emit(kHeadLinear, Attributes(attributes), {x, weight}, name)[0];
}

const OpSpec kHeadLinear{
    .name = "head_linear",
    .infer = infer_head_linear,
    .differentiate = differentiate_head_linear,
    .cost = cost_head_linear,
    .cpu = {.kernel = head_linear_cpu_kernel, .scratch = scratch_head_linear},
    .cuda = only_kernel<TROUPE_CUDA(head_linear_cuda_kernel), head_linear_cuda_scratch_bytes>,
    .print_attributes = print_head_linear,
    .samples = samples_head_linear};

const OpSpec kHeadLinearWeightGradient{
    .name = "head_linear_weight_gradient",
    .infer = infer_head_linear_weight_gradient,
    .cost = cost_head_linear_weight_gradient,
    .cpu = {.kernel = head_linear_weight_gradient_cpu_kernel,
            .scratch = scratch_head_linear_weight_gradient},
    .cuda = only_kernel<TROUPE_CUDA(head_linear_weight_gradient_cuda_kernel),
                        head_linear_cuda_scratch_bytes>,
    .print_attributes = print_head_linear_weight_gradient};

}  // namespace troupe
