#include "ops/precision/quantized_kernels.h"

#include "ops/choose_kernel.h"
#include "ops/precision/cuda/widen_codes.h"
#include "ops/precision/fp4_block.h"
#include "ops/product_scratch.h"

namespace troupe {
namespace {

// `select`: codes_product_kernel; nullptr without CUDA.
CudaKernel select_codes(CudaKernel (*select)(const CodesKernel&), const CodesKernel& kernel) {
  return select == nullptr ? nullptr : select(kernel);
}

using Form = QuantizedProductAttributes;

bool has_one_scale_each(const Form& attributes) {
  return attributes.operands[0].block == BlockShape{} &&
         attributes.operands[1].block == BlockShape{};
}

// The blocks in which tensor cores' sums are scaled: 128 of depth, and as wide as is said.
bool has_blocks_of_stages(const Form& attributes, GroupedProduct product) {
  constexpr int32_t kSide = kTransposedRows;
  const BlockShape across{kSide, 1};
  const BlockShape along{1, kSide};
  if (product == GroupedProduct::weight_gradient) {
    return attributes.operands[0].block == across && attributes.operands[1].block == across;
  }
  return attributes.operands[0].block == along &&
         attributes.operands[1].block == BlockShape{kSide, kSide};
}

// Whose scales are no powers of two either.
bool has_blocks_of_fp4(const Form& attributes) {
  const BlockShape& block = attributes.operands[0].block;
  return block.rows == kFp4Block || block.columns == kFp4Block;
}

// Of the product of wide operands: why it is no faster than that of bf16 ones, or slower.
SlowKernel why_widened(const OpView& op, const DeviceTraits& device, bool scales_fit) {
  const auto& attributes = op.attributes<Form>();
  if (attributes.compute != DType::bf16) return SlowKernel::dtype;
  if (device.major() != 9) return SlowKernel::compute_capability;
  if (has_blocks_of_fp4(attributes)) return SlowKernel::four_bits;
  return scales_fit ? SlowKernel::row_codes : SlowKernel::block_scales;
}

uint64_t widened_scratch_bytes(const OpView& op, DType wide, uint64_t own_scratch) {
  uint64_t bytes = align_scratch(own_scratch);
  for (int i = 0; i < 2; ++i) {
    bytes += widened_bytes(quantized_shape(op, i).elements(), size_of(wide));
  }
  return bytes + widened_bytes(op.output(0).shape.back(), sizeof(float));
}

// As has_tiled_operands, of operands as they were before they were quantised.
bool has_tiled_codes(const OpView& op, DType operands) {
  return has_tiled_rows(quantized_shape(op, 0), operands) &&
         has_tiled_rows(quantized_shape(op, 1), operands) &&
         has_tiled_rows(op.output(0).shape, DType::bf16);
}

int64_t rows_of_group(const OpView& op, GroupedProduct product, bool grouped) {
  const Shape& out = op.output(0).shape;
  if (product == GroupedProduct::weight_gradient) return out[out.rank() - 2];
  return grouped ? expected_rows_of_group(op.input(0), quantized_shape(op, 1)[0]) : out[0];
}

}  // namespace

DType widened_dtype(const Form& attributes) {
  if (attributes.compute != DType::bf16) return attributes.compute;
  return has_one_scale_each(attributes) || has_blocks_of_fp4(attributes) ? DType::f32 : DType::bf16;
}

KernelChoice choose_quantized_product(const OpView& op, const DeviceTraits& device,
                                      GroupedProduct product, bool grouped,
                                      CudaKernel (*widened)(GroupedVariant)) {
  const auto& attributes = op.attributes<Form>();
  const GroupedVariant tiled = tiled_variant(rows_of_group(op, product, grouped));
  const bool on_hopper = attributes.compute == DType::bf16 && device.major() == 9;
  const bool one_scale_each = has_one_scale_each(attributes);
  const bool scales_fit = one_scale_each || (has_blocks_of_stages(attributes, product) &&
                                             op.input(2).dtype == DType::f32);
  // Tensor cores' kernels take f8e5m2 on the left alone.
  const bool formats_fit = op.input(1).dtype == DType::f8e4m3;
  if (on_hopper && scales_fit && formats_fit && has_tiled_codes(op, DType::f8e4m3)) {
    const bool pair = tiled == GroupedVariant::sm90_pair;
    const char* variant = one_scale_each ? (pair ? "sm90 codes pair" : "sm90 codes")
                                         : (pair ? "sm90 code blocks pair" : "sm90 code blocks");
    KernelChoice choice = make_choice(op, device, variant, nullptr);
    choice.function = select_codes(TROUPE_CUDA(codes_product_kernel), {.product = product,
                                                                       .left = op.input(0).dtype,
                                                                       .out = op.output(0).dtype,
                                                                       .grouped = grouped,
                                                                       .pair = pair,
                                                                       .blocks = !one_scale_each});
    choice.needs.scratch = kCodesScratchBytes;
    choice.multiprocessors = multiprocessors_of(op, device);
    return choice;
  }
  const DType wide = widened_dtype(attributes);
  const bool on_tiles = on_hopper && wide == DType::bf16 && has_tiled_codes(op, DType::bf16);
  KernelChoice choice = make_choice(op, device, "widened", nullptr);
  if (widened != nullptr) {
    choice.function = widened(on_tiles ? tiled : GroupedVariant::plain);
  }
  choice.slow = why_widened(op, device, scales_fit);
  choice.needs.scratch = widened_scratch_bytes(op, wide, grouped ? 0 : kProductScratchBytes);
  return choice;
}

}  // namespace troupe
