#include <mma.h>
#include <type_traits>

#include "ops/cuda/product.cuh"
#include "ops/grouped_linear/grouped_linear.h"

namespace troupe {
namespace {

// f32 and f64: the plain tiles of product.cuh. The grid has as many tiles of rows as there can be;
// blocks find theirs from the offsets, and those beyond the last one end.
template <class T>
__global__ void __launch_bounds__(kTileThreads)
    rows_kernel(const T* x, const T* weight, const int32_t* offsets, T* out, int experts,
                int64_t inputs, int64_t outputs, int64_t weight_columns, bool transposed) {
  using A = accumulation_t<T>;
  const GroupTile tile = find_group_tile(offsets, experts, static_cast<int32_t>(blockIdx.y), kTile);
  if (tile.group < 0) return;
  const TileOperand<T> left{x, inputs, false};
  const TileOperand<T> right{weight + tile.group * inputs * outputs, weight_columns, transposed};
  multiply_tile<A>(left, right, tile.end, outputs, inputs, tile.first, int64_t{blockIdx.x} * kTile,
                   [=](int64_t i, int64_t j, A sum) { out[i * outputs + j] = round_to<T>(sum); });
}

template <class T>
__global__ void __launch_bounds__(kTileThreads)
    weights_kernel(const T* dy, const T* x, const int32_t* offsets, accumulation_t<T>* out,
                   int64_t outputs, int64_t inputs, bool accumulate) {
  using A = accumulation_t<T>;
  const int64_t e = blockIdx.z;
  const int64_t begin = offsets[e];
  const int64_t rows = offsets[e + 1] - begin;
  if (rows == 0 && accumulate) return;
  const TileOperand<T> left{dy + begin * outputs, outputs, true};
  const TileOperand<T> right{x + begin * inputs, inputs, false};
  multiply_tile<A>(left, right, outputs, inputs, rows, int64_t{blockIdx.y} * kTile,
                   int64_t{blockIdx.x} * kTile, [=](int64_t i, int64_t j, A sum) {
                     A& to = out[(e * outputs + i) * inputs + j];
                     to = accumulate ? to + sum : sum;
                   });
}

// bf16: tensor cores. A block of eight warps computes a tile of 128 x 128, 32 deep at a time; a
// warp has 64 x 32 of it. Tiles of the operands lie in shared memory as they do in memory, and the
// fragments take them row- or column-wise. Two stages: while one is multiplied, the next one is on
// its way through registers.
constexpr int kMmaTile = 128;
constexpr int kMmaDepth = 32;
constexpr int kMmaThreads = 256;
constexpr int kMmaPad = 8;  // elements between the rows of a tile in shared memory
constexpr int kFragment = 16;
constexpr int kWarpRows = 64;
constexpr int kWarpColumns = 32;

// A tile of [kMmaTile, kMmaDepth] of an operand of the product: as it is, or, when the operand is
// stored with the depth first, [kMmaDepth, kMmaTile].
template <bool kDepthFirst>
struct MmaOperand {
  static constexpr int kRows = kDepthFirst ? kMmaDepth : kMmaTile;
  static constexpr int kColumns = kDepthFirst ? kMmaTile : kMmaDepth;
  static constexpr int kStride = kColumns + kMmaPad;
  static constexpr int kElements = kRows * kStride;
  static constexpr int kPacks = kRows * kColumns / 8 / kMmaThreads;  // of each thread

  const Bf16* data;  // of the operand's first row
  int64_t stride;
  int64_t rows;  // of the operand as stored, counted from `data`; what lies beyond is zero
  int64_t columns;
  bool aligned;  // whole packs can be read

  // Reads the tile that begins at `row` and `column`, both as stored.
  __device__ __forceinline__ void read(int64_t row, int64_t column,
                                       Pack<Bf16> (&packs)[kPacks]) const {
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      const int number = static_cast<int>(threadIdx.x) + i * kMmaThreads;
      const int64_t r = row + number / (kColumns / 8);
      const int64_t c = column + number % (kColumns / 8) * 8;
      const Bf16* from = data + r * stride + c;
      if (r < rows && c + 8 <= columns && aligned) {
        packs[i] = load_pack(from);
        continue;
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        packs[i].values[j] = r < rows && c + j < columns ? from[j] : __float2bfloat16_rn(0.0F);
      }
    }
  }
  __device__ __forceinline__ static void store(const Pack<Bf16> (&packs)[kPacks], Bf16* shared) {
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      const int number = static_cast<int>(threadIdx.x) + i * kMmaThreads;
      store_pack(shared + number / (kColumns / 8) * kStride + number % (kColumns / 8) * 8,
                 packs[i]);
    }
  }
};

template <bool kLeftDepthFirst, bool kRightDepthFirst>
constexpr size_t mma_shared_bytes() {
  const size_t operands =
      2 * sizeof(Bf16) *
      (MmaOperand<kLeftDepthFirst>::kElements + MmaOperand<kRightDepthFirst>::kElements);
  const size_t results = sizeof(float) * kMmaThreads / 32 * kFragment * kFragment;
  return operands + results;
}

// Computes the tile of left [m, k] right [k, n] whose first row is left.data's row `row` (column,
// when the depth comes first), and calls put(i, j, sum) for its elements with i and j counted in
// the tile.
template <bool kLeftDepthFirst, bool kRightDepthFirst, class Put>
__device__ __forceinline__ void multiply_mma(const MmaOperand<kLeftDepthFirst>& left,
                                             const MmaOperand<kRightDepthFirst>& right, int64_t row,
                                             int64_t column, int64_t depth, const Put& put) {
  using Left = MmaOperand<kLeftDepthFirst>;
  using Right = MmaOperand<kRightDepthFirst>;
  namespace wmma = nvcuda::wmma;
  using LeftLayout = std::conditional_t<kLeftDepthFirst, wmma::col_major, wmma::row_major>;
  using RightLayout = std::conditional_t<kRightDepthFirst, wmma::row_major, wmma::col_major>;
  extern __shared__ __align__(128) std::byte shared_memory[];
  auto* left_tiles = reinterpret_cast<Bf16*>(shared_memory);
  Bf16* right_tiles = left_tiles + 2 * Left::kElements;
  auto* results = reinterpret_cast<float*>(right_tiles + 2 * Right::kElements);

  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int warp_row = warp / 4 * kWarpRows;
  const int warp_column = warp % 4 * kWarpColumns;
  wmma::fragment<wmma::accumulator, 16, 16, 16, float> sums[kWarpRows / 16][kWarpColumns / 16];
#pragma unroll
  for (auto& line : sums) {
#pragma unroll
    for (auto& sum : line) wmma::fill_fragment(sum, 0.0F);
  }

  Pack<Bf16> left_packs[Left::kPacks];
  Pack<Bf16> right_packs[Right::kPacks];
  const auto read = [&](int64_t at) {
    left.read(kLeftDepthFirst ? at : row, kLeftDepthFirst ? row : at, left_packs);
    right.read(kRightDepthFirst ? at : column, kRightDepthFirst ? column : at, right_packs);
  };
  const int64_t steps = (depth + kMmaDepth - 1) / kMmaDepth;
  if (steps > 0) {
    read(0);
    Left::store(left_packs, left_tiles);
    Right::store(right_packs, right_tiles);
  }
  for (int64_t step = 0; step < steps; ++step) {
    __syncthreads();
    const int stage = static_cast<int>(step % 2);
    if (step + 1 < steps) read((step + 1) * kMmaDepth);
    const Bf16* left_tile = left_tiles + stage * Left::kElements;
    const Bf16* right_tile = right_tiles + stage * Right::kElements;
#pragma unroll
    for (int inner = 0; inner < kMmaDepth; inner += 16) {
      wmma::fragment<wmma::matrix_a, 16, 16, 16, Bf16, LeftLayout> a[kWarpRows / 16];
      wmma::fragment<wmma::matrix_b, 16, 16, 16, Bf16, RightLayout> b[kWarpColumns / 16];
#pragma unroll
      for (int i = 0; i < kWarpRows / 16; ++i) {
        const int at = warp_row + i * 16;
        wmma::load_matrix_sync(
            a[i],
            left_tile + (kLeftDepthFirst ? inner * Left::kStride + at : at * Left::kStride + inner),
            Left::kStride);
      }
#pragma unroll
      for (int j = 0; j < kWarpColumns / 16; ++j) {
        const int at = warp_column + j * 16;
        wmma::load_matrix_sync(b[j],
                               right_tile + (kRightDepthFirst ? inner * Right::kStride + at
                                                              : at * Right::kStride + inner),
                               Right::kStride);
      }
#pragma unroll
      for (int i = 0; i < kWarpRows / 16; ++i) {
#pragma unroll
        for (int j = 0; j < kWarpColumns / 16; ++j) {
          wmma::mma_sync(sums[i][j], a[i], b[j], sums[i][j]);
        }
      }
    }
    // The other stage was last read before the barrier above.
    if (step + 1 < steps) {
      Left::store(left_packs, left_tiles + (1 - stage) * Left::kElements);
      Right::store(right_packs, right_tiles + (1 - stage) * Right::kElements);
    }
  }

  float* own = results + warp * kFragment * kFragment;
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int i = 0; i < kWarpRows / 16; ++i) {
#pragma unroll
    for (int j = 0; j < kWarpColumns / 16; ++j) {
      wmma::store_matrix_sync(own, sums[i][j], kFragment, wmma::mem_row_major);
      __syncwarp();
#pragma unroll
      for (int e = lane; e < kFragment * kFragment; e += 32) {
        put(warp_row + i * 16 + e / kFragment, warp_column + j * 16 + e % kFragment, own[e]);
      }
      __syncwarp();
    }
  }
}

// kForward: y = x W^T, with the weight's depth last; otherwise dx = dy W, with its depth first.
template <bool kForward>
__global__ void __launch_bounds__(kMmaThreads)
    rows_mma_kernel(const Bf16* x, const Bf16* weight, const int32_t* offsets, Bf16* out,
                    int experts, int64_t inputs, int64_t outputs, bool aligned) {
  const GroupTile tile =
      find_group_tile(offsets, experts, static_cast<int32_t>(blockIdx.y), kMmaTile);
  if (tile.group < 0) return;
  const int64_t column = int64_t{blockIdx.x} * kMmaTile;
  const MmaOperand<false> left{x, inputs, tile.end, inputs, aligned};
  const MmaOperand<!kForward> right{weight + tile.group * inputs * outputs,
                                    kForward ? inputs : outputs, kForward ? outputs : inputs,
                                    kForward ? inputs : outputs, aligned};
  multiply_mma(left, right, tile.first, column, inputs, [=](int i, int j, float sum) {
    const int64_t row = tile.first + i;
    if (row < tile.end && column + j < outputs) {
      out[row * outputs + column + j] = __float2bfloat16_rn(sum);
    }
  });
}

__global__ void __launch_bounds__(kMmaThreads)
    weights_mma_kernel(const Bf16* dy, const Bf16* x, const int32_t* offsets, float* out,
                       int64_t outputs, int64_t inputs, bool accumulate, bool aligned) {
  const int64_t e = blockIdx.z;
  const int64_t begin = offsets[e];
  const int64_t rows = offsets[e + 1] - begin;
  if (rows == 0 && accumulate) return;
  const int64_t row = int64_t{blockIdx.y} * kMmaTile;
  const int64_t column = int64_t{blockIdx.x} * kMmaTile;
  const MmaOperand<true> left{dy + begin * outputs, outputs, rows, outputs, aligned};
  const MmaOperand<true> right{x + begin * inputs, inputs, rows, inputs, aligned};
  multiply_mma(left, right, row, column, rows, [=](int i, int j, float sum) {
    if (row + i >= outputs || column + j >= inputs) return;
    float& to = out[(e * outputs + row + i) * inputs + column + j];
    to = accumulate ? to + sum : sum;
  });
}

// A grid over tiles of columns and the most tiles of rows that there can be.
Launch rows_launch(int64_t rows, int64_t experts, int64_t columns, int64_t tile) {
  Launch shape;
  shape.grid = dim3(static_cast<unsigned>(ceil_divide(columns, tile)),
                    static_cast<unsigned>(most_group_tiles(rows, experts, tile)));
  shape.block = kTileThreads;
  return shape;
}

// y (kForward) or dx, of rows x [R, inputs].
template <class T, bool kForward>
void multiply_rows(const CudaKernelArguments& args) {
  const Shape& x = args.input(0).shape;
  const Shape& weight = args.input(1).shape;
  const int64_t outputs = args.output(0).shape[1];
  if constexpr (std::is_same_v<T, Bf16>) {
    Launch shape = rows_launch(x[0], weight[0], outputs, kMmaTile);
    shape.shared_bytes = mma_shared_bytes<false, !kForward>();
    allow_shared_bytes(rows_mma_kernel<kForward>, shape.shared_bytes);
    launch(args, shape, rows_mma_kernel<kForward>, args.in<T>(0), args.in<T>(1),
           args.in<int32_t>(2), args.out<T>(0), static_cast<int>(weight[0]), x[1], outputs,
           x[1] % 8 == 0 && outputs % 8 == 0);
  } else {
    launch(args, rows_launch(x[0], weight[0], outputs, kTile), rows_kernel<T>, args.in<T>(0),
           args.in<T>(1), args.in<int32_t>(2), args.out<T>(0), static_cast<int>(weight[0]), x[1],
           outputs, weight[2], kForward);
  }
}

template <class T>
struct GroupedLinearCuda {
  static void run(const CudaKernelArguments& args) { multiply_rows<T, true>(args); }
};

template <class T>
struct GroupedDataGradientCuda {
  static void run(const CudaKernelArguments& args) { multiply_rows<T, false>(args); }
};

template <class T>
struct GroupedWeightGradientCuda {
  static void run(const CudaKernelArguments& args) {
    const bool accumulate = args.attributes->as<GroupedLinearWeightGradientAttributes>().accumulate;
    const Shape& out = args.output(0).shape;
    constexpr bool kTensorCores = std::is_same_v<T, Bf16>;
    constexpr int64_t kSide = kTensorCores ? kMmaTile : kTile;
    Launch shape;
    shape.grid =
        dim3(static_cast<unsigned>(ceil_divide(out[2], kSide)),
             static_cast<unsigned>(ceil_divide(out[1], kSide)), static_cast<unsigned>(out[0]));
    shape.block = kTileThreads;
    if constexpr (kTensorCores) {
      shape.shared_bytes = mma_shared_bytes<true, true>();
      allow_shared_bytes(weights_mma_kernel, shape.shared_bytes);
      launch(args, shape, weights_mma_kernel, args.in<T>(0), args.in<T>(1), args.in<int32_t>(2),
             args.out<float>(0), out[1], out[2], accumulate, out[1] % 8 == 0 && out[2] % 8 == 0);
    } else {
      launch(args, shape, weights_kernel<T>, args.in<T>(0), args.in<T>(1), args.in<int32_t>(2),
             args.out<accumulation_t<T>>(0), out[1], out[2], accumulate);
    }
  }
};

static_assert(kMmaThreads == kTileThreads);

}  // namespace

CudaKernel grouped_linear_cuda_kernel(const OpView& op) {
  return select_cuda_kernel<GroupedLinearCuda>(op.input(0).dtype);
}

CudaKernel grouped_linear_data_gradient_cuda_kernel(const OpView& op) {
  return select_cuda_kernel<GroupedDataGradientCuda>(op.input(0).dtype);
}

CudaKernel grouped_linear_weight_gradient_cuda_kernel(const OpView& op) {
  return select_cuda_kernel<GroupedWeightGradientCuda>(op.input(0).dtype);
}

}  // namespace troupe
