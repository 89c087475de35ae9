#include <array>
#include <cuda_fp8.h>

#include "ops/precision/cuda/row_strips.cuh"
#include "ops/precision/cuda/transposed_rows.cuh"
#include "ops/precision/cuda/widen_codes.h"
#include "program/cuda/device.cuh"

namespace troupe {
namespace {

constexpr int kCodesStep = 8;

template <class Scale>
__device__ __forceinline__ float scale_value(Scale scale) {
  if constexpr (sizeof(Scale) == 1) {
    return exponent_scale(scale);
  } else {
    return scale;
  }
}

template <__nv_fp8_interpretation_t kFormat>
__device__ __forceinline__ float code_value(uint8_t code) {
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(code, kFormat)));
}

template <__nv_fp8_interpretation_t kFormat, class Scale, class Wide, int kStep>
__global__ void __launch_bounds__(kStripThreads)
    widen_kernel(const uint8_t* codes, const Scale* scales, LiveRows rows, ScaleGrid grid,
                 Wide* out) {
  using Number = accumulation_t<Wide>;
  const RowStrip strip(grid, rows.count(), kStep);
  if (strip.rows() <= 0) return;
  const int64_t own_scale_row = strip.scale_row_of_lane(grid);
  const int64_t column = strip.column();
  const int64_t width = grid.block_columns();
  for (int i = 0; i < strip.rows(); ++i) {
    const int64_t scale_row = __shfl_sync(0xffffffffU, own_scale_row, i);
    if (column >= grid.columns()) continue;
    const int64_t at = (strip.row() + i) * grid.columns() + column;
    const auto pack = *reinterpret_cast<const CodePack<kStep>*>(codes + at);
    const Scale* of_row = scales + scale_row * grid.scale_columns();
#pragma unroll
    for (int j = 0; j < kStep; ++j) {
      const float scale = scale_value(of_row[grid.scale_columns() == 1 ? 0 : (column + j) / width]);
      out[at + j] = round_to<Wide>(static_cast<Number>(code_value<kFormat>(pack.codes[j])) *
                                   static_cast<Number>(scale));
    }
  }
}

// Of transposed codes, a thread for each.
template <__nv_fp8_interpretation_t kFormat, class Scale, class Wide>
__global__ void widen_transposed_kernel(const uint8_t* codes, const Scale* scales,
                                        TransposedGrid blocks, ScaleGrid grid, int64_t count,
                                        Wide* out) {
  using Number = accumulation_t<Wide>;
  const int64_t at = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (at >= count) return;
  const int64_t column = at / kTransposedRows % grid.columns();
  const TransposedRows rows = blocks.rows_of(at / kTransposedRows / grid.columns());
  const auto within = static_cast<int>(at % kTransposedRows);
  if (within >= rows.count) return;
  const int64_t row = rows.first + within;
  const int64_t of_columns = grid.scale_columns() == 1 ? 0 : column / grid.block_columns();
  const float scale = scale_value(scales[grid.scale_row(row) * grid.scale_columns() + of_columns]);
  out[row * grid.columns() + column] = round_to<Wide>(
      static_cast<Number>(code_value<kFormat>(codes[at])) * static_cast<Number>(scale));
}

// What an operand is read by.
struct NarrowOperand {
  int input;
  CudaTensor whole;         // of the shape before it was quantised, without data
  CudaTensor offsets = {};  // none where it is a weight
  const QuantizedProductAttributes::Operand* form = nullptr;
};

template <class Wide, __nv_fp8_interpretation_t kFormat, class Scale>
void launch_widen(const CudaKernelArguments& args, const NarrowOperand& operand, void* out) {
  const CudaTensor& tensor = args.input(operand.input);
  const auto* codes = static_cast<const uint8_t*>(tensor.data);
  const auto* scales = static_cast<const Scale*>(args.input(operand.input + 2).data);
  const ScaleGrid grid = cuda_grid_of(operand.whole, operand.form->block, operand.offsets);
  if (operand.form->is_transposed()) {
    const int64_t count = tensor.shape.elements();
    launch(args, {static_cast<unsigned>(ceil_divide(count, 256)), 256},
           widen_transposed_kernel<kFormat, Scale, Wide>, codes, scales,
           TransposedGrid(operand.whole.shape, LiveRows(operand.whole), operand.offsets), grid,
           count, static_cast<Wide*>(out));
    return;
  }
  const bool packs = grid.columns() % kCodesStep == 0;
  launch(args, {strip_blocks(grid, packs ? kCodesStep : 1), kStripThreads},
         packs ? widen_kernel<kFormat, Scale, Wide, kCodesStep>
               : widen_kernel<kFormat, Scale, Wide, 1>,
         codes, scales, live_rows_of(tensor, grid), grid, static_cast<Wide*>(out));
}

template <class Wide>
void widen_operand(const CudaKernelArguments& args, const NarrowOperand& operand, void* out) {
  if (args.input(operand.input + 2).dtype == DType::u8) {
    launch_widen<Wide, __NV_E4M3, uint8_t>(args, operand, out);
  } else if (args.input(operand.input).dtype == DType::f8e4m3) {
    launch_widen<Wide, __NV_E4M3, float>(args, operand, out);
  } else {
    launch_widen<Wide, __NV_E5M2, float>(args, operand, out);
  }
}

__global__ void widen_bias_kernel(const Bf16* bias, float* out, int64_t elements) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < elements) out[i] = widen(bias[i]);
}

// The wide form of a tensor, at `data`.
CudaTensor wide_tensor(const CudaTensor& narrow, DType wide, std::byte* data) {
  CudaTensor tensor = narrow;
  tensor.dtype = wide;
  tensor.data = data;
  return tensor;
}

}  // namespace

void run_widened(const CudaKernelArguments& args, const WidenedProduct& product) {
  const CudaTensor none;
  const CudaTensor& offsets = product.offsets < 0 ? none : args.input(product.offsets);
  std::array<CudaTensor, 3> inputs;
  std::byte* scratch = args.scratch + align_scratch(product.own_scratch);
  for (int i = 0; i < 2; ++i) {
    CudaTensor& input = inputs[static_cast<size_t>(i)];
    NarrowOperand operand{.input = i, .whole = args.input(i)};
    operand.form =
        &args.attributes->as<QuantizedProductAttributes>().operands[static_cast<size_t>(i)];
    operand.whole.shape = operand.form->shape(operand.whole.shape);
    if (operand.whole.shape.rank() == 2) operand.offsets = offsets;
    input = wide_tensor(operand.whole, product.wide, scratch);
    scratch += widened_bytes(input.shape.elements(), size_of(product.wide));
    switch (product.wide) {
      case DType::f64:
        widen_operand<double>(args, operand, input.data);
        break;
      case DType::f32:
        widen_operand<float>(args, operand, input.data);
        break;
      case DType::f16:
        widen_operand<F16>(args, operand, input.data);
        break;
      default:
        widen_operand<Bf16>(args, operand, input.data);
    }
  }
  inputs[2] = offsets;
  if (product.bias >= 0) inputs[2] = args.input(product.bias);
  if (product.bias >= 0 && inputs[2].data != nullptr && inputs[2].dtype != product.wide) {
    const auto* bias = inputs[2].as<Bf16>();
    inputs[2] = wide_tensor(inputs[2], product.wide, scratch);
    const int64_t elements = inputs[2].shape.elements();
    launch(args, {static_cast<unsigned>(ceil_divide(elements, 256)), 256}, widen_bias_kernel, bias,
           inputs[2].as<float>(), elements);
  }
  CudaKernelArguments wide_args = args;
  wide_args.attributes = product.attributes;
  wide_args.inputs = inputs;
  product.kernel(wide_args);
}

}  // namespace troupe
