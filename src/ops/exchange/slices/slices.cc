#include "ops/exchange/slices/slices.h"

#include <fmt/format.h>
#include <vector>

#include "ops/choose_kernel.h"
#include "ops/exchange/slices/slices_cpu.h"
#include "program/derivative.h"
#include "program/op_sample.h"

namespace troupe {

void join_slices_cpu(const KernelArguments& args);
void take_slice_cpu(const KernelArguments& args);
CpuKernel take_slice_gradient_cpu_kernel(const OpView& op);
CudaKernel join_slices_cuda_kernel(const OpView& op);
CudaKernel take_slice_cuda_kernel(const OpView& op);
CudaKernel take_slice_gradient_cuda_kernel(const OpView& op);

namespace {

void check_cut(const SliceCut& cut, const Value& value) {
  TROUPE_CHECK(is_float(value.dtype) && !value.rows.valid() && cut.dimension >= 0 &&
                   cut.dimension < value.shape.rank() && cut.ranks > 0 && cut.place >= 0 &&
                   cut.place < cut.ranks,
               "slices: " + value.name + " " + value.shape.to_string());
  for (const SliceSection& section : cut.sections) {
    TROUPE_CHECK(section.size >= 0 && section.copies > 0 && cut.ranks % section.copies == 0 &&
                     section.size * section.copies % cut.ranks == 0,
                 "slices: parts of a section are not equal: " + value.name);
  }
}

Shape with_extent(const Shape& shape, int dimension, int64_t extent) {
  std::vector<int64_t> extents;
  for (int i = 0; i < shape.rank(); ++i) extents.push_back(i == dimension ? extent : shape[i]);
  return Shape(extents);
}

void infer_join_slices(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 1, "join_slices takes the slices of all ranks");
  const Value x = context.input(0);
  const auto& cut = context.attributes<SliceCut>();
  check_cut(cut, x);
  TROUPE_CHECK(x.shape[0] % cut.ranks == 0, "join_slices: not as many slices: " + x.name);
  const Shape slice = with_extent(x.shape, 0, x.shape[0] / cut.ranks);
  TROUPE_CHECK(slice[cut.dimension] == slice_extent(cut),
               "join_slices: not the slices of the cut: " + x.name);
  context.output("", x.dtype, with_extent(slice, cut.dimension, whole_extent(cut)));
}

void infer_take_slice(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 1, "take_slice takes a whole tensor");
  const Value whole = context.input(0);
  const auto& cut = context.attributes<SliceCut>();
  check_cut(cut, whole);
  TROUPE_CHECK(whole.shape[cut.dimension] == whole_extent(cut),
               "take_slice: not what is cut: " + whole.name);
  context.output("", whole.dtype, with_extent(whole.shape, cut.dimension, slice_extent(cut)));
}

void infer_take_slice_gradient(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 2, "take_slice_gradient takes d_slice and target");
  const Value slice = context.input(0);
  const auto& cut = context.attributes<SliceCut>();
  check_cut(cut, slice);
  TROUPE_CHECK(
      slice.shape[cut.dimension] == slice_extent(cut) &&
          (!context.has_input(1) || context.input(1).dtype == accumulation_dtype(slice.dtype)),
      "take_slice_gradient: not that of the cut, or its target: " + slice.name);
  declare_weight_gradient(context, 1, "", slice.dtype,
                          with_extent(slice.shape, cut.dimension, whole_extent(cut)));
}

void differentiate_take_slice(DerivativeContext& context) {
  if (!context.wants(0)) return;
  const auto target = context.weight_target(0);
  auto attributes = context.attributes<SliceCut>();
  attributes.accumulate = target.accumulate;
  context.add_weight_gradient(0, context.builder().emit(kTakeSliceGradient, Attributes(attributes),
                                                        {context.output_gradient(0), target.target},
                                                        "d_" + context.input_name(0))[0]);
}

Cost cost_slices(const OpView& op) {
  return {.flops = 0, .bytes = 2 * static_cast<double>(op.output(0).bytes())};
}

std::string print_cut(const SliceCut& cut) {
  std::string text = fmt::format("dimension={} ranks={} sections=", cut.dimension, cut.ranks);
  for (size_t i = 0; i < cut.sections.size() && cut.sections[i].size > 0; ++i) {
    text += fmt::format("{}{}", i == 0 ? "" : "+", cut.sections[i].size);
    if (cut.sections[i].copies > 1) text += fmt::format("x{}", cut.sections[i].copies);
  }
  return text;
}

std::string print_join_slices(const Attributes& attributes) {
  return print_cut(attributes.as<SliceCut>());
}

std::string print_take_slice(const Attributes& attributes) {
  const auto& cut = attributes.as<SliceCut>();
  return print_cut(cut) +
         fmt::format(" place={}{}", cut.place, cut.accumulate ? " accumulate=1" : "");
}

CpuKernel join_slices_kernel(const OpView&) {
  return &join_slices_cpu;
}

CpuKernel take_slice_kernel(const OpView&) {
  return &take_slice_cpu;
}

struct SliceCase {
  std::string name;
  Shape whole;
  SliceCut cut;
};

std::vector<SliceCase> slice_cases() {
  return {{"rows", {6, 5}, {.sections = {{{6}}}, .ranks = 3, .place = 1}},
          {"columns", {3, 8}, {.sections = {{{8}}}, .dimension = 1, .ranks = 2, .place = 1}},
          {"sections", {10, 3}, {.sections = {{{6}, {4}}}, .ranks = 2, .place = 1}},
          {"copies", {12, 3}, {.sections = {{{8}, {2, 2}, {2, 2}}}, .ranks = 4, .place = 3}},
          {"rows of a batch", {3, 8, 5}, {.sections = {{{4}, {4}}}, .dimension = 1, .ranks = 2}},
          {"columns of a batch",
           {2, 3, 12},
           {.sections = {{{12}}}, .dimension = 2, .ranks = 4, .place = 2}},
          {"several pieces",
           {300, 260},
           {.sections = {{{260}}}, .dimension = 1, .ranks = 2, .place = 1}}};
}

constexpr SampleBuilder::Options kNotDifferentiable{.differentiable = false};

std::vector<OpSample> samples_join_slices() {
  std::vector<OpSample> samples;
  for (const SliceCase& c : slice_cases()) {
    samples.push_back({c.name, [c](SampleBuilder& sample) {
                         Shape x = with_extent(c.whole, c.cut.dimension, slice_extent(c.cut));
                         x = with_extent(x, 0, x[0] * c.cut.ranks);
                         const ValueId slices = sample.tensor("x", x, kNotDifferentiable);
                         sample.result_without_gradient(
                             join_slices(sample.builder(), slices, c.cut, "whole"));
                       }});
  }
  return samples;
}

std::vector<OpSample> samples_take_slice() {
  std::vector<OpSample> samples;
  for (const SliceCase& c : slice_cases()) {
    if (c.whole.elements() > 1000) continue;  // too many for finite differences
    samples.push_back({c.name, [c](SampleBuilder& sample) {
                         const ValueId whole = sample.tensor("whole", c.whole);
                         sample.result(take_slice(sample.builder(), whole, c.cut, "slice"));
                       }});
  }
  // The second gradient is added to the first.
  samples.push_back(
      {"two slices of one tensor", [](SampleBuilder& sample) {
         const ValueId whole = sample.tensor("whole", {6, 5});
         for (const int32_t place : {0, 2}) {
           const SliceCut cut{.sections = {{{6}}}, .ranks = 3, .place = place};
           sample.result(take_slice(sample.builder(), whole, cut, "slice" + std::to_string(place)));
         }
       }});
  return samples;
}

}  // namespace

ValueId join_slices(Builder& builder, ValueId x, const SliceCut& cut, const std::string& name) {
  return builder.emit(kJoinSlices, Attributes(cut), {x}, name)[0];
}

ValueId take_slice(Builder& builder, ValueId whole, const SliceCut& cut, const std::string& name) {
  return builder.emit(kTakeSlice, Attributes(cut), {whole}, name)[0];
}

const OpSpec kJoinSlices{.name = "join_slices",
                         .infer = infer_join_slices,
                         .cost = cost_slices,
                         .cpu = {.kernel = join_slices_kernel},
                         .cuda = only_kernel<TROUPE_CUDA(join_slices_cuda_kernel)>,
                         .print_attributes = print_join_slices,
                         .samples = samples_join_slices};

const OpSpec kTakeSlice{.name = "take_slice",
                        .infer = infer_take_slice,
                        .differentiate = differentiate_take_slice,
                        .cost = cost_slices,
                        .cpu = {.kernel = take_slice_kernel},
                        .cuda = only_kernel<TROUPE_CUDA(take_slice_cuda_kernel)>,
                        .print_attributes = print_take_slice,
                        .samples = samples_take_slice};

const OpSpec kTakeSliceGradient{.name = "take_slice_gradient",
                                .infer = infer_take_slice_gradient,
                                .cost = cost_slices,
                                .cpu = {.kernel = take_slice_gradient_cpu_kernel},
                                .cuda = only_kernel<TROUPE_CUDA(take_slice_gradient_cuda_kernel)>,
                                .print_attributes = print_take_slice};

}  // namespace troupe
