#include "ops/optimizer/adamw/adamw.h"

#include <fmt/format.h>
#include <vector>

#include "ops/choose_kernel.h"
#include "ops/optimizer/adamw/moment_blocks.h"
#include "ops/optimizer/parameter_dtype.h"

namespace troupe {

CpuKernel adamw_cpu_kernel(const OpView& op);
CudaKernel adamw_cuda_kernel(const OpView& op);

namespace {

void check_adamw_scalar(const InferContext& context, int i, DType dtype) {
  const Value& value = context.input(i);
  TROUPE_CHECK(value.dtype == dtype && value.shape == Shape({1}),
               "adamw: not a scalar of the right type: " + value.name);
}

// The scales of moment `i`, input `scale`.
void check_moment_scales(const InferContext& context, int i, int scale) {
  const Value& moment = context.input(i);
  const bool has_scales = scale < context.input_count() && context.has_input(scale);
  TROUPE_CHECK(has_scales == (moment.dtype == DType::f8e4m3),
               "adamw: a moment in f8e4m3, and no other, has scales: " + moment.name);
  if (!has_scales) return;
  const Value& scales = context.input(scale);
  TROUPE_CHECK(moment.shape.rank() > 1 && scales.dtype == DType::u8 &&
                   scales.shape == moment_scales_shape(moment.shape),
               "adamw: not the scales of a moment: " + scales.name);
}

void infer_adamw(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 10 || context.input_count() == 12,
               "adamw takes parameter, gradient, moments, master, five scalars and scales");
  const Value& parameter = context.input(context.has_input(0) ? 0 : 1);
  const DType dtype = parameter_dtype(context, 0);
  TROUPE_CHECK(is_float(dtype) && !parameter.rows.valid(),
               "adamw needs a float parameter: " + parameter.name);
  TROUPE_CHECK(context.has_input(4) == (is_half(dtype)),
               "adamw: a bf16 or f16 parameter, and no other, has a master: " + parameter.name);
  for (int i = 1; i <= 4; ++i) {
    if (!context.has_input(i)) continue;
    const Value& value = context.input(i);
    const Shape& shape = i == 1 ? parameter.shape : context.input(2).shape;
    const DType wide = accumulation_dtype(dtype);
    const bool is_moment = i == 2 || i == 3;
    const bool narrow_moment = is_moment && wide == DType::f32 &&
                               (value.dtype == DType::bf16 || value.dtype == DType::f8e4m3);
    const bool narrow_gradient = i == 1 && dtype == DType::bf16 && value.dtype == dtype;
    TROUPE_CHECK((value.dtype == wide || narrow_moment || narrow_gradient) &&
                     value.shape == shape && !value.rows.valid(),
                 "adamw: unlike its parameter: " + value.name);
  }
  check_moment_scales(context, 2, 10);
  check_moment_scales(context, 3, 11);
  const int64_t first = context.attributes<AdamWAttributes>().first;
  TROUPE_CHECK(
      first >= 0 && first + context.input(2).shape.elements() <= parameter.shape.elements(),
      "adamw: moments of more than the parameter has: " + parameter.name);
  check_adamw_scalar(context, 5, DType::f64);
  check_adamw_scalar(context, 6, DType::f64);
  check_adamw_scalar(context, 7, DType::i64);
  check_adamw_scalar(context, 8, DType::f64);
  check_adamw_scalar(context, 9, DType::i32);
  if (context.has_input(0)) context.mutates(0);
  context.mutates(2);
  context.mutates(3);
  if (context.has_input(4)) context.mutates(4);
  for (int i = 10; i < context.input_count(); ++i) {
    if (context.has_input(i)) context.mutates(i);
  }
}

// State is read and written, the gradient read; a bf16 parameter is only written, if it is there.
Cost cost_adamw(const OpView& view) {
  const bool has_master = view.has_input(4);
  const uint64_t of_parameter = view.has_input(0) ? size_of(view.input(0).dtype) : 0;
  const auto elements = static_cast<uint64_t>(view.input(2).shape.elements());
  uint64_t changed = view.input(2).bytes() + view.input(3).bytes();
  if (has_master) changed += view.input(4).bytes();
  for (uint32_t i = 10; i < view.op.input_count; ++i) {
    if (view.has_input(static_cast<int>(i))) changed += view.input(static_cast<int>(i)).bytes();
  }
  const uint64_t bytes = (has_master ? 1U : 2U) * elements * of_parameter +
                         elements * size_of(view.input(1).dtype) + 2 * changed;
  return {.flops = 15 * static_cast<double>(elements), .bytes = static_cast<double>(bytes)};
}

std::string print_adamw(const Attributes& attributes) {
  const auto& a = attributes.as<AdamWAttributes>();
  return fmt::format("beta1={} beta2={} epsilon={} decay={:d}{}", a.beta1, a.beta2, a.epsilon,
                     a.decay, a.first > 0 ? fmt::format(" first={}", a.first) : "");
}

}  // namespace

void adamw(Builder& builder, const AdamWTensors& tensors, const AdamWScalars& scalars,
           const AdamWAttributes& attributes, const std::string& name) {
  std::vector<ValueId> inputs = {tensors.parameter,    tensors.gradient, tensors.exp_avg,
                                 tensors.exp_avg_sq,   tensors.master,   scalars.learning_rate,
                                 scalars.weight_decay, scalars.step,     scalars.coefficient,
                                 scalars.skip};
  if (tensors.exp_avg_scale.valid() || tensors.exp_avg_sq_scale.valid()) {
    inputs.push_back(tensors.exp_avg_scale);
    inputs.push_back(tensors.exp_avg_sq_scale);
  }
  builder.emit(kAdamW, Attributes(attributes), inputs, name);
}

const OpSpec kAdamW{.name = "adamw",
                    .infer = infer_adamw,
                    .cost = cost_adamw,
                    .cpu = {.kernel = adamw_cpu_kernel},
                    .cuda = only_kernel<TROUPE_CUDA(adamw_cuda_kernel)>,
                    .print_attributes = print_adamw};

}  // namespace troupe
