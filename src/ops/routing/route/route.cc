#include "ops/routing/route/route.h"

#include <algorithm>
#include <fmt/format.h>
#include <limits>
#include <vector>

#include "ops/choose_kernel.h"
#include "ops/cpu/expert_slots.h"
#include "ops/cuda/slot_chunks.h"
#include "program/op_sample.h"

namespace troupe {

void route_cpu(const KernelArguments& args);
CudaKernel route_cuda_kernel(const OpView& op);

namespace {

void infer_route(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 1, "route takes the indices");
  const Value& indices = context.input(0);
  const auto& attributes = context.attributes<RouteAttributes>();
  TROUPE_CHECK(indices.dtype == DType::i32 && indices.shape.rank() == 2,
               "route needs i32 indices [T, k]: " + indices.name);
  TROUPE_CHECK(attributes.experts >= 1, "route needs at least one expert");
  TROUPE_CHECK(attributes.row_multiple >= 1 && attributes.padded_capacity >= 0 &&
                   attributes.most_slots >= 0 && attributes.expected_slots >= 0,
               "route: a multiple and parts are at least 1, capacity and slots at least 0");
  TROUPE_CHECK(attributes.padded_capacity == 0 || attributes.row_multiple == 1,
               "route pads rows to a multiple or to a capacity");
  const int64_t slots = indices.shape.elements();
  const int64_t rows = route_row_bound(slots, attributes);
  constexpr int64_t kLargest = std::numeric_limits<int32_t>::max();
  TROUPE_CHECK(
      slots >= 1 && slots <= kLargest && rows <= kLargest,
      "route numbers slots and rows in 32 bits: " + indices.name + " " + indices.shape.to_string());
  const int32_t experts = attributes.experts;
  context.output("counts", DType::i32, {experts});
  context.output("offsets", DType::i32, {experts + 1});
  const int64_t expected = attributes.padded_capacity == 0 && attributes.expected_slots > 0
                               ? std::min(attributes.expected_slots, rows)
                               : rows;
  context.output("row_slot", DType::i32, {rows}, RowCount{context.outputs()[1], experts, expected});
  context.output("slot_row", DType::i32, indices.shape);
}

Cost cost_route(const OpView& view) {
  // The indices are read twice, once to count and once to place.
  return {.flops = 0,
          .bytes = static_cast<double>(2 * view.input(0).bytes() + view.output(2).bytes() +
                                       view.output(3).bytes())};
}

CpuKernel route_kernel(const OpView&) {
  return &route_cpu;
}

uint64_t route_workspace_bytes(const OpView& view) {
  const int64_t experts = view.attributes<RouteAttributes>().experts;
  return static_cast<uint64_t>(slot_chunks(view.input(0).shape.elements()) * experts) *
         sizeof(int32_t);
}

std::string print_route(const Attributes& attributes) {
  const auto& a = attributes.as<RouteAttributes>();
  std::string text = fmt::format("experts={}", a.experts);
  if (a.row_multiple != 1) text += fmt::format(" row_multiple={}", a.row_multiple);
  if (a.padded_capacity != 0) text += fmt::format(" padded_capacity={}", a.padded_capacity);
  if (a.most_slots != 0) text += fmt::format(" most_slots={}", a.most_slots);
  return text;
}

void sample_route(SampleBuilder& sample, int64_t tokens, int64_t top_k,
                  const RouteAttributes& attributes, const std::vector<int32_t>& indices) {
  const ValueId chosen = sample.integers("indices", {tokens, top_k}, indices);
  const Routing routing = route(sample.builder(), chosen, attributes, "routing");
  sample.result_without_gradient(routing.counts);
  sample.result_without_gradient(routing.offsets);
  sample.result_without_gradient(routing.row_slot);
  sample.result_without_gradient(routing.slot_row);
}

uint64_t route_cuda_scratch_bytes(const OpView& op) {
  const int64_t chunks = warp_chunks(op.input(0).shape.elements());
  return static_cast<uint64_t>(chunks * op.attributes<RouteAttributes>().experts) * sizeof(int32_t);
}

std::vector<OpSample> samples_route() {
  return {
      {"an expert without tokens",
       [](SampleBuilder& sample) {
         sample_route(sample, 5, 2, {.experts = 4}, {3, 0, 1, 3, 0, 1, 3, 1, 0, 3});
       }},
      {"dropped slots and a token without any",
       [](SampleBuilder& sample) {
         sample_route(sample, 4, 3, {.experts = 5}, {4, -1, 2, -1, -1, -1, 0, 4, 2, -1, 0, 3});
       }},
      {"one token, one slot",
       [](SampleBuilder& sample) { sample_route(sample, 1, 1, {.experts = 3}, {1}); }},
      {"every slot dropped",
       [](SampleBuilder& sample) {
         sample_route(sample, 3, 1, {.experts = 2}, {-1, -1, -1});
       }},
      {"many chunks",
       [](SampleBuilder& sample) {
         const int64_t tokens = 2 * kSlotChunk + 3;
         std::vector<int32_t> indices;
         for (int64_t token = 0; token < tokens; ++token) {
           const auto first = static_cast<int32_t>(token * token % 7);
           indices.push_back(first);
           indices.push_back(token % 11 == 0 ? -1
                                             : (first + 1 + static_cast<int32_t>(token % 5)) % 7);
         }
         sample_route(sample, tokens, 2, {.experts = 7}, indices);
       }},
      {"rows in multiples of four",
       [](SampleBuilder& sample) {
         sample_route(sample, 5, 2, {.experts = 5, .row_multiple = 4},
                      {3, 0, 1, 3, -1, 1, 3, 1, 1, 3});
       }},
      {"rows in multiples, every slot dropped",
       [](SampleBuilder& sample) {
         sample_route(sample, 3, 1, {.experts = 2, .row_multiple = 16}, {-1, -1, -1});
       }},
      {"few slots that name an expert",
       [](SampleBuilder& sample) {
         sample_route(sample, 5, 2, {.experts = 3, .most_slots = 4},
                      {-1, 0, -1, -1, 2, 0, -1, -1, -1, 1});
       }},
      {"rows padded to a capacity",
       [](SampleBuilder& sample) {
         sample_route(sample, 4, 2, {.experts = 4, .padded_capacity = 3},
                      {3, 0, -1, 3, 0, 1, 3, -1});
       }},
      {"more slots than the capacity",
       [](SampleBuilder& sample) {
         sample_route(sample, 4, 1, {.experts = 2, .padded_capacity = 2}, {1, 1, 1, 1});
       }},
  };
}

}  // namespace

int64_t route_row_bound(int64_t slots, const RouteAttributes& attributes) {
  if (attributes.padded_capacity != 0) {
    return int64_t{attributes.experts} * attributes.padded_capacity;
  }
  const int64_t most = attributes.most_slots == 0 ? slots : std::min(slots, attributes.most_slots);
  const int64_t multiple = attributes.row_multiple;
  const int64_t in_use = std::min<int64_t>(most, attributes.experts);
  return (most + in_use * (multiple - 1)) / multiple * multiple;
}

Routing route(Builder& builder, ValueId indices, const RouteAttributes& attributes,
              const std::string& name) {
  const auto top_k = static_cast<int32_t>(builder.value(indices).shape.back());
  const auto outputs = builder.emit(kRoute, Attributes(attributes), {indices}, name);
  return {.counts = outputs[0],
          .offsets = outputs[1],
          .row_slot = outputs[2],
          .slot_row = outputs[3],
          .top_k = top_k,
          .experts = attributes.experts};
}

const OpSpec kRoute{.name = "route",
                    .infer = infer_route,
                    .cost = cost_route,
                    .cpu = {.kernel = route_kernel, .workspace = route_workspace_bytes},
                    .cuda = only_kernel<TROUPE_CUDA(route_cuda_kernel), route_cuda_scratch_bytes>,
                    .print_attributes = print_route,
                    .samples = samples_route};

}  // namespace troupe
