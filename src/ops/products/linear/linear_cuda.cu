#include <type_traits>

#include "ops/cuda/context.h"
#include "ops/cuda/product.cuh"
#include "ops/cuda/row_sums.cuh"
#include "ops/products/linear/linear.h"
#include "ops/products/linear/linear_cuda.h"
#include "ops/products/linear/linear_kernels.h"

namespace troupe {
namespace {

// Sums are in f64 when an operand or the result is, as on the CPU.
template <class L, class R, class Y>
using product_sum_t = std::conditional_t<std::is_same_v<L, double> || std::is_same_v<R, double> ||
                                             std::is_same_v<Y, double>,
                                         double, float>;

template <class L, class R, class Y>
__global__ void __launch_bounds__(kTileThreads)
    product_kernel(TileOperand<L> left, TileOperand<R> right, int64_t m, int64_t n, int64_t k,
                   const R* bias, Y* out, bool accumulate) {
  using Sum = product_sum_t<L, R, Y>;
  multiply_tile<Sum>(left, right, m, n, k, int64_t{blockIdx.y} * kTile, int64_t{blockIdx.x} * kTile,
                     [=](int64_t i, int64_t j, Sum sum) {
                       Y* to = out + i * n + j;
                       if (bias != nullptr) sum += static_cast<Sum>(widen(bias[j]));
                       if (accumulate) sum += static_cast<Sum>(widen(*to));
                       *to = round_to<Y>(sum);
                     });
}

// out [m, n] (+)= left right (+ bias). By cuBLASLt where it can, otherwise by our own kernel.
template <class L, class R, class Y>
void multiply(const CudaKernelArguments& args, const TileOperand<L>& left,
              const TileOperand<R>& right, int64_t m, int64_t n, int64_t k, const R* bias, Y* out,
              bool accumulate) {
  if constexpr (std::is_same_v<L, R> &&
                (std::is_same_v<Y, L> || std::is_same_v<Y, accumulation_t<L>>)) {
    const DenseProduct product{.m = m,
                               .n = n,
                               .k = k,
                               .left = {left.data, dtype_of<L>, left.stride, left.transposed},
                               .right = {right.data, dtype_of<R>, right.stride, right.transposed},
                               .out = out,
                               .out_dtype = dtype_of<Y>,
                               .accumulate = accumulate,
                               .bias = bias};
    // cuBLASLt cannot fuse a bias whose type differs from the result's.
    const bool bias_fits = bias == nullptr || std::is_same_v<Y, R>;
    if (bias_fits && args.context->multiply(product, args.stream, args.scratch)) return;
  }
  launch(args,
         {dim3(static_cast<unsigned>(ceil_divide(n, kTile)),
               static_cast<unsigned>(ceil_divide(m, kTile))),
          kTileThreads},
         product_kernel<L, R, Y>, left, right, m, n, k, bias, out, accumulate);
}

template <class T, class Y>
void run_linear(const CudaKernelArguments& args) {
  const Shape& x = args.input(0).shape;
  const Shape& weight = args.input(1).shape;
  multiply<T, T, Y>(args, {args.in<T>(0), x[1], false}, {args.in<T>(1), x[1], true}, x[0],
                    weight[0], x[1], args.in<T>(2), args.out<Y>(0), false);
}

// The parts of dy: linear_cuda.h.
__global__ void split_kernel(const float* dy, Bf16* parts, int64_t rows, int64_t columns) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= rows * columns) return;
  Bf16* to = parts + i / columns * kSplitParts * columns + i % columns;
  float rest = dy[i];
#pragma unroll
  for (int part = 0; part < kSplitParts; ++part) {
    const Bf16 rounded = __float2bfloat16_rn(rest);
    rest -= __bfloat162float(rounded);
    to[part * columns] = rounded;
  }
}

template <class Out>
__global__ void add_parts_kernel(const float* parts, Out* out, int64_t elements, bool accumulate) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= elements) return;
  const float sum = parts[i] + (parts[elements + i] + parts[2 * elements + i]);
  out[i] = round_to<Out>(accumulate ? widen(out[i]) + sum : sum);
}

Bf16* split(const CudaKernelArguments& args, const SplitScratch& scratch) {
  const Shape& dy = args.input(0).shape;
  launch(args, {static_cast<unsigned>(ceil_divide(dy.elements(), 256)), 256}, split_kernel,
         args.in<float>(0), scratch.parts<Bf16>(args.scratch), dy[0], dy[1]);
  return scratch.parts<Bf16>(args.scratch);
}

template <class Dy, class T, class Dx>
void multiply_data_gradient(const CudaKernelArguments& args) {
  const Shape& dy = args.input(0).shape;
  const Shape& weight = args.input(1).shape;
  multiply<Dy, T, Dx>(args, {args.in<Dy>(0), dy[1], false}, {args.in<T>(1), weight[1], false},
                      dy[0], weight[1], dy[1], nullptr, args.out<Dx>(0), false);
}

template <class T, class Dy>
void run_linear_data_gradient(const CudaKernelArguments& args) {
  if constexpr (std::is_same_v<Dy, float> && std::is_same_v<T, Bf16>) {
    const Shape& dy = args.input(0).shape;
    const Shape& weight = args.input(1).shape;
    const SplitScratch scratch(dy[0], dy[1], weight[1]);
    const Bf16* parts = split(args, scratch);
    Bf16* weights = scratch.second<Bf16>(args.scratch);
    for (int64_t part = 0; part < kSplitParts; ++part) {
      check_cuda(cudaMemcpyAsync(weights + part * weight.elements(), args.in<Bf16>(1),
                                 static_cast<size_t>(weight.elements()) * sizeof(Bf16),
                                 cudaMemcpyDeviceToDevice, args.stream),
                 "copying a weight");
    }
    const int64_t depth = kSplitParts * dy[1];
    multiply<Bf16, Bf16, Bf16>(args, {parts, depth, false}, {weights, weight[1], false}, dy[0],
                               weight[1], depth, nullptr, args.out<Bf16>(0), false);
  } else {
    multiply_data_gradient<Dy, T, T>(args);
  }
}

// T, Dy and Out are the types of x, dy and the gradient.
template <class T, class Dy, class Out>
void run_linear_weight_gradient(const CudaKernelArguments& args) {
  const Shape& dy = args.input(0).shape;
  const Shape& x = args.input(1).shape;
  const bool accumulate = args.attributes->as<LinearWeightGradientAttributes>().accumulate;
  if constexpr (std::is_same_v<Dy, float> && std::is_same_v<T, Bf16>) {
    const SplitScratch scratch(dy[0], dy[1], x[1]);
    const int64_t outputs = kSplitParts * dy[1];
    auto* gradients = scratch.second<float>(args.scratch);
    multiply<Bf16, Bf16, float>(args, {split(args, scratch), outputs, true},
                                {args.in<Bf16>(1), x[1], false}, outputs, x[1], dy[0], nullptr,
                                gradients, false);
    const int64_t elements = dy[1] * x[1];
    launch(args, {static_cast<unsigned>(ceil_divide(elements, 256)), 256}, add_parts_kernel<Out>,
           gradients, args.out<Out>(0), elements, accumulate);
  } else {
    multiply<Dy, T, Out>(args, {args.in<Dy>(0), dy[1], true}, {args.in<T>(1), x[1], false}, dy[1],
                         x[1], dy[0], nullptr, args.out<Out>(0), accumulate);
  }
}

template <class T>
struct LinearCuda {
  static void run(const CudaKernelArguments& args) { run_linear<T, T>(args); }
};
template <class T>
struct LinearAccumulationCuda {
  static void run(const CudaKernelArguments& args) { run_linear<T, accumulation_t<T>>(args); }
};
template <class T>
struct LinearDoubleCuda {
  static void run(const CudaKernelArguments& args) { run_linear<T, double>(args); }
};
template <class T>
struct DataGradientCuda {
  static void run(const CudaKernelArguments& args) { run_linear_data_gradient<T, T>(args); }
};
template <class T>
struct DataGradientAccumulationCuda {
  static void run(const CudaKernelArguments& args) {
    run_linear_data_gradient<T, accumulation_t<T>>(args);
  }
};
template <class T>
struct DataGradientDoubleCuda {
  static void run(const CudaKernelArguments& args) { run_linear_data_gradient<T, double>(args); }
};
template <class T>
struct WeightGradientCuda {
  static void run(const CudaKernelArguments& args) {
    run_linear_weight_gradient<T, T, accumulation_t<T>>(args);
  }
};
template <class T>
struct WeightGradientAccumulationCuda {
  static void run(const CudaKernelArguments& args) {
    run_linear_weight_gradient<T, accumulation_t<T>, accumulation_t<T>>(args);
  }
};
template <class T>
struct WeightGradientDoubleCuda {
  static void run(const CudaKernelArguments& args) {
    run_linear_weight_gradient<T, double, accumulation_t<T>>(args);
  }
};

// The kernel for operands of dtype `compute` and a y, or dy, of dtype `output`.
template <template <class> class Compute, template <class> class Accumulation,
          template <class> class Double>
CudaKernel select_linear_kernel(DType compute, DType output) {
  if (output == compute) return select_cuda_kernel<Compute>(compute);
  if (output == accumulation_dtype(compute)) return select_cuda_kernel<Accumulation>(compute);
  return select_cuda_kernel<Double>(compute);
}

template <class T, class Out>
void run_linear_bias_gradient(const CudaKernelArguments& args) {
  const int64_t columns = args.input(0).shape[1];
  sum_rows<T, RowTerm>(
      args, LiveRows(args.input(0)), columns, is_made_of_packs<T>(columns), args.out<Out>(0),
      args.attributes->as<LinearBiasGradientAttributes>().accumulate, args.in<T>(0), columns);
}

template <class T>
struct LinearBiasGradientCuda {
  static void run(const CudaKernelArguments& args) {
    run_linear_bias_gradient<T, accumulation_t<T>>(args);
  }
};

}  // namespace

CudaKernel linear_cuda_kernel_of(DType operands, DType out) {
  if (operands == DType::f32 && out == DType::bf16) return &run_linear<float, Bf16>;
  return select_linear_kernel<LinearCuda, LinearAccumulationCuda, LinearDoubleCuda>(operands, out);
}

CudaKernel linear_data_gradient_cuda_kernel_of(DType operands, DType out) {
  if (operands == DType::f32 && out == DType::bf16) {
    return &multiply_data_gradient<float, float, Bf16>;
  }
  TROUPE_CHECK(operands == out, "a data gradient of another dtype");
  return select_cuda_kernel<DataGradientCuda>(operands);
}

CudaKernel linear_weight_gradient_cuda_kernel_of(DType operands, DType out) {
  if (out == DType::bf16) {
    return operands == DType::f32 ? &run_linear_weight_gradient<float, float, Bf16>
                                  : &run_linear_weight_gradient<Bf16, Bf16, Bf16>;
  }
  TROUPE_CHECK(out == accumulation_dtype(operands), "a weight gradient of another dtype");
  return select_cuda_kernel<WeightGradientCuda>(operands);
}

Attributes linear_weight_gradient_attributes(bool accumulate) {
  return Attributes(LinearWeightGradientAttributes{.accumulate = accumulate});
}

CudaKernel linear_cuda_kernel(const OpView& op) {
  return select_linear_kernel<LinearCuda, LinearAccumulationCuda, LinearDoubleCuda>(
      op.input(0).dtype, op.output(0).dtype);
}

CudaKernel linear_data_gradient_cuda_kernel(const OpView& op) {
  return select_linear_kernel<DataGradientCuda, DataGradientAccumulationCuda,
                              DataGradientDoubleCuda>(op.input(1).dtype, op.input(0).dtype);
}

CudaKernel linear_weight_gradient_cuda_kernel(const OpView& op) {
  if (op.output(0).dtype == DType::bf16) {
    switch (op.input(0).dtype) {
      case DType::f64:
        return &run_linear_weight_gradient<Bf16, double, Bf16>;
      case DType::f32:
        return &run_linear_weight_gradient<Bf16, float, Bf16>;
      default:
        return &run_linear_weight_gradient<Bf16, Bf16, Bf16>;
    }
  }
  return select_linear_kernel<WeightGradientCuda, WeightGradientAccumulationCuda,
                              WeightGradientDoubleCuda>(op.input(1).dtype, op.input(0).dtype);
}

CudaKernel linear_bias_gradient_cuda_kernel(const OpView& op) {
  const DType dy = op.input(0).dtype;
  if (op.output(0).dtype == DType::bf16) {
    switch (dy) {
      case DType::f64:
        return &run_linear_bias_gradient<double, Bf16>;
      case DType::f32:
        return &run_linear_bias_gradient<float, Bf16>;
      default:
        return &run_linear_bias_gradient<Bf16, Bf16>;
    }
  }
  if (op.output(0).dtype == accumulation_dtype(dy)) {
    return select_cuda_kernel<LinearBiasGradientCuda>(dy);
  }
  return &run_linear_bias_gradient<double, float>;
}

}  // namespace troupe
