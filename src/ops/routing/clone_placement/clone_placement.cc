#include "ops/routing/clone_placement/clone_placement.h"

#include <fmt/format.h>
#include <vector>

#include "ops/choose_kernel.h"
#include "ops/cpu/expert_slots.h"
#include "ops/cuda/slot_chunks.h"
#include "program/op_sample.h"

namespace troupe {

void place_clones_cpu(const KernelArguments& args);
void spread_over_clones_cpu(const KernelArguments& args);
CudaKernel place_clones_cuda_kernel(const OpView& op);
CudaKernel spread_over_clones_cuda_kernel(const OpView& op);

namespace {

void check_parts(const InferContext& context, const std::string& kind, int64_t experts) {
  const auto& a = context.attributes<ClonePlacementAttributes>();
  TROUPE_CHECK(a.parts >= 1 && experts % a.parts == 0 && a.clones >= 1,
               kind + ": ranks with equally many experts, and places for copies");
}

Shape slots_shape(const ClonePlacementAttributes& a, int64_t experts) {
  return {experts + int64_t{a.parts} * a.clones};
}

void infer_place_clones(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 1, "place_clones takes loads");
  const Value& loads = context.input(0);
  TROUPE_CHECK(loads.dtype == DType::i32 && loads.shape.rank() == 1 && !loads.rows.valid(),
               "place_clones needs i32 loads [E]: " + loads.name);
  const int64_t experts = loads.shape[0];
  check_parts(context, "place_clones", experts);
  const auto& a = context.attributes<ClonePlacementAttributes>();
  context.output("experts", DType::i32, {int64_t{a.parts} * a.clones});
  context.output("slot_loads", DType::i32, slots_shape(a, experts));
}

void infer_spread_over_clones(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 4,
               "spread_over_clones takes indices, running, experts, slot_loads");
  const Value& indices = context.input(0);
  const Value& running = context.input(1);
  TROUPE_CHECK(indices.dtype == DType::i32 && indices.shape.rank() == 2 && !indices.rows.valid(),
               "spread_over_clones needs i32 indices [T, k]: " + indices.name);
  TROUPE_CHECK(running.dtype == DType::i32 && running.shape.rank() == 1,
               "spread_over_clones needs i32 counts [E]: " + running.name);
  check_parts(context, "spread_over_clones", running.shape[0]);
  const auto& a = context.attributes<ClonePlacementAttributes>();
  TROUPE_CHECK(context.input(2).dtype == DType::i32 &&
                   context.input(2).shape == Shape({int64_t{a.parts} * a.clones}) &&
                   context.input(3).dtype == DType::i32 &&
                   context.input(3).shape == slots_shape(a, running.shape[0]),
               "spread_over_clones: a placement of other ranks: " + context.input(2).name);
  const Shape shape = indices.shape;
  context.output("", DType::i32, shape);
}

Cost cost_place_clones(const OpView& view) {
  return {.flops = 0,
          .bytes = static_cast<double>(view.input(0).bytes() + view.output(0).bytes() +
                                       view.output(1).bytes())};
}

// The choices are read twice: counted, then numbered.
Cost cost_spread_over_clones(const OpView& view) {
  return {.flops = 0,
          .bytes = static_cast<double>(3 * view.input(0).bytes() + view.input(1).bytes() +
                                       view.input(2).bytes() + view.input(3).bytes())};
}

CpuKernel place_clones_kernel(const OpView&) {
  return &place_clones_cpu;
}

CpuKernel spread_over_clones_kernel(const OpView&) {
  return &spread_over_clones_cpu;
}

// The rows of each rank, and the copies that it has.
uint64_t place_clones_workspace_bytes(const OpView& view) {
  return 2 * sizeof(int32_t) *
         static_cast<uint64_t>(view.attributes<ClonePlacementAttributes>().parts);
}

// Of each chunk of slots and of all of them: how often each expert was chosen.
uint64_t spread_over_clones_workspace_bytes(const OpView& view) {
  const int64_t chunks = slot_chunks(view.input(0).shape.elements());
  return static_cast<uint64_t>((chunks + 1) * view.input(1).shape[0]) * sizeof(int32_t);
}

// The same on a GPU, in its chunks.
uint64_t spread_over_clones_cuda_scratch_bytes(const OpView& view) {
  const int64_t chunks = warp_chunks(view.input(0).shape.elements());
  return static_cast<uint64_t>((chunks + 1) * view.input(1).shape[0]) * sizeof(int32_t);
}

std::string print_clone_placement(const Attributes& attributes) {
  const auto& a = attributes.as<ClonePlacementAttributes>();
  return fmt::format("parts={} clones={}", a.parts, a.clones);
}

OpSample sample_placement(const char* name, const ClonePlacementAttributes& attributes,
                          const std::vector<int32_t>& loads) {
  return {name, [=](SampleBuilder& sample) {
            const ValueId counts =
                sample.integers("loads", {static_cast<int64_t>(loads.size())}, loads);
            const ClonePlacement placement =
                place_clones(sample.builder(), counts, attributes, "placement");
            sample.result_without_gradient(placement.experts);
            sample.result_without_gradient(placement.slot_loads);
          }};
}

std::vector<OpSample> samples_place_clones() {
  std::vector<int32_t> many;
  for (int32_t expert = 0; expert < 512; ++expert) {
    many.push_back(expert * 37 % 101 + (expert % 61 == 3 ? 2000 : 0));
  }
  return {
      sample_placement("one hot expert", {.parts = 4, .clones = 1}, {40, 2, 2, 2, 2, 2, 2, 2}),
      sample_placement("even loads", {.parts = 2, .clones = 2}, {3, 3, 3, 3}),
      sample_placement("no rows", {.parts = 3, .clones = 1}, {0, 0, 0}),
      sample_placement("one rank", {.parts = 1, .clones = 2}, {9, 1}),
      sample_placement("a hot rank of many experts", {.parts = 4, .clones = 2},
                       {50, 60, 70, 80, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}),
      sample_placement("a rank that needs no copy, two that give", {.parts = 4, .clones = 3},
                       {100, 0, 0, 90, 30, 31, 0, 1}),
      sample_placement("many ranks", {.parts = 64, .clones = 4}, many),
  };
}

// A rank's choices, of which the ranks before it made as many in the order of experts.
OpSample sample_spreading(const char* name, const ClonePlacementAttributes& attributes,
                          int32_t experts, int64_t tokens) {
  return {name, [=](SampleBuilder& sample) {
            constexpr int32_t kTopK = 3;
            std::vector<int32_t> chosen;
            std::vector<int32_t> running(static_cast<size_t>(experts), 0);
            std::vector<int32_t> loads(static_cast<size_t>(experts), 5);
            for (int64_t slot = 0; slot < kTopK * tokens; ++slot) {
              // Half of all choices are expert 1, some are none.
              const auto draw = static_cast<int32_t>(slot * 31 % (2 * experts + 1));
              const int32_t expert = draw >= experts ? std::min(1, 2 * experts - draw - 1) : draw;
              chosen.push_back(expert);
              if (expert >= 0) running[static_cast<size_t>(expert)] += 1;
            }
            for (size_t i = 0; i < running.size(); ++i) {
              running[i] += static_cast<int32_t>(i % 3);
              loads[i] += running[i];
            }
            const ValueId indices = sample.integers("indices", {tokens, kTopK}, chosen);
            const ValueId counts = sample.integers("running", {experts}, running);
            const ValueId all = sample.integers("loads", {experts}, loads);
            const ClonePlacement placement =
                place_clones(sample.builder(), all, attributes, "placement");
            sample.result_without_gradient(
                spread_over_clones(sample.builder(), indices, counts, placement, "slots"));
          }};
}

std::vector<OpSample> samples_spread_over_clones() {
  return {
      sample_spreading("few tokens", {.parts = 2, .clones = 1}, 4, 9),
      sample_spreading("several copies", {.parts = 4, .clones = 2}, 8, 100),
      sample_spreading("many chunks", {.parts = 8, .clones = 2}, 24, 15000),
  };
}

}  // namespace

ClonePlacement place_clones(Builder& builder, ValueId loads,
                            const ClonePlacementAttributes& attributes, const std::string& name) {
  const auto outputs = builder.emit(kPlaceClones, Attributes(attributes), {loads}, name);
  return {.experts = outputs[0], .slot_loads = outputs[1], .attributes = attributes};
}

ValueId spread_over_clones(Builder& builder, ValueId indices, ValueId running,
                           const ClonePlacement& placement, const std::string& name) {
  return builder.emit(kSpreadOverClones, Attributes(placement.attributes),
                      {indices, running, placement.experts, placement.slot_loads}, name)[0];
}

const OpSpec kPlaceClones{
    .name = "place_clones",
    .infer = infer_place_clones,
    .cost = cost_place_clones,
    .cpu = {.kernel = place_clones_kernel, .workspace = place_clones_workspace_bytes},
    .cuda = only_kernel<TROUPE_CUDA(place_clones_cuda_kernel)>,
    .print_attributes = print_clone_placement,
    .samples = samples_place_clones};

const OpSpec kSpreadOverClones{
    .name = "spread_over_clones",
    .infer = infer_spread_over_clones,
    .cost = cost_spread_over_clones,
    .cpu = {.kernel = spread_over_clones_kernel, .workspace = spread_over_clones_workspace_bytes},
    .cuda = only_kernel<TROUPE_CUDA(spread_over_clones_cuda_kernel),
                        spread_over_clones_cuda_scratch_bytes>,
    .print_attributes = print_clone_placement,
    .samples = samples_spread_over_clones};

}  // namespace troupe
