#include "ops/routing/router_topk/router_topk.h"

#include <cmath>
#include <fmt/format.h>
#include <vector>

#include "ops/choose_kernel.h"
#include "ops/routing/router_topk/router_topk_cpu.h"
#include "program/derivative.h"
#include "program/op_sample.h"

namespace troupe {

CpuKernel router_topk_cpu_kernel(DType logits, DType probabilities);
CpuKernel router_topk_gradient_cpu_kernel(DType logits, DType probabilities);
CudaKernel router_topk_cuda_kernel(const OpView& op);
CudaKernel router_topk_gradient_cuda_kernel(const OpView& op);

namespace {

void check_router_topk(const RouterTopkAttributes& attributes, int64_t experts) {
  const int64_t top_k = attributes.top_k;
  TROUPE_CHECK(top_k >= 1 && top_k <= experts, "router_topk selects between 1 and E experts");
  TROUPE_CHECK(attributes.scaling_factor != 0 && std::isfinite(attributes.scaling_factor),
               "router_topk needs a scaling factor");
  const int64_t groups = attributes.num_groups;
  const int64_t kept = attributes.group_topk;
  if (groups == 0) {
    TROUPE_CHECK(kept == 0, "router_topk: group_topk without groups");
    return;
  }
  TROUPE_CHECK(groups > 0 && experts % groups == 0,
               "router_topk: the number of groups divides that of experts");
  TROUPE_CHECK(kept >= 1 && kept <= groups && kept <= top_k && top_k <= kept * (experts / groups),
               "router_topk: group_topk is between 1 and k, and its groups hold k experts");
  TROUPE_CHECK(attributes.group_scores >= 0 && attributes.group_scores <= experts / groups,
               "router_topk: a group's score is of experts that it has");
}

bool is_router_dtype(DType dtype) {
  return dtype == DType::f32 || dtype == DType::f64;
}

// Probabilities have the logits' dtype, or are f32 made of f64.
bool may_be_probabilities(DType probabilities, DType logits) {
  return probabilities == logits || (probabilities == DType::f32 && logits == DType::f64);
}

bool is_post_softmax(const RouterTopkAttributes& attributes) {
  return attributes.score_function == ScoreFunction::softmax && !attributes.pre_softmax;
}

void infer_router_topk(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 3, "router_topk takes logits, expert_bias, selected");
  const Value& logits = context.input(0);
  TROUPE_CHECK(is_router_dtype(logits.dtype) && logits.shape.rank() == 2 && !logits.rows.valid(),
               "router_topk needs f32 or f64 logits [T, E]: " + logits.name);
  const auto& attributes = context.attributes<RouterTopkAttributes>();
  check_router_topk(attributes, logits.shape[1]);
  const DType dtype = attributes.probability_dtype.value_or(logits.dtype);
  TROUPE_CHECK(may_be_probabilities(dtype, logits.dtype),
               "router_topk: probabilities have the logits' dtype, or are f32: " + logits.name);
  const Shape shape{logits.shape[0], attributes.top_k};
  if (context.has_input(1)) {
    const Value& bias = context.input(1);
    TROUPE_CHECK(bias.dtype == DType::f32 && bias.shape == Shape({logits.shape[1]}),
                 "router_topk needs f32 expert_bias [E]: " + bias.name);
    TROUPE_CHECK(attributes.score_function != ScoreFunction::softmax,
                 "router_topk: softmax scores take no expert_bias: " + bias.name);
    TROUPE_CHECK(!context.has_input(2), "router_topk: selected experts take no expert_bias");
  }
  if (context.has_input(2)) {
    const Value& selected = context.input(2);
    TROUPE_CHECK(selected.dtype == DType::i32 && selected.shape == shape && !selected.rows.valid(),
                 "router_topk needs i32 selected [T, k]: " + selected.name);
  }
  context.output("", dtype, shape);
  context.output("indices", DType::i32, shape);
}

void differentiate_router_topk(DerivativeContext& context) {
  if (!context.wants(0) || !context.output_gradient(0).valid()) return;
  const auto& forward = context.attributes<RouterTopkAttributes>();
  const Value& logits = context.op().input(0);
  const RouterTopkGradientAttributes attributes{.forward = forward,
                                                .experts = static_cast<int32_t>(logits.shape[1]),
                                                .logits_dtype = logits.dtype};
  const bool post_softmax = is_post_softmax(forward);
  const ValueId gradient = context.builder().emit(
      kRouterTopkGradient, Attributes(attributes),
      {context.output_gradient(0), post_softmax ? ValueId{} : context.input(0),
       post_softmax ? context.output(0) : ValueId{}, context.output(1)},
      "d_" + context.input_name(0))[0];
  context.add_gradient(0, gradient);
}

Cost cost_router_topk(const OpView& view) {
  const Value& logits = view.input(0);
  const auto& attributes = view.attributes<RouterTopkAttributes>();
  const auto all = static_cast<double>(logits.shape.elements());
  const auto chosen = static_cast<double>(view.output(0).shape.elements());
  const bool softmax = attributes.score_function == ScoreFunction::softmax;
  // A comparison for each logit; an exponential, an addition and a division for each score that is
  // computed, for the selection or for the weights.
  const bool for_selection =
      !view.has_input(2) &&
      (view.has_input(1) || (attributes.num_groups > 0 && (!softmax || attributes.pre_softmax)));
  const double scores =
      (for_selection ? all : 0) + (softmax && attributes.pre_softmax ? all : chosen);
  uint64_t bytes = logits.bytes() + view.output(0).bytes() + view.output(1).bytes();
  for (const int input : {1, 2}) {
    if (view.has_input(input)) bytes += view.input(input).bytes();
  }
  return {.flops = (view.has_input(2) ? 0 : all) + 3 * scores, .bytes = static_cast<double>(bytes)};
}

CpuKernel router_topk_kernel(const OpView& view) {
  return router_topk_cpu_kernel(view.input(0).dtype, view.output(0).dtype);
}

uint64_t router_topk_scratch_bytes(const OpView& view) {
  const Value& logits = view.input(0);
  const auto& attributes = view.attributes<RouterTopkAttributes>();
  return static_cast<uint64_t>(TopkScratch<double>::elements(logits.shape[1], attributes.top_k,
                                                             attributes.num_groups)) *
         size_of(logits.dtype);
}

std::string print_router_topk_attributes(const RouterTopkAttributes& attributes) {
  std::string text = fmt::format("top_k={} score={} pre_softmax={:d} scaling_factor={}",
                                 attributes.top_k, name_of(attributes.score_function),
                                 attributes.pre_softmax, attributes.scaling_factor);
  if (attributes.num_groups > 0) {
    text += fmt::format(" groups={} group_top_k={}", attributes.num_groups, attributes.group_topk);
    if (attributes.group_scores > 0)
      text += fmt::format(" group_scores={}", attributes.group_scores);
  }
  if (!attributes.normalize) text += " normalize=0";
  if (attributes.probability_dtype) {
    text += fmt::format(" probabilities={}", name_of(*attributes.probability_dtype));
  }
  return text;
}

std::string print_router_topk(const Attributes& attributes) {
  return print_router_topk_attributes(attributes.as<RouterTopkAttributes>());
}

void infer_router_topk_gradient(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 4,
               "router_topk_gradient takes d_probabilities, logits, probabilities, indices");
  const auto& attributes = context.attributes<RouterTopkGradientAttributes>();
  const RouterTopkAttributes& forward = attributes.forward;
  check_router_topk(forward, attributes.experts);
  const Value& gradient = context.input(0);
  const DType logits_dtype = attributes.logits_dtype;
  TROUPE_CHECK(is_router_dtype(logits_dtype) &&
                   gradient.dtype == forward.probability_dtype.value_or(logits_dtype) &&
                   may_be_probabilities(gradient.dtype, logits_dtype),
               "router_topk_gradient: gradient of another dtype: " + gradient.name);
  TROUPE_CHECK(gradient.shape.rank() == 2 && gradient.shape[1] == forward.top_k,
               "router_topk_gradient needs d_probabilities [T, k]: " + gradient.name);
  const Shape logits_shape{gradient.shape[0], attributes.experts};
  const bool post_softmax = is_post_softmax(forward);
  TROUPE_CHECK(context.has_input(1) == !post_softmax && context.has_input(2) == post_softmax,
               "router_topk_gradient reads probabilities for post-softmax, logits otherwise");
  TROUPE_CHECK(post_softmax || (context.input(1).dtype == logits_dtype &&
                                context.input(1).shape == logits_shape),
               "router_topk_gradient: logits unlike their gradient");
  TROUPE_CHECK(!post_softmax || (context.input(2).dtype == gradient.dtype &&
                                 context.input(2).shape == gradient.shape),
               "router_topk_gradient: gradient unlike its value: " + gradient.name);
  TROUPE_CHECK(context.input(3).dtype == DType::i32 && context.input(3).shape == gradient.shape,
               "router_topk_gradient needs i32 indices [T, k]: " + context.input(3).name);
  context.output("", logits_dtype, logits_shape);
}

Cost cost_router_topk_gradient(const OpView& view) {
  const Value& gradient = view.output(0);
  const auto slots = static_cast<double>(view.input(0).shape.elements());
  const auto& forward = view.attributes<RouterTopkGradientAttributes>().forward;
  const bool all = forward.score_function == ScoreFunction::softmax && forward.pre_softmax;
  uint64_t bytes = gradient.bytes();
  for (int input = 0; input < 4; ++input) {
    if (view.has_input(input)) bytes += view.input(input).bytes();
  }
  return {.flops = (is_post_softmax(forward) ? 5 : 12) * slots +
                   (all ? 4 * static_cast<double>(gradient.shape.elements()) : 0),
          .bytes = static_cast<double>(bytes)};
}

CpuKernel router_topk_gradient_kernel(const OpView& view) {
  return router_topk_gradient_cpu_kernel(view.output(0).dtype, view.input(0).dtype);
}

// The scores of one token's selected experts.
uint64_t router_topk_gradient_scratch_bytes(const OpView& view) {
  return static_cast<uint64_t>(view.input(0).shape[1]) * size_of(view.output(0).dtype);
}

std::string print_router_topk_gradient(const Attributes& attributes) {
  return print_router_topk_attributes(attributes.as<RouterTopkGradientAttributes>().forward);
}

struct RouterTopkSample {
  Shape shape;  // of the logits
  RouterTopkAttributes attributes;
  std::vector<double> bias = {};
  std::vector<int32_t> selected = {};
  bool f64_logits = false;  // and probabilities in the accumulation dtype
};

OpSample sample_router_topk(const std::string& name, const RouterTopkSample& parameters) {
  return {name, [=](SampleBuilder& sample) {
            RouterTopkAttributes attributes = parameters.attributes;
            SampleBuilder::Options options;
            options.accumulation = true;
            if (parameters.f64_logits) {
              options.dtype = DType::f64;
              attributes.probability_dtype = accumulation_dtype(sample.dtype());
            }
            RouterTopkInputs inputs;
            inputs.logits = sample.tensor("logits", parameters.shape, options);
            if (!parameters.bias.empty()) {
              inputs.expert_bias = sample.values("bias", {parameters.shape[1]}, parameters.bias,
                                                 {.differentiable = false, .dtype = DType::f32});
            }
            if (!parameters.selected.empty()) {
              inputs.selected = sample.integers("selected", {parameters.shape[0], attributes.top_k},
                                                parameters.selected);
            }
            const auto result = router_topk(sample.builder(), inputs, attributes, "probabilities");
            sample.result(result.probabilities);
            sample.result_without_gradient(result.indices);
          }};
}

// Most logits are constants: only a few rows are worth a finite difference. The constants are far
// enough apart that no rounding changes the selection.
OpSample sample_many_chunks() {
  return {"many chunks", [](SampleBuilder& sample) {
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
              const auto result = router_topk(sample.builder(), {.logits = id},
                                              {.top_k = 2, .pre_softmax = true}, "probabilities");
              sample.result(result.probabilities);
              sample.result_without_gradient(result.indices);
            }
          }};
}

std::vector<OpSample> samples_router_topk() {
  constexpr auto kSigmoid = ScoreFunction::sigmoid;
  constexpr auto kSqrtSoftplus = ScoreFunction::sqrtsoftplus;
  const std::vector<double> bias{0.25, -0.125, 0.5, 0.375, -0.5, 0, 0.0625, -0.25, 0.125};
  // Neither ascending nor by logit.
  const std::vector<int32_t> replayed{8, 0, 3, 1, 2, 0, 5, 8, 4, 7, 1, 6, 2, 8, 5};
  return {
      sample_router_topk("softmax over the selected", {{7, 9}, {.top_k = 3}}),
      sample_router_topk("softmax over all", {{7, 21}, {.top_k = 3, .pre_softmax = true}}),
      sample_router_topk("one of many, softmax over all",
                         {{5, 17}, {.top_k = 1, .pre_softmax = true}}),
      sample_router_topk("scaled", {{4, 6}, {.top_k = 2, .scaling_factor = 2.5}}),
      sample_router_topk("scaled, softmax over all",
                         {{4, 6}, {.top_k = 2, .pre_softmax = true, .scaling_factor = 16}}),
      sample_router_topk("one token, every expert", {{1, 4}, {.top_k = 4}}),
      sample_router_topk("one expert", {{3, 1}, {.top_k = 1}}),
      sample_router_topk("sigmoid", {{7, 9}, {.top_k = 3, .score_function = kSigmoid}}),
      sample_router_topk(
          "one of many, sigmoid",
          {{5, 17},
           {.top_k = 1, .score_function = kSigmoid, .pre_softmax = true, .scaling_factor = 2.5}}),
      sample_router_topk(
          "sigmoid, bias",
          {{7, 9}, {.top_k = 3, .score_function = kSigmoid, .scaling_factor = 2.5}, bias}),
      sample_router_topk("sqrtsoftplus", {{7, 9}, {.top_k = 3, .score_function = kSqrtSoftplus}}),
      sample_router_topk(
          "sqrtsoftplus, bias",
          {{7, 9}, {.top_k = 3, .score_function = kSqrtSoftplus, .scaling_factor = 1.5}, bias}),
      sample_router_topk("one of many, sqrtsoftplus",
                         {{5, 17}, {.top_k = 1, .score_function = kSqrtSoftplus}}),
      sample_router_topk("groups", {{5, 12}, {.top_k = 4, .num_groups = 4, .group_topk = 2}}),
      sample_router_topk(
          "groups, softmax over all",
          {{5, 12}, {.top_k = 5, .pre_softmax = true, .num_groups = 3, .group_topk = 2}}),
      sample_router_topk(
          "groups, sigmoid",
          {{5, 12}, {.top_k = 3, .score_function = kSigmoid, .num_groups = 6, .group_topk = 2}}),
      sample_router_topk(
          "groups, sigmoid, bias",
          {{7, 9},
           {.top_k = 4, .score_function = kSigmoid, .num_groups = 3, .group_topk = 2},
           bias}),
      sample_router_topk(
          "groups longer than a block",
          {{3, 54},
           {.top_k = 6, .score_function = kSqrtSoftplus, .num_groups = 3, .group_topk = 2}}),
      sample_router_topk(
          "best of each group",
          {{5, 12},
           {.top_k = 4, .pre_softmax = true, .num_groups = 4, .group_topk = 2, .group_scores = 1}}),
      sample_router_topk(
          "sigmoid, not normalised",
          {{5, 9},
           {.top_k = 3, .score_function = kSigmoid, .scaling_factor = 1.5, .normalize = false},
           bias}),
      sample_router_topk("replayed", {{5, 9}, {.top_k = 3, .scaling_factor = 2}, {}, replayed}),
      sample_router_topk(
          "replayed, softmax over all",
          {{5, 9}, {.top_k = 3, .pre_softmax = true, .scaling_factor = 2}, {}, replayed}),
      sample_router_topk(
          "replayed, sigmoid, groups ignored",
          {{5, 9},
           {.top_k = 3, .score_function = kSigmoid, .num_groups = 3, .group_topk = 1},
           {},
           replayed}),
      sample_router_topk("f64 logits", {{5, 9}, {.top_k = 3}, {}, {}, true}),
      sample_router_topk("f64 logits, softmax over all",
                         {{5, 9}, {.top_k = 3, .pre_softmax = true}, {}, {}, true}),
      sample_router_topk("f64 logits, sigmoid, bias",
                         {{5, 9}, {.top_k = 3, .score_function = kSigmoid}, bias, {}, true}),
      sample_many_chunks(),
  };
}

}  // namespace

RouterTopkResult router_topk(Builder& builder, const RouterTopkInputs& inputs,
                             const RouterTopkAttributes& attributes, const std::string& name) {
  const auto outputs = builder.emit(kRouterTopk, Attributes(attributes),
                                    {inputs.logits, inputs.expert_bias, inputs.selected}, name);
  return {.probabilities = outputs[0], .indices = outputs[1]};
}

const OpSpec kRouterTopk{
    .name = "router_topk",
    .infer = infer_router_topk,
    .differentiate = differentiate_router_topk,
    .cost = cost_router_topk,
    .cpu = {.kernel = router_topk_kernel, .scratch = router_topk_scratch_bytes},
    .cuda = only_kernel<TROUPE_CUDA(router_topk_cuda_kernel)>,
    .print_attributes = print_router_topk,
    .samples = samples_router_topk};

const OpSpec kRouterTopkGradient{
    .name = "router_topk_gradient",
    .infer = infer_router_topk_gradient,
    .cost = cost_router_topk_gradient,
    .cpu = {.kernel = router_topk_gradient_kernel, .scratch = router_topk_gradient_scratch_bytes},
    .cuda = only_kernel<TROUPE_CUDA(router_topk_gradient_cuda_kernel)>,
    .print_attributes = print_router_topk_gradient};

}  // namespace troupe
