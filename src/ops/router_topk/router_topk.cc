#include "ops/router_topk/router_topk.h"

#include <cmath>
#include <fmt/format.h>
#include <vector>

#include "ops/router_topk/router_topk_cpu.h"
#include "program/derivative.h"
#include "program/op_sample.h"

namespace troupe {

CpuKernel router_topk_cpu_kernel(DType dtype);
CpuKernel router_topk_gradient_cpu_kernel(DType dtype);

namespace {

void check_router_topk(const RouterTopkAttributes& attributes, int64_t experts) {
  TROUPE_CHECK(attributes.top_k >= 1 && attributes.top_k <= experts,
               "router_topk selects between 1 and E experts");
  TROUPE_CHECK(attributes.scaling_factor != 0 && std::isfinite(attributes.scaling_factor),
               "router_topk needs a scaling factor");
}

bool is_router_topk_dtype(DType dtype) {
  return dtype == DType::f32 || dtype == DType::f64;
}

void infer_router_topk(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 1, "router_topk takes the logits");
  const Value& logits = context.input(0);
  TROUPE_CHECK(
      is_router_topk_dtype(logits.dtype) && logits.shape.rank() == 2 && !logits.rows.valid(),
      "router_topk needs f32 or f64 logits [T, E]: " + logits.name);
  const auto& attributes = context.attributes<RouterTopkAttributes>();
  check_router_topk(attributes, logits.shape[1]);
  const DType dtype = logits.dtype;
  const Shape shape{logits.shape[0], attributes.top_k};
  context.output("", dtype, shape);
  context.output("indices", DType::i32, shape);
}

void differentiate_router_topk(DerivativeContext& context) {
  if (!context.wants(0) || !context.output_gradient(0).valid()) return;
  const auto& forward = context.attributes<RouterTopkAttributes>();
  const auto experts = static_cast<int32_t>(context.op().input(0).shape[1]);
  const ValueId gradient = context.builder().emit(
      kRouterTopkGradient,
      Attributes(RouterTopkGradientAttributes{.forward = forward, .experts = experts}),
      {context.output_gradient(0), forward.pre_softmax ? context.input(0) : ValueId{},
       context.output(0), context.output(1)},
      "d_" + context.input_name(0))[0];
  context.add_gradient(0, gradient);
}

Cost cost_router_topk(const OpView& view) {
  const Value& logits = view.input(0);
  const auto& attributes = view.attributes<RouterTopkAttributes>();
  // An exponential, a comparison and an addition for each score that is looked at.
  const double scores = static_cast<double>(
      attributes.pre_softmax ? logits.shape.elements() : view.output(0).shape.elements());
  return {.flops = static_cast<double>(logits.shape.elements()) + 3 * scores,
          .bytes = static_cast<double>(logits.bytes() + view.output(0).bytes() +
                                       view.output(1).bytes())};
}

CpuKernel router_topk_kernel(const OpView& view) {
  return router_topk_cpu_kernel(view.input(0).dtype);
}

uint64_t router_topk_scratch_bytes(const OpView& view) {
  const Value& logits = view.input(0);
  return static_cast<uint64_t>(topk_scratch_elements(logits.shape[1])) * size_of(logits.dtype);
}

std::string print_router_topk_attributes(const RouterTopkAttributes& attributes) {
  return fmt::format("top_k={} score={} pre_softmax={:d} scaling_factor={}", attributes.top_k,
                     name_of(attributes.score_function), attributes.pre_softmax,
                     attributes.scaling_factor);
}

std::string print_router_topk(const Attributes& attributes) {
  return print_router_topk_attributes(attributes.as<RouterTopkAttributes>());
}

void infer_router_topk_gradient(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 4,
               "router_topk_gradient takes d_probabilities, logits, probabilities, indices");
  const auto& attributes = context.attributes<RouterTopkGradientAttributes>();
  check_router_topk(attributes.forward, attributes.experts);
  const Value& probabilities = context.input(2);
  const Shape& shape = probabilities.shape;
  TROUPE_CHECK(is_router_topk_dtype(probabilities.dtype) && shape.rank() == 2 &&
                   shape[1] == attributes.forward.top_k,
               "router_topk_gradient needs f32 or f64 probabilities [T, k]: " + probabilities.name);
  TROUPE_CHECK(context.input(0).dtype == probabilities.dtype && context.input(0).shape == shape,
               "router_topk_gradient: gradient unlike its value: " + context.input(0).name);
  TROUPE_CHECK(context.input(3).dtype == DType::i32 && context.input(3).shape == shape,
               "router_topk_gradient needs i32 indices [T, k]: " + context.input(3).name);
  const Shape logits_shape{shape[0], attributes.experts};
  TROUPE_CHECK(context.has_input(1) == attributes.forward.pre_softmax,
               "router_topk_gradient reads the logits when they go through a softmax over all");
  TROUPE_CHECK(!context.has_input(1) || (context.input(1).dtype == probabilities.dtype &&
                                         context.input(1).shape == logits_shape),
               "router_topk_gradient: logits unlike probabilities");
  const DType dtype = probabilities.dtype;
  context.output("", dtype, logits_shape);
}

Cost cost_router_topk_gradient(const OpView& view) {
  const Value& gradient = view.output(0);
  const double slots = static_cast<double>(view.input(0).shape.elements());
  double flops = 5 * slots;
  uint64_t bytes =
      view.input(0).bytes() + view.input(2).bytes() + view.input(3).bytes() + gradient.bytes();
  if (view.has_input(1)) {
    flops += 4 * static_cast<double>(gradient.shape.elements());
    bytes += view.input(1).bytes();
  }
  return {.flops = flops, .bytes = static_cast<double>(bytes)};
}

CpuKernel router_topk_gradient_kernel(const OpView& view) {
  return router_topk_gradient_cpu_kernel(view.input(2).dtype);
}

std::string print_router_topk_gradient(const Attributes& attributes) {
  return print_router_topk_attributes(attributes.as<RouterTopkGradientAttributes>().forward);
}

OpSample sample_router_topk(const std::string& name, const Shape& shape,
                            const RouterTopkAttributes& attributes) {
  return {name, [=](SampleBuilder& sample) {
            SampleBuilder::Options options;
            options.accumulation = true;
            const ValueId logits = sample.tensor("logits", shape, options);
            const auto result = router_topk(sample.builder(), logits, attributes, "probabilities");
            sample.result(result.probabilities);
            sample.result_without_gradient(result.indices);
          }};
}

std::vector<OpSample> samples_router_topk() {
  return {
      sample_router_topk("softmax over the selected", {7, 9}, {.top_k = 3}),
      sample_router_topk("softmax over all", {7, 21}, {.top_k = 3, .pre_softmax = true}),
      sample_router_topk("one of many, softmax over all", {5, 17},
                         {.top_k = 1, .pre_softmax = true}),
      sample_router_topk("scaled", {4, 6}, {.top_k = 2, .scaling_factor = 2.5}),
      sample_router_topk("scaled, softmax over all", {4, 6},
                         {.top_k = 2, .pre_softmax = true, .scaling_factor = 16}),
      sample_router_topk("one token, every expert", {1, 4}, {.top_k = 4}),
      sample_router_topk("one expert", {3, 1}, {.top_k = 1}),
      {"many chunks",
       [](SampleBuilder& sample) {
         // Most logits are constants: only a few rows are worth a finite difference. The constants
         // are far enough apart that no difference changes the selection.
         constexpr int64_t kTokens = 1100;
         constexpr int64_t kExperts = 33;
         std::vector<double> logits;
         for (int64_t i = 0; i < kTokens * kExperts; ++i) {
           logits.push_back(static_cast<double>(i * 7919 % 997) / 250 - 2);
         }
         SampleBuilder::Options options;
         options.accumulation = true;
         options.differentiable = false;
         const ValueId many = sample.values("many_logits", {kTokens, kExperts}, logits, options);
         options.differentiable = true;
         const ValueId few = sample.tensor("logits", {2, kExperts}, options);
         for (const ValueId id : {many, few}) {
           const auto result = router_topk(sample.builder(), id, {.top_k = 2, .pre_softmax = true},
                                           "probabilities");
           sample.result(result.probabilities);
           sample.result_without_gradient(result.indices);
         }
       }},
  };
}

}  // namespace

std::string_view name_of(ScoreFunction function) {
  switch (function) {
    case ScoreFunction::softmax:
      return "softmax";
    case ScoreFunction::sigmoid:
      return "sigmoid";
    case ScoreFunction::sqrtsoftplus:
      return "sqrtsoftplus";
  }
  return "?";
}

RouterTopkResult router_topk(Builder& builder, ValueId logits,
                             const RouterTopkAttributes& attributes, const std::string& name) {
  const auto outputs = builder.emit(kRouterTopk, Attributes(attributes), {logits}, name);
  return {.probabilities = outputs[0], .indices = outputs[1]};
}

const OpSpec kRouterTopk{.name = "router_topk",
                         .infer = infer_router_topk,
                         .differentiate = differentiate_router_topk,
                         .cost = cost_router_topk,
                         .cpu_kernel = router_topk_kernel,
                         .scratch_bytes = router_topk_scratch_bytes,
                         .print_attributes = print_router_topk,
                         .samples = samples_router_topk};

const OpSpec kRouterTopkGradient{.name = "router_topk_gradient",
                                 .infer = infer_router_topk_gradient,
                                 .cost = cost_router_topk_gradient,
                                 .cpu_kernel = router_topk_gradient_kernel,
                                 .print_attributes = print_router_topk_gradient};

}  // namespace troupe
