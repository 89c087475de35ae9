#include "ops/precision/quantized_kernels.h"

#include "ops/choose_kernel.h"
#include "ops/precision/cuda/widen_codes.h"
#include "ops/product_scratch.h"

namespace troupe {
namespace {

using Form = QuantizedProductAttributes;

bool has_one_scale_each(const Form& attributes) {
  return attributes.blocks[0] == BlockShape{} && attributes.blocks[1] == BlockShape{};
}

// Of the product of wide operands: why it is no faster than that of bf16 ones, or slower.
SlowKernel why_widened(const OpView& op, const DeviceTraits& device) {
  const auto& attributes = op.attributes<Form>();
  if (attributes.compute != DType::bf16) return SlowKernel::dtype;
  if (device.major() != 9) return SlowKernel::compute_capability;
  if (has_one_scale_each(attributes)) return SlowKernel::row_codes;
  return SlowKernel::block_scales;
}

uint64_t widened_scratch_bytes(const OpView& op, DType wide, uint64_t own_scratch) {
  uint64_t bytes = align_scratch(own_scratch);
  for (int i = 0; i < 2; ++i) {
    bytes += widened_bytes(op.input(i).shape.elements(), size_of(wide));
  }
  return bytes + widened_bytes(op.output(0).shape.back(), sizeof(float));
}

uint64_t codes_scratch_bytes(const OpView& op, CodesProduct product, bool grouped) {
  const Shape& left = op.input(0).shape;
  const Shape& right = op.input(1).shape;
  const bool is_weight = product == CodesProduct::weight_gradient;
  const int64_t groups = !grouped ? 1 : is_weight ? op.output(0).shape[0] : right[0];
  return CodesScratch(left, right, groups, product).bytes;
}

// `select`: codes_product_kernel; nullptr without CUDA.
CudaKernel select_codes_product(CudaKernel (*select)(CodesProduct, DType, DType, bool, bool),
                                const OpView& op, CodesProduct product, bool grouped, bool pair) {
  if (select == nullptr) return nullptr;
  return select(product, op.input(0).dtype, op.output(0).dtype, grouped, pair);
}

int64_t rows_of_group(const OpView& op, CodesProduct product, bool grouped) {
  const Shape& out = op.output(0).shape;
  if (product == CodesProduct::weight_gradient) return out[out.rank() - 2];
  return grouped ? expected_rows_of_group(op.input(0), op.input(1).shape[0]) : out[0];
}

}  // namespace

DType widened_dtype(const Form& attributes) {
  if (attributes.compute != DType::bf16) return attributes.compute;
  return has_one_scale_each(attributes) ? DType::f32 : DType::bf16;
}

KernelChoice choose_quantized_product(const OpView& op, const DeviceTraits& device,
                                      CodesProduct product, bool grouped,
                                      CudaKernel (*widened)(GroupedVariant)) {
  const auto& attributes = op.attributes<Form>();
  const GroupedVariant tiled = tiled_variant(rows_of_group(op, product, grouped));
  const bool on_hopper = attributes.compute == DType::bf16 && device.major() == 9;
  if (on_hopper && has_one_scale_each(attributes) && has_tiled_operands(op, op.input(0).dtype)) {
    const bool pair = tiled == GroupedVariant::sm90_pair;
    KernelChoice choice = make_choice(op, device, pair ? "sm90 codes pair" : "sm90 codes", nullptr);
    choice.function =
        select_codes_product(TROUPE_CUDA(codes_product_kernel), op, product, grouped, pair);
    choice.needs.scratch = codes_scratch_bytes(op, product, grouped);
    return choice;
  }
  const DType wide = widened_dtype(attributes);
  const bool on_tiles = on_hopper && wide == DType::bf16 && has_tiled_operands(op, wide);
  KernelChoice choice = make_choice(op, device, "widened", nullptr);
  if (widened != nullptr) {
    choice.function = widened(on_tiles ? tiled : GroupedVariant::plain);
  }
  choice.slow = why_widened(op, device);
  choice.needs.scratch = widened_scratch_bytes(op, wide, grouped ? 0 : kProductScratchBytes);
  return choice;
}

}  // namespace troupe
