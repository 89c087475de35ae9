#include "ops/exchange/copy_to_ranks/copy_to_ranks.h"

#include "ops/choose_kernel.h"
#include "ops/exchange/sum_over_ranks/sum_over_ranks.h"
#include "program/derivative.h"

namespace troupe {

void copy_to_ranks_cpu(const KernelArguments& args);
CudaKernel copy_to_ranks_cuda_kernel(const OpView& op);

namespace {

void infer_copy_to_ranks(InferContext& context) {
  TROUPE_CHECK(context.input_count() == 1, "copy_to_ranks takes a tensor");
  const Value& x = context.input(0);
  TROUPE_CHECK(is_float(x.dtype) && !x.rows.valid(),
               "copy_to_ranks needs a float tensor, not ragged: " + x.name);
  context.output("", x.dtype, x.shape);
}

void differentiate_copy_to_ranks(DerivativeContext& context) {
  if (!context.wants(0)) return;
  context.add_gradient(0,
                       sum_over_ranks(context.builder(), context.output_gradient(0),
                                      {.group = context.attributes<CopyToRanksAttributes>().group},
                                      "d_" + context.input_name(0)));
}

Cost cost_copy_to_ranks(const OpView& op) {
  return {.flops = 0, .bytes = static_cast<double>(op.input(0).bytes() + op.output(0).bytes())};
}

CpuKernel copy_to_ranks_kernel(const OpView&) {
  return &copy_to_ranks_cpu;
}

std::string print_copy_to_ranks(const Attributes& attributes) {
  return "group=" + std::string(name_of(attributes.as<CopyToRanksAttributes>().group));
}

}  // namespace

ValueId copy_to_ranks(Builder& builder, ValueId x, const CopyToRanksAttributes& attributes,
                      const std::string& name) {
  return builder.emit(kCopyToRanks, Attributes(attributes), {x}, name)[0];
}

const OpSpec kCopyToRanks{.name = "copy_to_ranks",
                          .infer = infer_copy_to_ranks,
                          .differentiate = differentiate_copy_to_ranks,
                          .cost = cost_copy_to_ranks,
                          .cpu = {.kernel = copy_to_ranks_kernel},
                          .cuda = only_kernel<TROUPE_CUDA(copy_to_ranks_cuda_kernel)>,
                          .in_place = {.output = 0, .input = 0},
                          .print_attributes = print_copy_to_ranks};

}  // namespace troupe
