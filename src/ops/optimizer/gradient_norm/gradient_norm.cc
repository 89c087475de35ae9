#include "ops/optimizer/gradient_norm/gradient_norm.h"

#include <cmath>
#include <fmt/format.h>
#include <vector>

#include "ops/choose_kernel.h"
#include "ops/optimizer/gradient_norm/gradient_norm_cpu.h"
#include "program/op_sample.h"

namespace troupe {

void squared_norm_cpu(const KernelArguments& args);
void clip_coefficient_cpu(const KernelArguments& args);
CudaKernel squared_norm_cuda_kernel(const OpView& op);
CudaKernel clip_coefficient_cuda_kernel(const OpView& op);

namespace {

void infer_squared_norm(InferContext& context) {
  TROUPE_CHECK(context.input_count() >= 1, "squared_norm needs at least one gradient");
  for (int i = 0; i < context.input_count(); ++i) {
    const Value& gradient = context.input(i);
    TROUPE_CHECK(is_float(gradient.dtype) && !gradient.rows.valid(),
                 "squared_norm needs dense gradients: " + gradient.name);
  }
  context.output("", DType::f64, {1});
}

Cost cost_squared_norm(const OpView& view) {
  Cost cost;
  for (int i = 0; i < view.op.input_count; ++i) {
    cost.flops += 2 * static_cast<double>(view.input(i).shape.elements());
    cost.bytes += static_cast<double>(view.input(i).bytes());
  }
  return cost;
}

CpuKernel squared_norm_kernel(const OpView&) {
  return &squared_norm_cpu;
}

// The first chunk of each gradient (and the end), and the partial sum of each chunk.
uint64_t squared_norm_workspace_bytes(const OpView& view) {
  const auto& attributes = view.attributes<SquaredNormAttributes>();
  uint64_t chunks = 0;
  for (int i = 0; i < view.op.input_count; ++i) {
    chunks += static_cast<uint64_t>(norm_chunks(counted_elements(view.input(i).shape, attributes)));
  }
  return (view.op.input_count + 1U) * sizeof(int64_t) + chunks * sizeof(double);
}

std::string print_squared_norm(const Attributes& attributes) {
  const auto& [rows, shard, term] = attributes.as<SquaredNormAttributes>();
  std::string text = rows > 0 ? fmt::format("rows={}", rows) : "";
  if (shard.count > 1) {
    text += fmt::format("{}shard={}/{}", text.empty() ? "" : " ", shard.place, shard.count);
  }
  if (term == NormTerm::zero) text += text.empty() ? "term=zero" : " term=zero";
  return text;
}

void infer_clip_coefficient(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 3, "clip_coefficient takes norm, faults and loss scale");
  for (int i = 0; i < context.input_count(); ++i) {
    if (!context.has_input(i)) continue;
    const Value& number = context.input(i);
    TROUPE_CHECK(number.dtype == DType::f64 && number.shape == Shape({1}),
                 "clip_coefficient needs numbers, f64 [1]: " + number.name);
  }
  context.output("", DType::f64, {1}, {}, Role::metric);
  context.output("coefficient", DType::f64, {1});
  context.output("skip", DType::i32, {1}, {}, Role::metric);
}

Cost cost_clip_coefficient(const OpView& view) {
  return {.flops = static_cast<double>(view.input(0).shape.elements()),
          .bytes = static_cast<double>(view.input(0).bytes())};
}

CpuKernel clip_coefficient_kernel(const OpView&) {
  return &clip_coefficient_cpu;
}

std::string print_clip_coefficient(const Attributes& attributes) {
  const auto& values = attributes.as<ClipAttributes>();
  const bool skips = std::isfinite(values.skip_norm);
  return fmt::format("max_norm={}{}", values.max_norm,
                     skips ? fmt::format(" skip_norm={}", values.skip_norm) : "");
}

OpSample sample_gradient_norm(const std::string& name, const std::vector<Shape>& shapes,
                              double max_norm, const SquaredNormAttributes& attributes = {}) {
  return {name, [=](SampleBuilder& sample) {
            SampleBuilder::Options options;
            options.accumulation = true;
            options.differentiable = false;
            std::vector<ValueId> gradients;
            for (const Shape& shape : shapes) {
              gradients.push_back(
                  sample.tensor("gradient" + std::to_string(gradients.size()), shape, options));
            }
            const ValueId squares =
                squared_norm(sample.builder(), gradients, attributes, "squared_norm");
            const ClipResult clip =
                clip_coefficient(sample.builder(), squares, {.max_norm = max_norm}, "grad_norm");
            for (const ValueId id : {squares, clip.norm, clip.coefficient, clip.skip}) {
              sample.result_without_gradient(id);
            }
          }};
}

uint64_t squared_norm_cuda_scratch_bytes(const OpView& op) {
  const auto& attributes = op.attributes<SquaredNormAttributes>();
  int64_t chunks = 0;
  for (int i = 0; i < op.op.input_count; ++i) {
    chunks += norm_chunks(counted_elements(op.input(i).shape, attributes));
  }
  return static_cast<uint64_t>(chunks) * sizeof(double);
}

std::vector<OpSample> samples_squared_norm() {
  const auto zeros = [](SampleBuilder& sample) {
    const SampleBuilder::Options constant{.differentiable = false, .accumulation = true};
    const std::vector<ValueId> gradients = {
        sample.values("first", {2, 3}, {0, 1, 0, -0.0, 2, 3}, constant),
        sample.values("second", {4}, {0, 5, 0, 0}, constant)};
    for (const int64_t rows : {0, 1}) {
      sample.result_without_gradient(squared_norm(sample.builder(), gradients,
                                                  {.rows = rows, .term = NormTerm::zero}, "zeros"));
    }
  };
  return {
      {"zeros", zeros},
      sample_gradient_norm("one tensor of one element", {{1}}, 100),
      sample_gradient_norm("several shapes", {{5, 7}, {17}, {2, 3, 4}}, 1),
      sample_gradient_norm("the first rows", {{5, 7}, {17}, {4, 20000}}, 1, {.rows = 3}),
      sample_gradient_norm("a shard", {{5, 7}, {17}, {1, 4}, {100, 1000}}, 1,
                           {.shard = {.place = 1, .count = 3}}),
      sample_gradient_norm("a shard of the first rows", {{5, 7}, {6}, {4, 20000}}, 1,
                           {.rows = 3, .shard = {.place = 1, .count = 2}}),
      sample_gradient_norm("more tensors than a launch on a GPU takes",
                           std::vector<Shape>(130, Shape{9}), 10),
      sample_gradient_norm("many chunks", {{3}, {2 * kNormChunkElements + 5}, {100, 700}}, 10),
  };
}

std::vector<OpSample> samples_clip_coefficient() {
  const auto skipped = [](double skip_norm, const std::vector<double>& faults = {},
                          const std::vector<double>& loss_scale = {}) {
    return [=](SampleBuilder& sample) {
      const SampleBuilder::Options number{.differentiable = false, .dtype = DType::f64};
      const ValueId squares = sample.values("squares", {1}, {25}, number);
      const ValueId void_if =
          faults.empty() ? ValueId{} : sample.values("faults", {1}, faults, number);
      const ValueId scale =
          loss_scale.empty() ? ValueId{} : sample.values("loss_scale", {1}, loss_scale, number);
      const ClipResult clip =
          clip_coefficient(sample.builder(), squares, {.max_norm = 1, .skip_norm = skip_norm},
                           "grad_norm", void_if, scale);
      for (const ValueId id : {clip.norm, clip.coefficient, clip.skip}) {
        sample.result_without_gradient(id);
      }
    };
  };
  return {
      {"as large as may be", skipped(5)},
      {"too large", skipped(4.5)},
      {"without faults", skipped(5, {0})},
      {"with a fault", skipped(5, {0.25})},
      {"with a loss scale", skipped(5, {}, {2})},
      {"below the limit by a loss scale", skipped(5, {0}, {8})},
      {"too large with a loss scale", skipped(2, {}, {2})},
      sample_gradient_norm("clipped", {{5, 7}}, 0.5),
      sample_gradient_norm("below the limit", {{5, 7}}, 1000),
      sample_gradient_norm("no limit", {{5, 7}}, 0),
  };
}

}  // namespace

ValueId squared_norm(Builder& builder, std::span<const ValueId> gradients,
                     const SquaredNormAttributes& attributes, const std::string& name) {
  return builder.emit(kSquaredNorm, Attributes(attributes), gradients, name)[0];
}

ClipResult clip_coefficient(Builder& builder, ValueId squared_norm,
                            const ClipAttributes& attributes, const std::string& name,
                            ValueId faults, ValueId loss_scale) {
  const auto outputs = builder.emit(kClipCoefficient, Attributes(attributes),
                                    {squared_norm, faults, loss_scale}, name);
  return {.norm = outputs[0], .coefficient = outputs[1], .skip = outputs[2]};
}

const OpSpec kSquaredNorm{
    .name = "squared_norm",
    .infer = infer_squared_norm,
    .cost = cost_squared_norm,
    .cpu = {.kernel = squared_norm_kernel, .workspace = squared_norm_workspace_bytes},
    .cuda = only_kernel<TROUPE_CUDA(squared_norm_cuda_kernel), squared_norm_cuda_scratch_bytes>,
    .print_attributes = print_squared_norm,
    .samples = samples_squared_norm};

const OpSpec kClipCoefficient{.name = "clip_coefficient",
                              .infer = infer_clip_coefficient,
                              .cost = cost_clip_coefficient,
                              .cpu = {.kernel = clip_coefficient_kernel},
                              .cuda = only_kernel<TROUPE_CUDA(clip_coefficient_cuda_kernel)>,
                              .print_attributes = print_clip_coefficient,
                              .samples = samples_clip_coefficient};

}  // namespace troupe
