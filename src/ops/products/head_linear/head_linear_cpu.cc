#include "ops/products/head_linear/head_linear_cpu.h"

#include <algorithm>

#include "program/kernel.h"

namespace troupe {
namespace {

template <class T>
struct HeadLinearKernel {
  static void run(const KernelArguments& args) {
    const auto& attributes = args.attributes->as<HeadLinearAttributes>();
    const Shape& x = args.input(0).shape;
    const Shape& weight = args.input(1).shape;
    const GemmTiles tiles = head_linear_tiles(attributes, x, weight);
    const int64_t head_rows = weight[0] / attributes.heads;
    const int64_t k = x[1] / attributes.heads;
    const int64_t n = attributes.transposed ? weight[1] : attributes.rows;
    const int64_t stride = n * attributes.heads;
    args.pool->parallel_for(attributes.heads * tiles.tiles(), [&](int64_t piece, int worker) {
      const int64_t head = piece / tiles.tiles();
      const int64_t tile = piece % tiles.tiles();
      const int64_t i = tile / tiles.grid_n * tiles.tile_m;
      const int64_t j = tile % tiles.grid_n * tiles.tile_n;
      const GemmOperand<T> rows{args.in<T>(0) + head * k, x[1], false};
      const GemmOperand<T> of_head{
          args.in<T>(1) + (head * head_rows + attributes.first) * weight[1], weight[1],
          !attributes.transposed};
      gemm_block(rows.block(i, 0), of_head.block(0, j), std::min(tiles.tile_m, x[0] - i),
                 std::min(tiles.tile_n, n - j), k, args.out<T>(0) + i * stride + head * n + j,
                 stride, false, static_cast<const T*>(nullptr),
                 args.thread_scratch<gemm_sum_t<T, T, T>>(worker));
    });
  }
};

template <class T, class Out>
void run_head_linear_weight_gradient(const KernelArguments& args) {
  const auto& attributes = args.attributes->as<HeadLinearWeightGradientAttributes>();
  const Shape& rows = args.input(0).shape;
  const Shape& columns = args.input(1).shape;
  const GemmTiles tiles = head_linear_weight_gradient_tiles(attributes, columns);
  const int64_t m = attributes.rows;
  const int64_t n = columns[1] / attributes.heads;
  Out* gradient = args.out<Out>(0);
  args.pool->parallel_for(attributes.heads * tiles.tiles(), [&](int64_t piece, int worker) {
    const int64_t head = piece / tiles.tiles();
    const int64_t tile = piece % tiles.tiles();
    const int64_t i = tile / tiles.grid_n * tiles.tile_m;
    const int64_t j = tile % tiles.grid_n * tiles.tile_n;
    const GemmOperand<T> left{args.in<T>(0) + head * m, rows[1], true};
    const GemmOperand<T> right{args.in<T>(1) + head * n, columns[1], false};
    gemm_block(left.block(i, 0), right.block(0, j), std::min(tiles.tile_m, m - i),
               std::min(tiles.tile_n, n - j), rows[0],
               gradient + (head * attributes.head_rows + attributes.first + i) * n + j, n,
               attributes.accumulate, static_cast<const T*>(nullptr),
               args.thread_scratch<gemm_sum_t<T, T, Out>>(worker));
  });
  if (attributes.accumulate) return;
  args.pool->parallel_for(attributes.heads, [&](int64_t head, int) {
    Out* of_head = gradient + head * attributes.head_rows * n;
    std::fill(of_head, of_head + attributes.first * n, Out(0.0F));
    std::fill(of_head + (attributes.first + m) * n, of_head + attributes.head_rows * n, Out(0.0F));
  });
}

template <class T>
struct HeadLinearWeightGradientKernel {
  static void run(const KernelArguments& args) {
    run_head_linear_weight_gradient<T, accumulation_t<T>>(args);
  }
};

}  // namespace

GemmTiles head_linear_tiles(const HeadLinearAttributes& attributes, const Shape& x,
                            const Shape& weight) {
  return gemm_tiles(x[0], attributes.transposed ? weight[1] : attributes.rows,
                    x[1] / attributes.heads, attributes.heads);
}

GemmTiles head_linear_weight_gradient_tiles(const HeadLinearWeightGradientAttributes& attributes,
                                            const Shape& columns) {
  return gemm_tiles(attributes.rows, columns[1] / attributes.heads, columns[0], attributes.heads);
}

CpuKernel head_linear_cpu_kernel(const OpView& op) {
  return select_float_kernel<HeadLinearKernel>(op.output(0).dtype);
}

CpuKernel head_linear_weight_gradient_cpu_kernel(const OpView& op) {
  if (op.output(0).dtype == DType::bf16) return &run_head_linear_weight_gradient<bf16, bf16>;
  return select_float_kernel<HeadLinearWeightGradientKernel>(op.input(0).dtype);
}

}  // namespace troupe
