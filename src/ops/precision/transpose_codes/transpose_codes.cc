#include "ops/precision/transpose_codes/transpose_codes.h"

#include "ops/choose_kernel.h"
#include "ops/precision/quantized_linear/quantized_linear.h"
#include "ops/precision/quantized_product.h"
#include "program/op_sample.h"

namespace troupe {

void transpose_codes_cpu(const KernelArguments& args);
CudaKernel transpose_codes_cuda_kernel(const OpView& op);

namespace {

void infer_transpose_codes(InferContext& context) {
  const Value& codes = context.input(0);
  TROUPE_CHECK(is_f8(codes.dtype) && !codes.rows.valid() &&
                   (codes.shape.rank() == 2 || codes.shape.rank() == 3),
               "transpose_codes: not codes in rows: " + codes.name);
  context.output("", codes.dtype, transposed_shape(codes.shape, 0));
}

Cost cost_transpose_codes(const OpView& op) {
  return {.flops = 0, .bytes = static_cast<double>(op.input(0).bytes() + op.output(0).bytes())};
}

CpuKernel transpose_codes_kernel(const OpView&) {
  return &transpose_codes_cpu;
}

// Read by a product, as codes are no results.
std::vector<OpSample> samples_transpose_codes() {
  const auto weight = [](int64_t inputs, int64_t outputs) {
    return [=](SampleBuilder& sample) {
      Builder& builder = sample.builder();
      SampleBuilder::Options constant;
      constant.differentiable = false;
      constant.dtype = DType::bf16;  // the same codes in all dtypes
      const ValueId w = sample.tensor("weight", {outputs, inputs}, constant);
      const ValueId dy = sample.tensor("dy", {3, outputs}, constant);
      const Codes of_w = quantize(builder, w, {}, {}, {}, "w").rows;
      const Codes of_dy = quantize(builder, dy, {}, {}, {}, "dy").rows;
      const QuantizedProductAttributes attributes{
          .compute = sample.dtype(),
          .operands = {QuantizedProductAttributes::Operand{},
                       QuantizedProductAttributes::transposed({}, {outputs, inputs})}};
      const std::vector<ValueId> read = {of_dy.codes, transpose_codes(builder, of_w.codes, "w_t"),
                                         of_dy.scales, of_w.scales};
      sample.result_without_gradient(
          builder.emit(kQuantizedLinearDataGradient, Attributes(attributes), read, "dx")[0]);
    };
  };
  return {{"rows_of_packs", weight(64, 300)}, {"odd_rows", weight(21, 130)}};
}

}  // namespace

ValueId transpose_codes(Builder& builder, ValueId codes, const std::string& name) {
  return builder.emit(kTransposeCodes, Attributes(NoAttributes()), {codes}, name)[0];
}

const OpSpec kTransposeCodes{.name = "transpose_codes",
                             .infer = infer_transpose_codes,
                             .cost = cost_transpose_codes,
                             .cpu = {.kernel = transpose_codes_kernel},
                             .cuda = only_kernel<TROUPE_CUDA(transpose_codes_cuda_kernel)>,
                             .samples = samples_transpose_codes};

}  // namespace troupe
