#include "ops/cuda/context.h"
#include "ops/cuda/product.cuh"
#include "ops/products/head_linear/head_linear.h"

namespace troupe {
namespace {

// One product for each head: operands and results of a head begin `step` elements after those of
// the head before.
template <class T, class Out>
struct HeadProduct {
  int64_t heads, m, n, k;
  TileOperand<T> left;
  TileOperand<T> right;
  int64_t left_step, right_step;
  Out* out;
  int64_t out_stride, out_step;
  bool accumulate;
};

template <class T, class Out>
__global__ void __launch_bounds__(kTileThreads) head_product_kernel(HeadProduct<T, Out> p) {
  const int64_t head = blockIdx.z;
  p.left.data += head * p.left_step;
  p.right.data += head * p.right_step;
  Out* out = p.out + head * p.out_step;
  multiply_tile<accumulation_t<T>>(
      p.left, p.right, p.m, p.n, p.k, int64_t{blockIdx.y} * kTile, int64_t{blockIdx.x} * kTile,
      [=](int64_t i, int64_t j, accumulation_t<T> sum) {
        Out* to = out + i * p.out_stride + j;
        *to = round_to<Out>(p.accumulate ? static_cast<accumulation_t<T>>(widen(*to)) + sum : sum);
      });
}

// What cuBLASLt is promised of every operand.
template <class T>
bool begins_aligned(const T* data, int64_t step) {
  return reinterpret_cast<uintptr_t>(data) % 64 == 0 &&
         step * static_cast<int64_t>(sizeof(T)) % 64 == 0;
}

template <class T, class Out>
void multiply_heads(const CudaKernelArguments& args, const HeadProduct<T, Out>& p) {
  const bool aligned = begins_aligned(p.left.data, p.left_step) &&
                       begins_aligned(p.right.data, p.right_step) &&
                       begins_aligned(p.out, p.out_step);
  const DenseProduct product{
      .m = p.m,
      .n = p.n,
      .k = p.k,
      .left = {p.left.data, dtype_of<T>, p.left.stride, p.left.transposed, p.left_step},
      .right = {p.right.data, dtype_of<T>, p.right.stride, p.right.transposed, p.right_step},
      .out = p.out,
      .out_stride = p.out_stride,
      .out_dtype = dtype_of<Out>,
      .accumulate = p.accumulate,
      .batch = p.heads,
      .out_step = p.out_step};
  if (aligned && args.context->multiply(product, args.stream, args.scratch)) return;
  launch(args,
         {dim3(static_cast<unsigned>(ceil_divide(p.n, kTile)),
               static_cast<unsigned>(ceil_divide(p.m, kTile)), static_cast<unsigned>(p.heads)),
          kTileThreads},
         head_product_kernel<T, Out>, p);
}

template <class T>
struct HeadLinearCuda {
  static void run(const CudaKernelArguments& args) {
    const auto& a = args.attributes->as<HeadLinearAttributes>();
    const Shape& x = args.input(0).shape;
    const Shape& weight = args.input(1).shape;
    const int64_t k = x[1] / a.heads;
    const int64_t n = a.transposed ? weight[1] : a.rows;
    const T* of_head = args.in<T>(1) + a.first * weight[1];
    multiply_heads<T, T>(args, {.heads = a.heads,
                                .m = x[0],
                                .n = n,
                                .k = k,
                                .left = {args.in<T>(0), x[1], false},
                                .right = {of_head, weight[1], !a.transposed},
                                .left_step = k,
                                .right_step = weight[0] / a.heads * weight[1],
                                .out = args.out<T>(0),
                                .out_stride = n * a.heads,
                                .out_step = n,
                                .accumulate = false});
  }
};

template <class T, class Out>
void run_head_weight_gradient(const CudaKernelArguments& args) {
  const auto& a = args.attributes->as<HeadLinearWeightGradientAttributes>();
  const Shape& rows = args.input(0).shape;
  const Shape& columns = args.input(1).shape;
  const int64_t n = columns[1] / a.heads;
  Out* gradient = args.out<Out>(0);
  if (!a.accumulate && a.rows < a.head_rows) {
    clear(args, gradient, static_cast<size_t>(args.output(0).shape.elements()) * sizeof(Out));
  }
  multiply_heads<T, Out>(args, {.heads = a.heads,
                                .m = a.rows,
                                .n = n,
                                .k = rows[0],
                                .left = {args.in<T>(0), rows[1], true},
                                .right = {args.in<T>(1), columns[1], false},
                                .left_step = a.rows,
                                .right_step = n,
                                .out = gradient + a.first * n,
                                .out_stride = n,
                                .out_step = a.head_rows * n,
                                .accumulate = a.accumulate});
}

template <class T>
struct HeadLinearWeightGradientCuda {
  static void run(const CudaKernelArguments& args) {
    run_head_weight_gradient<T, accumulation_t<T>>(args);
  }
};

}  // namespace

CudaKernel head_linear_cuda_kernel(const OpView& op) {
  return select_cuda_kernel<HeadLinearCuda>(op.output(0).dtype);
}

CudaKernel head_linear_weight_gradient_cuda_kernel(const OpView& op) {
  if (op.output(0).dtype == DType::bf16) return &run_head_weight_gradient<Bf16, Bf16>;
  return select_cuda_kernel<HeadLinearWeightGradientCuda>(op.input(0).dtype);
}

}  // namespace troupe
