#include "ops/routing/random_logits/random_logits.h"

#include <fmt/format.h>
#include <vector>

#include "ops/choose_kernel.h"
#include "ops/elementwise/add/add.h"
#include "program/derivative.h"
#include "program/op_sample.h"

namespace troupe {

CpuKernel random_logits_cpu_kernel(DType dtype);
CudaKernel random_logits_cuda_kernel(const OpView& op);

namespace {

void infer_random_logits(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 2, "random_logits takes logits, step");
  const Value& logits = context.input(0);
  const Value& step = context.input(1);
  TROUPE_CHECK((logits.dtype == DType::f32 || logits.dtype == DType::f64) && !logits.rows.valid(),
               "random_logits needs f32 or f64 logits: " + logits.name);
  TROUPE_CHECK(step.dtype == DType::i64 && step.shape == Shape({1}),
               "random_logits needs i64 step [1]: " + step.name);
  context.output("", logits.dtype, logits.shape);
}

void differentiate_random_logits(DerivativeContext& context) {
  if (context.wants(0)) context.add_gradient(0, context.output_gradient(0));
}

// A logarithm, a square root, a cosine, and ten rounds of two multiplications for each number.
Cost cost_random_logits(const OpView& view) {
  return {.flops = 25 * static_cast<double>(view.output(0).shape.elements()),
          .bytes = static_cast<double>(view.output(0).bytes())};
}

CpuKernel random_logits_kernel(const OpView& view) {
  return random_logits_cpu_kernel(view.output(0).dtype);
}

// The bias of each expert.
uint64_t random_logits_workspace_bytes(const OpView& view) {
  if (view.attributes<RandomLogitsAttributes>().bias == 0) return 0;
  return static_cast<uint64_t>(view.output(0).shape.row_elements()) * sizeof(double);
}

std::string print_random_logits(const Attributes& attributes) {
  const auto& a = attributes.as<RandomLogitsAttributes>();
  return fmt::format(
      "seed={} substream={}{}{}", a.seed, a.substream, text_of(a.origin),
      a.bias != 0 ? fmt::format(" bias={} bias_substream={}", a.bias, a.bias_substream) : "");
}

// The gradient that passes through is not a derivative, which finite differences would tell; it has
// a test of its own. So logits are constants here, and a term added to a few random numbers stands
// for what follows.
OpSample sample_random_logits(const std::string& name, const Shape& shape, int64_t step,
                              const RandomLogitsAttributes& attributes) {
  return {name, [=](SampleBuilder& sample) {
            const SampleBuilder::Options constant{.differentiable = false, .accumulation = true};
            const ValueId step_id = sample.values("step", {1}, {static_cast<double>(step)},
                                                  {.differentiable = false, .dtype = DType::i64});
            const auto random = [&](const Shape& of_shape) {
              const ValueId logits = sample.tensor("logits", of_shape, constant);
              return random_logits(sample.builder(), logits, step_id, attributes, "random");
            };
            sample.result(random(shape));
            const ValueId term = sample.tensor("term", {2, 3}, {.accumulation = true});
            sample.result(add(sample.builder(), random({2, 3}), term, "sum"));
          }};
}

std::vector<OpSample> samples_random_logits() {
  return {
      sample_random_logits("matrix", {5, 7}, 3, {.seed = 1, .substream = 2}),
      sample_random_logits("late step", {1, 3}, int64_t{1} << 40,
                           {.seed = ~uint64_t{0}, .substream = ~uint32_t{0}}),
      sample_random_logits(
          "chunks", {6, 5}, 2,
          {.seed = 1,
           .substream = 2,
           .origin = {.first_row = 2, .sequence = 4, .chunks = {.ranks = 2, .rank = 1}}}),
      sample_random_logits("bias", {5, 7}, 3,
                           {.seed = 1, .substream = 2, .bias = 0.5, .bias_substream = 4}),
      sample_random_logits("bias of all steps", {5, 7}, 3,
                           {.seed = 1, .substream = 2, .bias = -2, .bias_substream = 4}),
      sample_random_logits("many chunks", {131, 33}, 1, {.seed = 5, .substream = 1}),
  };
}

}  // namespace

ValueId random_logits(Builder& builder, ValueId logits, ValueId step,
                      const RandomLogitsAttributes& attributes, const std::string& name) {
  return builder.emit(kRandomLogits, Attributes(attributes), {logits, step}, name)[0];
}

const OpSpec kRandomLogits{
    .name = "random_logits",
    .infer = infer_random_logits,
    .differentiate = differentiate_random_logits,
    .cost = cost_random_logits,
    .cpu = {.kernel = random_logits_kernel, .workspace = random_logits_workspace_bytes},
    .cuda = only_kernel<TROUPE_CUDA(random_logits_cuda_kernel)>,
    .in_place = {.output = 0, .input = 0},
    .print_attributes = print_random_logits,
    .samples = samples_random_logits};

}  // namespace troupe
