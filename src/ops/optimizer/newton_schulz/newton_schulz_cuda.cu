#include <algorithm>
#include <utility>

#include "ops/cuda/context.h"
#include "ops/cuda/product.cuh"
#include "ops/optimizer/newton_schulz/newton_schulz.h"
#include "ops/optimizer/newton_schulz/newton_schulz_cpu.h"
#include "ops/optimizer/newton_schulz/newton_schulz_cuda.h"

namespace troupe {
namespace {

// Sums of the squares of the elements of matrices that are `step` apart: a block for each piece of
// each matrix.
template <class T>
__global__ void square_pieces_kernel(const T* x, int64_t step, int64_t elements, double* squares) {
  __shared__ double shared[32];
  const T* matrix = x + blockIdx.y * step;
  double sum = 0;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < elements;
       i += int64_t{gridDim.x} * blockDim.x) {
    const auto value = static_cast<double>(matrix[i]);
    sum += value * value;
  }
  sum = block_sum(sum, shared);
  if (threadIdx.x == 0) squares[int64_t{blockIdx.y} * gridDim.x + blockIdx.x] = sum;
}

// out = x / |x|. T and P are the types of x and of what products take. Blocks of kMostSquarePieces.
template <class T, class P>
__global__ void normalise_kernel(const T* x, int64_t step, int64_t elements, const double* squares,
                                 int64_t pieces, P* out, int64_t out_step) {
  __shared__ double shared[32];
  const double part = threadIdx.x < pieces ? squares[blockIdx.y * pieces + threadIdx.x] : 0;
  const double norm = sqrt(block_sum(part, shared));
  const auto divisor =
      static_cast<T>(norm < kNewtonSchulzLeastNorm ? kNewtonSchulzLeastNorm : norm);
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < elements;
       i += int64_t{gridDim.x} * blockDim.x) {
    out[blockIdx.y * out_step + i] = round_to<P>(x[blockIdx.y * step + i] / divisor);
  }
}

template <class T, class P>
__global__ void scale_kernel(const P* x, int64_t step, int64_t elements, T scale, T* y,
                             int64_t y_step) {
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < elements;
       i += int64_t{gridDim.x} * blockDim.x) {
    y[blockIdx.y * y_step + i] = scale * static_cast<T>(widen(x[blockIdx.y * step + i]));
  }
}

// Matrices of a batch, `step` elements apart.
template <class P>
struct Matrices {
  P* data;
  int64_t columns;
  int64_t step;
  bool transposed = false;

  Matrices transpose() const { return {data, columns, step, true}; }
};

// out = alpha left right + beta addend, of each matrix of the batch.
template <class P>
struct ScaledProduct {
  int64_t batch, m, n, k;
  double alpha;
  Matrices<P> left, right;
  double beta;
  const P* addend;  // nullptr: none
  Matrices<P> out;
};

template <class P>
__global__ void __launch_bounds__(kTileThreads) scaled_product_kernel(ScaledProduct<P> p) {
  using Sum = accumulation_t<P>;
  const int64_t matrix = blockIdx.z;
  const auto operand = [=](const Matrices<P>& of) {
    return TileOperand<P>{of.data + matrix * of.step, of.columns, of.transposed};
  };
  multiply_tile<Sum>(operand(p.left), operand(p.right), p.m, p.n, p.k, int64_t{blockIdx.y} * kTile,
                     int64_t{blockIdx.x} * kTile, [=](int64_t i, int64_t j, Sum sum) {
                       const int64_t at = matrix * p.out.step + i * p.n + j;
                       sum *= static_cast<Sum>(p.alpha);
                       if (p.addend != nullptr) {
                         sum += static_cast<Sum>(p.beta) * static_cast<Sum>(widen(p.addend[at]));
                       }
                       p.out.data[at] = round_to<P>(sum);
                     });
}

// By cuBLASLt where it can, otherwise by our own kernel.
template <class P>
void multiply(const CudaKernelArguments& args, const ScaledProduct<P>& p) {
  const auto operand = [](const Matrices<P>& of) {
    return DenseOperand{of.data, dtype_of<P>, of.columns, of.transposed, of.step};
  };
  const DenseProduct product{.m = p.m,
                             .n = p.n,
                             .k = p.k,
                             .left = operand(p.left),
                             .right = operand(p.right),
                             .out = p.out.data,
                             .out_dtype = dtype_of<P>,
                             .alpha = p.alpha,
                             .addend = p.addend,
                             .beta = p.beta,
                             .batch = p.batch,
                             .out_step = p.out.step};
  if (args.context->multiply(product, args.stream, args.scratch)) return;
  launch(args,
         {dim3(static_cast<unsigned>(ceil_divide(p.n, kTile)),
               static_cast<unsigned>(ceil_divide(p.m, kTile)), static_cast<unsigned>(p.batch)),
          kTileThreads},
         scaled_product_kernel<P>, p);
}

// All steps, on `batch` normalised matrices in scratch. Returns where they end up.
template <class P>
P* iterate(const CudaKernelArguments& args, const SectionMatrix& section,
           const SectionScratch& scratch, int64_t batch) {
  const auto& attributes = args.attributes->as<NewtonSchulzAttributes>();
  const int64_t side = section.side();
  const bool tall = section.is_tall();
  Matrices<P> x{scratch.x<P>(args.scratch, 0), section.columns, scratch.matrix_step<P>()};
  Matrices<P> next{scratch.x<P>(args.scratch, 1), section.columns, scratch.matrix_step<P>()};
  const Matrices<P> gram{scratch.gram<P>(args.scratch), side, scratch.gram_step<P>()};
  const Matrices<P> polynomial{scratch.polynomial<P>(args.scratch), side, scratch.gram_step<P>()};
  for (int32_t step = 0; step < attributes.steps; ++step) {
    const auto [a, b, c] = newton_schulz_step(attributes, step);
    multiply<P>(args, {batch, side, side, tall ? section.rows : section.columns, 1,
                       tall ? x.transpose() : x, tall ? x : x.transpose(), 0, nullptr, gram});
    multiply<P>(args, {batch, side, side, side, c, gram, gram, b, gram.data, polynomial});
    multiply<P>(args, {batch, section.rows, section.columns, side, 1, tall ? x : polynomial,
                       tall ? polynomial : x, a, x.data, next});
    std::swap(x, next);
  }
  return x.data;
}

// T and P are the types of x and of what products take.
template <class T, class P>
void run_newton_schulz(const CudaKernelArguments& args) {
  const auto& attributes = args.attributes->as<NewtonSchulzAttributes>();
  const MatrixBatch batch(args.input(0).shape);
  const int64_t step = batch.rows * batch.columns;
  for_sections(attributes, batch, [&](const SectionMatrix& section) {
    const SectionScratch scratch(section, batch.count, sizeof(P));
    const int64_t elements = section.elements();
    const auto pieces = static_cast<unsigned>(scratch.pieces());
    for (int64_t first = 0; first < batch.count; first += scratch.together()) {
      const int64_t count = std::min(scratch.together(), batch.count - first);
      const auto matrices = static_cast<unsigned>(count);
      const dim3 grid(blocks_for(args, elements, kMostSquarePieces), matrices);
      const int64_t offset = first * step + section.first;
      launch(args, {dim3(pieces, matrices), 256}, square_pieces_kernel<T>, args.in<T>(0) + offset,
             step, elements, scratch.squares(args.scratch));
      launch(args, {grid, kMostSquarePieces}, normalise_kernel<T, P>, args.in<T>(0) + offset, step,
             elements, scratch.squares(args.scratch), scratch.pieces(),
             scratch.x<P>(args.scratch, 0), scratch.matrix_step<P>());
      launch(args, {grid, 256}, scale_kernel<T, P>, iterate<P>(args, section, scratch, count),
             scratch.matrix_step<P>(), elements, section.scale, args.out<T>(0) + offset, step);
    }
  });
}

}  // namespace

CudaKernel newton_schulz_cuda_kernel(const OpView& op) {
  if (op.input(0).dtype == DType::f64) return &run_newton_schulz<double, double>;
  return newton_schulz_is_in_bf16(op) ? &run_newton_schulz<float, Bf16>
                                      : &run_newton_schulz<float, float>;
}

}  // namespace troupe
