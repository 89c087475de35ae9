#include "ops/route/route.h"

#include <limits>
#include <vector>

#include "ops/route/route_cpu.h"
#include "program/op_sample.h"

namespace troupe {

void route_cpu(const KernelArguments& args);

namespace {

void infer_route(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 1, "route takes the indices");
  const Value& indices = context.input(0);
  const auto experts = context.attributes<RouteAttributes>().experts;
  TROUPE_CHECK(indices.dtype == DType::i32 && indices.shape.rank() == 2,
               "route needs i32 indices [T, k]: " + indices.name);
  TROUPE_CHECK(experts >= 1, "route needs at least one expert");
  const Shape shape = indices.shape;
  const int64_t slots = shape.elements();
  TROUPE_CHECK(slots >= 1 && slots <= std::numeric_limits<int32_t>::max(),
               "route numbers slots in 32 bits: " + indices.name + " " + shape.to_string());
  context.output("counts", DType::i32, {experts});
  context.output("offsets", DType::i32, {experts + 1});
  context.output("row_slot", DType::i32, {slots}, RowCount{context.outputs()[1], experts});
  context.output("slot_row", DType::i32, shape);
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
  const Shape& shape = view.input(0).shape;
  const int64_t experts = view.attributes<RouteAttributes>().experts;
  return static_cast<uint64_t>(route_chunks(shape[0], shape[1]) * experts) * sizeof(int32_t);
}

std::string print_route(const Attributes& attributes) {
  return "experts=" + std::to_string(attributes.as<RouteAttributes>().experts);
}

void sample_route(SampleBuilder& sample, int64_t tokens, int64_t top_k, int32_t experts,
                  const std::vector<int32_t>& indices) {
  const ValueId chosen = sample.integers("indices", {tokens, top_k}, indices);
  const Routing routing = route(sample.builder(), chosen, {.experts = experts}, "routing");
  sample.result_without_gradient(routing.counts);
  sample.result_without_gradient(routing.offsets);
  sample.result_without_gradient(routing.row_slot);
  sample.result_without_gradient(routing.slot_row);
}

std::vector<OpSample> samples_route() {
  return {
      {"an expert without tokens",
       [](SampleBuilder& sample) {
         sample_route(sample, 5, 2, 4, {3, 0, 1, 3, 0, 1, 3, 1, 0, 3});
       }},
      {"dropped slots and a token without any",
       [](SampleBuilder& sample) {
         sample_route(sample, 4, 3, 5, {4, -1, 2, -1, -1, -1, 0, 4, 2, -1, 0, 3});
       }},
      {"one token, one slot", [](SampleBuilder& sample) { sample_route(sample, 1, 1, 3, {1}); }},
      {"every slot dropped",
       [](SampleBuilder& sample) {
         sample_route(sample, 3, 1, 2, {-1, -1, -1});
       }},
      {"many chunks",
       [](SampleBuilder& sample) {
         const int64_t tokens = 4 * route_chunk_tokens(2) + 3;
         std::vector<int32_t> indices;
         for (int64_t token = 0; token < tokens; ++token) {
           const auto first = static_cast<int32_t>(token * token % 7);
           indices.push_back(first);
           indices.push_back(token % 11 == 0 ? -1
                                             : (first + 1 + static_cast<int32_t>(token % 5)) % 7);
         }
         sample_route(sample, tokens, 2, 7, indices);
       }},
  };
}

}  // namespace

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
                    .cpu_kernel = route_kernel,
                    .workspace_bytes = route_workspace_bytes,
                    .print_attributes = print_route,
                    .samples = samples_route};

}  // namespace troupe
