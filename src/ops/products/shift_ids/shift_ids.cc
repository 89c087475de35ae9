#include "ops/products/shift_ids/shift_ids.h"

#include <fmt/format.h>

#include "ops/choose_kernel.h"
#include "program/op_sample.h"

namespace troupe {

void shift_ids_cpu(const KernelArguments& args);
CudaKernel shift_ids_cuda_kernel(const OpView& op);

namespace {

void infer_shift_ids(InferContext& context) {
  const Value& ids = context.input(0);
  TROUPE_CHECK(ids.dtype == DType::i32 && ids.shape.rank() == 1 && !ids.rows.valid() &&
                   context.attributes<ShiftIdsAttributes>().first >= 0,
               "shift_ids: " + ids.name);
  context.output("", DType::i32, ids.shape);
}

Cost cost_shift_ids(const OpView& op) {
  return {.flops = static_cast<double>(op.input(0).shape.elements()),
          .bytes = 2 * static_cast<double>(op.input(0).bytes())};
}

CpuKernel shift_ids_kernel(const OpView&) {
  return &shift_ids_cpu;
}

std::string print_shift_ids(const Attributes& attributes) {
  return fmt::format("first={}", attributes.as<ShiftIdsAttributes>().first);
}

std::vector<OpSample> samples_shift_ids() {
  return {{"ids", [](SampleBuilder& sample) {
             const ValueId ids = sample.integers("ids", {5}, {7, 3, 0, -1, -2147483647});
             sample.result_without_gradient(
                 shift_ids(sample.builder(), ids, {.first = 4}, "shifted"));
           }}};
}

}  // namespace

ValueId shift_ids(Builder& builder, ValueId ids, const ShiftIdsAttributes& attributes,
                  const std::string& name) {
  if (attributes.first == 0) return ids;
  return builder.emit(kShiftIds, Attributes(attributes), {ids}, name)[0];
}

const OpSpec kShiftIds{.name = "shift_ids",
                       .infer = infer_shift_ids,
                       .cost = cost_shift_ids,
                       .cpu = {.kernel = shift_ids_kernel},
                       .cuda = only_kernel<TROUPE_CUDA(shift_ids_cuda_kernel)>,
                       .in_place = {.output = 0, .input = 0},
                       .print_attributes = print_shift_ids,
                       .samples = samples_shift_ids};

}  // namespace troupe
