#include "ops/routing/jitter/jitter.h"

#include <fmt/format.h>
#include <vector>

#include "ops/choose_kernel.h"
#include "program/derivative.h"
#include "program/op_sample.h"

namespace troupe {

CpuKernel jitter_cpu_kernel(const OpView& op);
CudaKernel jitter_cuda_kernel(const OpView& op);

namespace {

void infer_jitter(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 2, "jitter takes input, step");
  const Value& input = context.input(0);
  const Value& step = context.input(1);
  TROUPE_CHECK(is_float(input.dtype) && !input.rows.valid(),
               "jitter needs a float tensor that is not ragged: " + input.name);
  TROUPE_CHECK(step.dtype == DType::i64 && step.shape == Shape({1}),
               "jitter needs i64 step [1]: " + step.name);
  const double epsilon = context.attributes<JitterAttributes>().epsilon;
  TROUPE_CHECK(epsilon > 0 && epsilon < 1, "jitter: epsilon lies between 0 and 1");
  context.output("", input.dtype, input.shape);
}

void differentiate_jitter(DerivativeContext& context) {
  if (!context.wants(0)) return;
  context.add_gradient(
      0, jitter(context.builder(), context.output_gradient(0), context.input(1),
                context.attributes<JitterAttributes>(), "d_" + context.input_name(0)));
}

// Ten rounds of two multiplications for four random numbers, and three operations for each factor.
Cost cost_jitter(const OpView& view) {
  return {.flops = 8 * static_cast<double>(view.input(0).shape.elements()),
          .bytes = static_cast<double>(view.input(0).bytes() + view.output(0).bytes())};
}

std::string print_jitter(const Attributes& attributes) {
  const auto& a = attributes.as<JitterAttributes>();
  return fmt::format("epsilon={} seed={} substream={}{}", a.epsilon, a.seed, a.substream,
                     text_of(a.origin));
}

OpSample sample_jitter(const std::string& name, const Shape& shape, int64_t step,
                       const JitterAttributes& attributes, bool differentiable = true) {
  return {name, [=](SampleBuilder& sample) {
            const ValueId x = sample.tensor("x", shape, {.differentiable = differentiable});
            const ValueId step_id = sample.values("step", {1}, {static_cast<double>(step)},
                                                  {.differentiable = false, .dtype = DType::i64});
            const ValueId y = jitter(sample.builder(), x, step_id, attributes, "y");
            sample.result(y);
            if (differentiable) return;
            // Only a few elements are worth a finite difference.
            const ValueId few = sample.tensor("few", {3});
            sample.result(jitter(sample.builder(), few, step_id, attributes, "jittered_few"));
          }};
}

std::vector<OpSample> samples_jitter() {
  return {
      sample_jitter("matrix", {5, 7}, 3, {.seed = 1, .substream = 2, .epsilon = 0.01}),
      sample_jitter("some rows", {3, 7}, 3,
                    {.seed = 1, .substream = 2, .epsilon = 0.01, .origin = {.first_row = 5}}),
      sample_jitter("chunks", {6, 5}, 3,
                    {.seed = 1,
                     .substream = 2,
                     .epsilon = 0.01,
                     .origin = {.first_row = 2, .sequence = 4, .chunks = {.ranks = 2, .rank = 1}}}),
      sample_jitter("scalar", {1}, 0, {.seed = 1, .substream = 0, .epsilon = 0.5}),
      sample_jitter("late step", {2, 3, 4}, int64_t{1} << 40,
                    {.seed = ~uint64_t{0}, .substream = ~uint32_t{0}, .epsilon = 0.99}),
      sample_jitter("many chunks", {301, 111}, 1, {.seed = 5, .substream = 1, .epsilon = 0.1},
                    false),
  };
}

}  // namespace

ValueId jitter(Builder& builder, ValueId input, ValueId step, const JitterAttributes& attributes,
               const std::string& name) {
  return builder.emit(kJitter, Attributes(attributes), {input, step}, name)[0];
}

const OpSpec kJitter{.name = "jitter",
                     .infer = infer_jitter,
                     .differentiate = differentiate_jitter,
                     .cost = cost_jitter,
                     .cpu = {.kernel = jitter_cpu_kernel},
                     .cuda = only_kernel<TROUPE_CUDA(jitter_cuda_kernel)>,
                     .in_place = {.output = 0, .input = 0},
                     .print_attributes = print_jitter,
                     .samples = samples_jitter};

}  // namespace troupe
