#include "ops/products/linear/linear_cpu.h"

#include <algorithm>

#include "ops/cpu/vector.h"
#include "ops/products/linear/linear.h"

namespace troupe {
namespace {

// Rows of dy that one piece of the bias gradient sums, at least.
constexpr int64_t kBiasRows = 512;
constexpr int64_t kBiasPieces = 16;

template <class T, class Y>
void run_linear(const KernelArguments& args) {
  const Shape& x = args.input(0).shape;
  const Shape& weight = args.input(1).shape;
  parallel_gemm<T, T, Y>(args, linear_tiles(x, weight), {args.in<T>(0), x[1], false},
                         {args.in<T>(1), x[1], true}, x[0], weight[0], x[1], args.out<Y>(0),
                         weight[0], false, args.in<T>(2));
}

template <class T>
struct LinearKernel {
  static void run(const KernelArguments& args) { run_linear<T, T>(args); }
};

template <class T>
struct LinearAccumulationKernel {
  static void run(const KernelArguments& args) { run_linear<T, accumulation_t<T>>(args); }
};

template <class T>
struct LinearDoubleKernel {
  static void run(const KernelArguments& args) { run_linear<T, double>(args); }
};

template <class T, class Dy>
void run_linear_data_gradient(const KernelArguments& args) {
  const Shape& dy = args.input(0).shape;
  const Shape& weight = args.input(1).shape;
  parallel_gemm<Dy, T, T>(args, linear_data_gradient_tiles(dy, weight),
                          {args.in<Dy>(0), dy[1], false}, {args.in<T>(1), weight[1], false}, dy[0],
                          weight[1], dy[1], args.out<T>(0), weight[1], false, nullptr);
}

template <class T>
struct LinearDataGradientKernel {
  static void run(const KernelArguments& args) { run_linear_data_gradient<T, T>(args); }
};

template <class T>
struct LinearDataGradientAccumulationKernel {
  static void run(const KernelArguments& args) {
    run_linear_data_gradient<T, accumulation_t<T>>(args);
  }
};

template <class T>
struct LinearDataGradientDoubleKernel {
  static void run(const KernelArguments& args) { run_linear_data_gradient<T, double>(args); }
};

// T, Dy and Out are the types of x, dy and the gradient.
template <class T, class Dy, class Out>
void run_linear_weight_gradient(const KernelArguments& args) {
  const bool accumulate = args.attributes->as<LinearWeightGradientAttributes>().accumulate;
  const Shape& dy = args.input(0).shape;
  const Shape& x = args.input(1).shape;
  parallel_gemm<Dy, T, Out>(args, linear_weight_gradient_tiles(dy, x),
                            {args.in<Dy>(0), dy[1], true}, {args.in<T>(1), x[1], false}, dy[1],
                            x[1], dy[0], args.out<Out>(0), x[1], accumulate, nullptr);
}

template <class T>
struct LinearWeightGradientKernel {
  static void run(const KernelArguments& args) {
    run_linear_weight_gradient<T, T, accumulation_t<T>>(args);
  }
};

template <class T>
struct LinearWeightGradientAccumulationKernel {
  static void run(const KernelArguments& args) {
    run_linear_weight_gradient<T, accumulation_t<T>, accumulation_t<T>>(args);
  }
};

template <class T>
struct LinearWeightGradientDoubleKernel {
  static void run(const KernelArguments& args) {
    run_linear_weight_gradient<T, double, accumulation_t<T>>(args);
  }
};

// Each piece of rows is summed into its own part of the workspace, then the pieces in order.
template <class T, class Out>
void run_linear_bias_gradient(const KernelArguments& args) {
  using A = accumulation_t<T>;
  const bool accumulate = args.attributes->as<LinearBiasGradientAttributes>().accumulate;
  const Shape& shape = args.input(0).shape;
  const int64_t columns = shape[1];
  const int64_t pieces = linear_bias_gradient_pieces(shape);
  const int64_t rows = (shape[0] + pieces - 1) / pieces;
  const T* dy = args.in<T>(0);
  A* sums = reinterpret_cast<A*>(args.workspace);
  args.pool->parallel_for(pieces, [&](int64_t piece, int) {
    A* to = sums + piece * columns;
    std::fill(to, to + columns, A(0));
    const int64_t end = std::min(shape[0], (piece + 1) * rows);
    for (int64_t t = piece * rows; t < end; ++t) add_to(dy + t * columns, to, columns);
  });
  for (int64_t piece = 1; piece < pieces; ++piece) {
    add_to(sums + piece * columns, sums, columns);
  }
  Out* out = args.out<Out>(0);
  TROUPE_INDEPENDENT
  for (int64_t i = 0; i < columns; ++i) out[i] = Out(accumulate ? A(out[i]) + sums[i] : sums[i]);
}

template <class T>
struct LinearBiasGradientKernel {
  static void run(const KernelArguments& args) {
    run_linear_bias_gradient<T, accumulation_t<T>>(args);
  }
};

// The kernel for operands of dtype `compute` and a y, or dy, of dtype `output`.
template <template <class> class Compute, template <class> class Accumulation,
          template <class> class Double>
CpuKernel select_linear_kernel(DType compute, DType output) {
  if (output == compute) return select_float_kernel<Compute>(compute);
  if (output == accumulation_dtype(compute)) return select_float_kernel<Accumulation>(compute);
  return select_float_kernel<Double>(compute);
}

}  // namespace

GemmTiles linear_tiles(const Shape& x, const Shape& weight) {
  return gemm_tiles(x[0], weight[0], x[1]);
}

GemmTiles linear_data_gradient_tiles(const Shape& dy, const Shape& weight) {
  return gemm_tiles(dy[0], weight[1], dy[1]);
}

GemmTiles linear_weight_gradient_tiles(const Shape& dy, const Shape& x) {
  return gemm_tiles(dy[1], x[1], dy[0], 1, true);
}

int64_t linear_bias_gradient_pieces(const Shape& dy) {
  return std::clamp<int64_t>(dy[0] / kBiasRows, 1, kBiasPieces);
}

CpuKernel linear_cpu_kernel(const OpView& op) {
  return select_linear_kernel<LinearKernel, LinearAccumulationKernel, LinearDoubleKernel>(
      op.input(0).dtype, op.output(0).dtype);
}

CpuKernel linear_data_gradient_cpu_kernel(const OpView& op) {
  return select_linear_kernel<LinearDataGradientKernel, LinearDataGradientAccumulationKernel,
                              LinearDataGradientDoubleKernel>(op.input(1).dtype, op.input(0).dtype);
}

CpuKernel linear_weight_gradient_cpu_kernel(const OpView& op) {
  if (op.output(0).dtype == DType::bf16) {
    switch (op.input(0).dtype) {
      case DType::f64:
        return &run_linear_weight_gradient<bf16, double, bf16>;
      case DType::f32:
        return &run_linear_weight_gradient<bf16, float, bf16>;
      default:
        return &run_linear_weight_gradient<bf16, bf16, bf16>;
    }
  }
  return select_linear_kernel<LinearWeightGradientKernel, LinearWeightGradientAccumulationKernel,
                              LinearWeightGradientDoubleKernel>(op.input(1).dtype,
                                                                op.input(0).dtype);
}

CpuKernel linear_bias_gradient_cpu_kernel(const OpView& op) {
  const DType dy = op.input(0).dtype;
  if (op.output(0).dtype == DType::bf16) {
    switch (dy) {
      case DType::f64:
        return &run_linear_bias_gradient<double, bf16>;
      case DType::f32:
        return &run_linear_bias_gradient<float, bf16>;
      default:
        return &run_linear_bias_gradient<bf16, bf16>;
    }
  }
  if (op.output(0).dtype == accumulation_dtype(dy)) {
    return select_float_kernel<LinearBiasGradientKernel>(dy);
  }
  return &run_linear_bias_gradient<double, float>;
}

}  // namespace troupe
