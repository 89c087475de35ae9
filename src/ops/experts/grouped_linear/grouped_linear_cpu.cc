#include "ops/experts/grouped_linear/grouped_linear_cpu.h"

#include <algorithm>

#include "ops/experts/grouped_linear/grouped_linear.h"

namespace troupe {
namespace {

// Rows of a tile: enough to amortise the packing of the expert's weight, few enough that a handful
// of experts with uneven loads still make several tiles.
constexpr int64_t kGroupTileRows = 512;

// Rows of x times the experts' weights: out[r, j] = sum over i of x[r, i] * op(W_e)[i, j]. The
// workspace receives the running number of row tiles, [E + 1].
template <class T>
void multiply_rows(const KernelArguments& args, const GemmTiles& tiles, bool transposed) {
  const Shape& weight = args.input(1).shape;
  const int32_t* offsets = args.in<int32_t>(2);
  const int64_t experts = weight[0];
  const int64_t inputs = args.input(0).shape[1];
  const int64_t outputs = args.output(0).shape[1];
  const T* x = args.in<T>(0);
  T* out = args.out<T>(0);

  int64_t* first_tile = reinterpret_cast<int64_t*>(args.workspace);
  first_tile[0] = 0;
  for (int64_t e = 0; e < experts; ++e) {
    const int64_t rows = offsets[e + 1] - offsets[e];
    first_tile[e + 1] = first_tile[e] + (rows + tiles.tile_m - 1) / tiles.tile_m;
  }

  args.pool->parallel_for(first_tile[experts] * tiles.grid_n, [&](int64_t piece, int worker) {
    const int64_t tile = piece / tiles.grid_n;
    const int64_t j = piece % tiles.grid_n * tiles.tile_n;
    const int64_t e = std::upper_bound(first_tile, first_tile + experts + 1, tile) - first_tile - 1;
    const int64_t begin = offsets[e] + (tile - first_tile[e]) * tiles.tile_m;
    const int64_t rows = std::min<int64_t>(tiles.tile_m, offsets[e + 1] - begin);
    const GemmOperand<T> left{x + begin * inputs, inputs, false};
    const GemmOperand<T> right{args.in<T>(1) + e * weight.row_elements(), weight[2], transposed};
    gemm_block<T, T, T>(left, right.block(0, j), rows, std::min(tiles.tile_n, outputs - j), inputs,
                        out + begin * outputs + j, outputs, false, nullptr,
                        args.thread_scratch<accumulation_t<T>>(worker));
  });
}

template <class T>
struct GroupedLinearKernel {
  static void run(const KernelArguments& args) {
    const Shape& x = args.input(0).shape;
    multiply_rows<T>(args, grouped_linear_tiles(x[0], args.output(0).shape[1], x[1]), true);
  }
};

template <class T>
struct GroupedLinearDataGradientKernel {
  static void run(const KernelArguments& args) {
    const Shape& dy = args.input(0).shape;
    multiply_rows<T>(args, grouped_linear_tiles(dy[0], args.output(0).shape[1], dy[1]), false);
  }
};

// Out is the type of the gradient.
template <class T, class Out>
void run_grouped_linear_weight_gradient(const KernelArguments& args) {
  const bool accumulate = args.attributes->as<GroupedLinearWeightGradientAttributes>().accumulate;
  const Shape& dy = args.input(0).shape;
  const Shape& x = args.input(1).shape;
  const int64_t experts = args.output(0).shape[0];
  const int32_t* offsets = args.in<int32_t>(2);
  const GemmTiles tiles = grouped_linear_weight_gradient_tiles(dy, x, experts);
  Out* out = args.out<Out>(0);
  args.pool->parallel_for(experts * tiles.tiles(), [&](int64_t piece, int worker) {
    const int64_t e = piece / tiles.tiles();
    const int64_t tile = piece % tiles.tiles();
    const int64_t n = tile / tiles.grid_n * tiles.tile_m;
    const int64_t k = tile % tiles.grid_n * tiles.tile_n;
    const int64_t rows = offsets[e + 1] - offsets[e];
    if (rows == 0 && accumulate) return;
    const GemmOperand<T> left{args.in<T>(0) + offsets[e] * dy[1], dy[1], true};
    const GemmOperand<T> right{args.in<T>(1) + offsets[e] * x[1], x[1], false};
    gemm_block<T, T, Out>(left.block(n, 0), right.block(0, k), std::min(tiles.tile_m, dy[1] - n),
                          std::min(tiles.tile_n, x[1] - k), rows, out + (e * dy[1] + n) * x[1] + k,
                          x[1], accumulate, nullptr,
                          args.thread_scratch<accumulation_t<T>>(worker));
  });
}

template <class T>
struct GroupedLinearWeightGradientKernel {
  static void run(const KernelArguments& args) {
    run_grouped_linear_weight_gradient<T, accumulation_t<T>>(args);
  }
};

}  // namespace

GemmTiles grouped_linear_tiles(int64_t rows, int64_t outputs, int64_t reduction) {
  return gemm_tiles(std::min(rows, kGroupTileRows), outputs, reduction,
                    (rows + kGroupTileRows - 1) / kGroupTileRows);
}

GemmTiles grouped_linear_weight_gradient_tiles(const Shape& dy, const Shape& x, int64_t experts) {
  GemmTiles tiles = gemm_tiles(dy[1], x[1], std::max<int64_t>(1, dy[0] / experts), experts);
  tiles.tile_k = dy[0];  // one expert may have all rows
  return tiles;
}

CpuKernel grouped_linear_cpu_kernel(const OpView& op) {
  return select_float_kernel<GroupedLinearKernel>(op.input(0).dtype);
}

CpuKernel grouped_linear_data_gradient_cpu_kernel(const OpView& op) {
  return select_float_kernel<GroupedLinearDataGradientKernel>(op.input(0).dtype);
}

CpuKernel grouped_linear_weight_gradient_cpu_kernel(const OpView& op) {
  if (op.output(0).dtype == DType::bf16) return &run_grouped_linear_weight_gradient<bf16, bf16>;
  return select_float_kernel<GroupedLinearWeightGradientKernel>(op.input(0).dtype);
}

}  // namespace troupe
