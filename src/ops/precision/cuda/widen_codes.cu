#include <array>
#include <cuda_fp8.h>

#include "ops/precision/cuda/row_strips.cuh"
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

template <class Wide, __nv_fp8_interpretation_t kFormat, class Scale>
void launch_widen(const CudaKernelArguments& args, int input, const ScaleGrid& grid, void* out) {
  const CudaTensor& codes = args.input(input);
  const bool packs = grid.columns() % kCodesStep == 0;
  launch(args, {strip_blocks(grid, packs ? kCodesStep : 1), kStripThreads},
         packs ? widen_kernel<kFormat, Scale, Wide, kCodesStep>
               : widen_kernel<kFormat, Scale, Wide, 1>,
         static_cast<const uint8_t*>(codes.data),
         static_cast<const Scale*>(args.input(input + 2).data), live_rows_of(codes, grid), grid,
         static_cast<Wide*>(out));
}

template <class Wide>
void widen_operand(const CudaKernelArguments& args, int input, const CudaTensor& offsets,
                   void* out) {
  const auto& attributes = args.attributes->as<QuantizedProductAttributes>();
  const CudaTensor& codes = args.input(input);
  const CudaTensor none;
  const ScaleGrid grid = cuda_grid_of(codes, attributes.blocks[static_cast<size_t>(input)],
                                      codes.shape.rank() == 3 ? none : offsets);
  const bool is_e4m3 = codes.dtype == DType::f8e4m3;
  if (args.input(input + 2).dtype == DType::u8) {
    launch_widen<Wide, __NV_E4M3, uint8_t>(args, input, grid, out);
  } else if (is_e4m3) {
    launch_widen<Wide, __NV_E4M3, float>(args, input, grid, out);
  } else {
    launch_widen<Wide, __NV_E5M2, float>(args, input, grid, out);
  }
}

__global__ void widen_bias_kernel(const Bf16* bias, float* out, int64_t elements) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < elements) out[i] = widen(bias[i]);
}

// The wide form of a tensor of codes, at `data`.
CudaTensor wide_tensor(const CudaTensor& codes, DType wide, std::byte* data) {
  CudaTensor tensor = codes;
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
    input = wide_tensor(args.input(i), product.wide, scratch);
    scratch += widened_bytes(input.shape.elements(), size_of(product.wide));
    switch (product.wide) {
      case DType::f64:
        widen_operand<double>(args, i, offsets, input.data);
        break;
      case DType::f32:
        widen_operand<float>(args, i, offsets, input.data);
        break;
      default:
        widen_operand<Bf16>(args, i, offsets, input.data);
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
