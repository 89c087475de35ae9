#include "ops/optimizer/accumulate/accumulate.h"

#include <fmt/format.h>

#include "ops/choose_kernel.h"
#include "program/op_sample.h"

namespace troupe {

CpuKernel accumulate_cpu_kernel(const OpView& op);
CudaKernel accumulate_cuda_kernel(const OpView& op);

namespace {

void infer_accumulate(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 3, "accumulate: takes target, source and factor");
  const Value& target = context.input(0);
  const Value& source = context.input(1);
  TROUPE_CHECK(target.dtype == DType::f64, "accumulate: target is not f64: " + target.name);
  TROUPE_CHECK(source.dtype == DType::f64 || source.dtype == DType::f32 ||
                   source.dtype == DType::i32 || source.dtype == DType::i64,
               "accumulate: source is not f64, f32, i32 or i64: " + source.name);
  const auto& attributes = context.attributes<AccumulateAttributes>();
  const int64_t room = target.shape.elements() - attributes.first;
  TROUPE_CHECK(
      !target.rows.valid() && !source.rows.valid() && attributes.first >= 0 &&
          (attributes.in_part ? source.shape.elements() <= room : source.shape.elements() == room),
      "accumulate: " + target.name + " " + target.shape.to_string() + " and " + source.name + " " +
          source.shape.to_string());
  if (context.has_input(2)) {
    const Value& factor = context.input(2);
    TROUPE_CHECK(
        (factor.dtype == DType::f64 || factor.dtype == DType::f32) && factor.shape == Shape({1}),
        "accumulate: not a factor: " + factor.name + " " + factor.shape.to_string());
  }
  context.mutates(0);
}

Cost cost_accumulate(const OpView& op) {
  const double passes = op.attributes<AccumulateAttributes>().overwrite ? 1 : 2;
  return {.flops = 2 * static_cast<double>(op.input(1).shape.elements()),
          .bytes = passes * static_cast<double>(op.input(0).bytes()) +
                   static_cast<double>(op.input(1).bytes())};
}

std::string print_accumulate(const Attributes& attributes) {
  const auto& values = attributes.as<AccumulateAttributes>();
  return fmt::format("weight={} overwrite={}{}{}", values.weight, values.overwrite ? 1 : 0,
                     values.largest ? " largest=1" : "",
                     values.in_part ? fmt::format(" first={}", values.first) : "");
}

std::vector<OpSample> samples_accumulate() {
  const auto sums = [](SampleBuilder& sample) {
    const ValueId target = sample.builder().metric("total", DType::f64, {7});
    const ValueId first = sample.tensor("first", {7}, {.accumulation = true});
    const ValueId second = sample.integers("second", {1, 7}, {3, -1, 4, 1, -5, 9, 2});
    accumulate(sample.builder(), target, first, 0.5, /*overwrite=*/true);
    accumulate(sample.builder(), target, second, -2.0, /*overwrite=*/false);
    accumulate(sample.builder(), target, first, 1.0, /*overwrite=*/false);
    sample.result_without_gradient(target);
  };
  const auto scalar = [](SampleBuilder& sample) {
    const ValueId target = sample.builder().metric("total", DType::f64, {1});
    const ValueId source = sample.tensor("source", {}, {.accumulation = true});
    accumulate(sample.builder(), target, source, 3.0, /*overwrite=*/true);
    sample.result_without_gradient(target);
  };
  const auto several_chunks = [](SampleBuilder& sample) {
    const ValueId target = sample.builder().metric("total", DType::f64, {40003});
    const ValueId source = sample.tensor("source", {40003}, {.accumulation = true});
    accumulate(sample.builder(), target, source, 0.25, /*overwrite=*/true);
    sample.result_without_gradient(target);
  };
  const auto with_factor = [](SampleBuilder& sample) {
    const ValueId target = sample.builder().metric("total", DType::f64, {3});
    const ValueId source = sample.tensor("source", {3}, {.accumulation = true});
    const ValueId factor = sample.tensor("factor", {1}, {.accumulation = true});
    accumulate(sample.builder(), target, source, 0.5, /*overwrite=*/true, factor);
    accumulate(sample.builder(), target, source, 3.0, /*overwrite=*/false, factor);
    sample.result_without_gradient(target);
  };
  const auto largest = [](SampleBuilder& sample) {
    const ValueId target = sample.builder().metric("peak", DType::f64, {4});
    for (const std::vector<int32_t>& terms :
         {std::vector<int32_t>{3, -1, 4, 1}, {2, 7, 4, -8}, {5, 5, -9, 2}}) {
      const ValueId source = sample.integers("source", {4}, terms);
      accumulate_largest(sample.builder(), target, source, 0.5, /*overwrite=*/terms[0] == 3);
    }
    sample.result_without_gradient(target);
  };
  const auto in_part = [](SampleBuilder& sample) {
    const ValueId target = sample.builder().metric("peaks", DType::f64, {1, 5});
    for (const std::vector<int32_t>& terms : {std::vector<int32_t>{3, 1}, {2, 7}}) {
      const ValueId source = sample.integers("source", {2}, terms);
      accumulate_largest_at(sample.builder(), target, source, 2, /*overwrite=*/terms[0] == 3);
      accumulate_largest_at(sample.builder(), target, source, 0, /*overwrite=*/terms[0] == 3);
    }
    const ValueId last = sample.tensor("last", {1}, {.accumulation = true});
    accumulate_largest_at(sample.builder(), target, last, 4, /*overwrite=*/true);
    sample.result_without_gradient(target);
  };
  const auto counts_in_part = [](SampleBuilder& sample) {
    const ValueId target = sample.builder().metric("counts", DType::f64, {2, 3});
    const ValueId all = sample.integers("all", {6}, {1, 2, 3, 4, 5, 6});
    accumulate(sample.builder(), target, all, 1, /*overwrite=*/true);
    const ValueId counts = sample.integers64("counts", {3}, {int64_t{1} << 40, 7, 0});
    accumulate_at(sample.builder(), target, counts, 3);
    accumulate_at(sample.builder(), target, counts, 3);
    sample.result_without_gradient(target);
  };
  return {{"overwrite, then add", sums},
          {"the largest", largest},
          {"counts in a part", counts_in_part},
          {"the largest in a part", in_part},
          {"scalar", scalar},
          {"several chunks", several_chunks},
          {"factor", with_factor}};
}

}  // namespace

void accumulate(Builder& builder, ValueId target, ValueId source, double weight, bool overwrite,
                ValueId factor) {
  const AccumulateAttributes attributes{.weight = weight, .overwrite = overwrite};
  const std::string name = builder.value(target).name;
  builder.emit(kAccumulate, Attributes(attributes), {target, source, factor}, name);
}

void accumulate_largest(Builder& builder, ValueId target, ValueId source, double weight,
                        bool overwrite) {
  const AccumulateAttributes attributes{.weight = weight, .overwrite = overwrite, .largest = true};
  const std::string name = builder.value(target).name;
  builder.emit(kAccumulate, Attributes(attributes), {target, source, ValueId{}}, name);
}

void accumulate_at(Builder& builder, ValueId target, ValueId source, int64_t first) {
  const AccumulateAttributes attributes{.in_part = true, .first = first};
  const std::string name = builder.value(target).name;
  builder.emit(kAccumulate, Attributes(attributes), {target, source, ValueId{}}, name);
}

void accumulate_largest_at(Builder& builder, ValueId target, ValueId source, int64_t first,
                           bool overwrite) {
  const AccumulateAttributes attributes{
      .overwrite = overwrite, .largest = true, .in_part = true, .first = first};
  const std::string name = builder.value(target).name;
  builder.emit(kAccumulate, Attributes(attributes), {target, source, ValueId{}}, name);
}

const OpSpec kAccumulate{.name = "accumulate",
                         .infer = infer_accumulate,
                         .cost = cost_accumulate,
                         .cpu = {.kernel = accumulate_cpu_kernel},
                         .cuda = only_kernel<TROUPE_CUDA(accumulate_cuda_kernel)>,
                         .print_attributes = print_accumulate,
                         .samples = samples_accumulate};

}  // namespace troupe
