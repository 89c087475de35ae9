#include "ops/experts/permute/permute.h"

#include <vector>

#include "ops/choose_kernel.h"
#include "ops/experts/combine/combine.h"
#include "program/derivative.h"
#include "program/op_sample.h"

namespace troupe {

CpuKernel permute_cpu_kernel(DType dtype);
CudaKernel permute_cuda_kernel(const OpView& op);

namespace {

void infer_permute(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 3, "permute takes x, row_slot, slot_row");
  const Value& x = context.input(0);
  const Value& row_slot = context.input(1);
  const Value& slot_row = context.input(2);
  TROUPE_CHECK(is_float(x.dtype) && x.shape.rank() == 2,
               "permute needs a float x [T, h]: " + x.name);
  TROUPE_CHECK(
      slot_row.dtype == DType::i32 && slot_row.shape.rank() == 2 && slot_row.shape[0] == x.shape[0],
      "permute needs i32 slot_row [T, k]: " + slot_row.name);
  TROUPE_CHECK(row_slot.dtype == DType::i32 && row_slot.rows.valid() && row_slot.shape.rank() == 1,
               "permute needs ragged i32 row_slot [R]: " + row_slot.name);
  const RowCount rows = row_slot.rows;
  context.output("", x.dtype, {row_slot.shape[0], x.shape[1]}, rows);
}

void differentiate_permute(DerivativeContext& context) {
  if (!context.wants(0)) return;
  const ValueId gradient =
      context.builder().emit(kCombine, Attributes(NoAttributes{}),
                             {context.output_gradient(0), context.input(1), context.input(2)},
                             "d_" + context.input_name(0))[0];
  context.add_gradient(0, gradient);
}

Cost cost_permute(const OpView& view) {
  return {.flops = 0,
          .bytes = static_cast<double>(view.input(0).bytes() + view.input(1).bytes() +
                                       view.input(2).bytes() + view.output(0).bytes())};
}

CpuKernel permute_kernel(const OpView& view) {
  return permute_cpu_kernel(view.input(0).dtype);
}

void sample_permute(SampleBuilder& sample, int64_t tokens, int64_t top_k, int64_t hidden,
                    const RouteAttributes& attributes, const std::vector<int32_t>& indices) {
  const ValueId chosen = sample.integers("indices", {tokens, top_k}, indices);
  const Routing routing = route(sample.builder(), chosen, attributes, "routing");
  const ValueId x = sample.tensor("x", {tokens, hidden});
  sample.result(permute(sample.builder(), x, routing, "y"));
}

std::vector<OpSample> samples_permute() {
  return {
      {"dropless, an expert without tokens",
       [](SampleBuilder& sample) {
         sample_permute(sample, 5, 2, 19, {.experts = 4}, {3, 0, 1, 3, 0, 1, 3, 1, 0, 3});
       }},
      {"dropped slots",
       [](SampleBuilder& sample) {
         sample_permute(sample, 4, 3, 5, {.experts = 5}, {4, -1, 2, -1, -1, -1, 0, 4, 2, -1, 0, 3});
       }},
      {"one token, one slot, one column",
       [](SampleBuilder& sample) { sample_permute(sample, 1, 1, 1, {.experts = 2}, {1}); }},
      {"many chunks, nearly all slots dropped",
       [](SampleBuilder& sample) {
         std::vector<int32_t> indices(20000, -1);
         for (size_t slot = 7; slot < indices.size(); slot += 501) {
           indices[slot] = static_cast<int32_t>(slot % 5);
         }
         sample_permute(sample, 100, 200, 3, {.experts = 5}, indices);
       }},
      {"all tokens to one of many experts",
       [](SampleBuilder& sample) {
         sample_permute(sample, 3000, 1, 3, {.experts = 40}, std::vector<int32_t>(3000, 7));
       }},
      {"rows in multiples of four",
       [](SampleBuilder& sample) {
         sample_permute(sample, 5, 2, 7, {.experts = 5, .row_multiple = 4},
                        {3, 0, 1, 3, -1, 1, 3, 1, 1, 3});
       }},
      {"many chunks, padded to a capacity",
       [](SampleBuilder& sample) {
         sample_permute(sample, 4, 2, 6, {.experts = 3, .padded_capacity = 3000},
                        {2, 0, -1, 2, 0, -1, 2, 0});
       }},
  };
}

}  // namespace

ValueId permute(Builder& builder, ValueId x, const Routing& routing, const std::string& name) {
  return builder.emit(kPermute, Attributes(NoAttributes{}), {x, routing.row_slot, routing.slot_row},
                      name)[0];
}

const OpSpec kPermute{.name = "permute",
                      .infer = infer_permute,
                      .differentiate = differentiate_permute,
                      .cost = cost_permute,
                      .cpu = {.kernel = permute_kernel},
                      .cuda = only_kernel<TROUPE_CUDA(permute_cuda_kernel)>,
                      .samples = samples_permute};

}  // namespace troupe
