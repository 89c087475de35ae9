#include "ops/experts/combine/combine.h"

#include <vector>

#include "ops/choose_kernel.h"
#include "ops/experts/permute/permute.h"
#include "program/derivative.h"
#include "program/op_sample.h"

namespace troupe {

CpuKernel combine_cpu_kernel(DType dtype);
CudaKernel combine_cuda_kernel(const OpView& op);

namespace {

void infer_combine(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 3, "combine takes rows, row_slot, slot_row");
  const Value& rows = context.input(0);
  const Value& row_slot = context.input(1);
  const Value& slot_row = context.input(2);
  TROUPE_CHECK(is_float(rows.dtype) && rows.shape.rank() == 2,
               "combine needs float rows [R, h]: " + rows.name);
  TROUPE_CHECK(slot_row.dtype == DType::i32 && slot_row.shape.rank() == 2,
               "combine needs i32 slot_row [T, k]: " + slot_row.name);
  TROUPE_CHECK(row_slot.dtype == DType::i32 && row_slot.shape == Shape({rows.shape[0]}),
               "combine needs i32 row_slot [R]: " + row_slot.name);
  TROUPE_CHECK(rows.rows.valid() && row_slot.rows.valid(),
               "combine needs ragged rows: " + rows.name);
  const DType dtype = rows.dtype;
  context.output("", dtype, {slot_row.shape[0], rows.shape[1]});
}

void differentiate_combine(DerivativeContext& context) {
  if (!context.wants(0)) return;
  const ValueId gradient =
      context.builder().emit(kPermute, Attributes(NoAttributes{}),
                             {context.output_gradient(0), context.input(1), context.input(2)},
                             "d_" + context.input_name(0))[0];
  context.add_gradient(0, gradient);
}

Cost cost_combine(const OpView& view) {
  const Value& rows = view.input(0);
  return {
      .flops = static_cast<double>(rows.shape.elements()),
      .bytes = static_cast<double>(rows.bytes() + view.input(2).bytes() + view.output(0).bytes())};
}

CpuKernel combine_kernel(const OpView& view) {
  return combine_cpu_kernel(view.input(0).dtype);
}

// The row numbers of one token, in ascending order.
uint64_t combine_scratch_bytes(const OpView& view) {
  return static_cast<uint64_t>(view.input(2).shape[1]) * sizeof(int32_t);
}

// The live count of `rows` must be an input of the sample, so that the harness knows which elements
// are live; it equals the last offset of the plan.
void sample_combine(SampleBuilder& sample, int64_t tokens, int64_t top_k, int64_t hidden,
                    const RouteAttributes& attributes, int32_t live_rows,
                    const std::vector<int32_t>& indices) {
  const ValueId chosen = sample.integers("indices", {tokens, top_k}, indices);
  const Routing routing = route(sample.builder(), chosen, attributes, "routing");
  SampleBuilder::Options options;
  options.rows = sample.integers("live_rows", {1}, {live_rows});
  const int64_t bound = route_row_bound(tokens * top_k, attributes);
  const ValueId rows = sample.tensor("rows", {bound, hidden}, options);
  sample.result(combine(sample.builder(), rows, routing, "y"));
}

std::vector<OpSample> samples_combine() {
  return {
      {"dropless, an expert without tokens",
       [](SampleBuilder& sample) {
         sample_combine(sample, 5, 3, 19, {.experts = 6}, 15,
                        {3, 0, 4, 1, 4, 3, 0, 1, 3, 1, 3, 0, 4, 3, 1});
       }},
      {"dropped slots",
       [](SampleBuilder& sample) {
         sample_combine(sample, 4, 3, 5, {.experts = 5}, 7,
                        {4, -1, 2, -1, -1, -1, 0, 4, 2, -1, 0, 3});
       }},
      {"one token, one slot, one column",
       [](SampleBuilder& sample) { sample_combine(sample, 1, 1, 1, {.experts = 2}, 1, {1}); }},
      {"wider than one block of columns, even number of slots",
       [](SampleBuilder& sample) {
         sample_combine(sample, 1, 2, 1031, {.experts = 2}, 2, {1, 0});
       }},
      {"many chunks, nearly all slots dropped",
       [](SampleBuilder& sample) {
         std::vector<int32_t> indices(40000, -1);
         int32_t live_rows = 0;
         for (size_t slot = 7; slot < indices.size(); slot += 501) {
           indices[slot] = static_cast<int32_t>(slot % 5);
           ++live_rows;
         }
         sample_combine(sample, 20000, 2, 1, {.experts = 5}, live_rows, indices);
       }},
      {"rows in multiples of four",
       [](SampleBuilder& sample) {
         sample_combine(sample, 5, 2, 7, {.experts = 5, .row_multiple = 4}, 12,
                        {3, 0, 1, 3, -1, 1, 3, 1, 1, 3});
       }},
      {"rows padded to a capacity",
       [](SampleBuilder& sample) {
         sample_combine(sample, 4, 2, 6, {.experts = 3, .padded_capacity = 4}, 12,
                        {2, 0, -1, 2, 0, -1, 2, 0});
       }},
  };
}

}  // namespace

ValueId combine(Builder& builder, ValueId rows, const Routing& routing, const std::string& name) {
  return builder.emit(kCombine, Attributes(NoAttributes{}),
                      {rows, routing.row_slot, routing.slot_row}, name)[0];
}

const OpSpec kCombine{.name = "combine",
                      .infer = infer_combine,
                      .differentiate = differentiate_combine,
                      .cost = cost_combine,
                      .cpu = {.kernel = combine_kernel, .scratch = combine_scratch_bytes},
                      .cuda = packs_kernel<TROUPE_CUDA(combine_cuda_kernel), row_elements_of_input>,
                      .samples = samples_combine};

}  // namespace troupe
