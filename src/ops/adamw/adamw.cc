#include "ops/adamw/adamw.h"

#include <fmt/format.h>

namespace troupe {

CpuKernel adamw_cpu_kernel(const OpView& op);
CudaKernel adamw_cuda_kernel(const OpView& op);

namespace {

void check_adamw_scalar(const InferContext& context, int i, DType dtype) {
  const Value& value = context.input(i);
  TROUPE_CHECK(value.dtype == dtype && value.shape == Shape({1}),
               "adamw: not a scalar of the right type: " + value.name);
}

void infer_adamw(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 10,
               "adamw takes parameter, gradient, moments, master and five scalars");
  const Value& parameter = context.input(0);
  TROUPE_CHECK(is_float(parameter.dtype) && !parameter.rows.valid(),
               "adamw needs a float parameter: " + parameter.name);
  TROUPE_CHECK(context.has_input(4) == (parameter.dtype == DType::bf16),
               "adamw: a bf16 parameter, and no other, has a master: " + parameter.name);
  for (int i = 1; i <= 4; ++i) {
    if (!context.has_input(i)) continue;
    const Value& value = context.input(i);
    const Shape& shape = i == 1 ? parameter.shape : context.input(2).shape;
    const DType wide = accumulation_dtype(parameter.dtype);
    const bool is_moment = i == 2 || i == 3;
    const bool narrow = is_moment && wide == DType::f32 && value.dtype == DType::bf16;
    TROUPE_CHECK((value.dtype == wide || narrow) && value.shape == shape && !value.rows.valid(),
                 "adamw: unlike its parameter: " + value.name);
  }
  const int64_t first = context.attributes<AdamWAttributes>().first;
  TROUPE_CHECK(
      first >= 0 && first + context.input(2).shape.elements() <= parameter.shape.elements(),
      "adamw: moments of more than the parameter has: " + parameter.name);
  check_adamw_scalar(context, 5, DType::f64);
  check_adamw_scalar(context, 6, DType::f64);
  check_adamw_scalar(context, 7, DType::i64);
  check_adamw_scalar(context, 8, DType::f64);
  check_adamw_scalar(context, 9, DType::i32);
  context.mutates(0);
  context.mutates(2);
  context.mutates(3);
  if (context.has_input(4)) context.mutates(4);
}

// State is read and written, the gradient read; a bf16 parameter is only written.
Cost cost_adamw(const OpView& view) {
  const bool has_master = view.has_input(4);
  const auto elements = static_cast<uint64_t>(view.input(2).shape.elements());
  const uint64_t wide = elements * size_of(view.input(1).dtype);
  const uint64_t moments = view.input(2).bytes() + view.input(3).bytes();
  const uint64_t bytes = (has_master ? 1U : 2U) * elements * size_of(view.input(0).dtype) +
                         (has_master ? 3U : 1U) * wide + 2 * moments;
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
  builder.emit(kAdamW, Attributes(attributes),
               {tensors.parameter, tensors.gradient, tensors.exp_avg, tensors.exp_avg_sq,
                tensors.master, scalars.learning_rate, scalars.weight_decay, scalars.step,
                scalars.coefficient, scalars.skip},
               name);
}

const OpSpec kAdamW{.name = "adamw",
                    .infer = infer_adamw,
                    .cost = cost_adamw,
                    .cpu_kernel = adamw_cpu_kernel,
                    .cuda_kernel = TROUPE_CUDA(adamw_cuda_kernel),
                    .print_attributes = print_adamw};

}  // namespace troupe
