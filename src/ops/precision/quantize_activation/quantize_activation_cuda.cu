#include "ops/elementwise/activation/activation.cuh"
#include "ops/precision/cuda/code_tiles.cuh"
#include "ops/precision/cuda/quantize_tiles.h"
#include "ops/precision/quantize_activation/quantize_activation.h"
#include "program/cuda/raw_step.cuh"

namespace troupe {

using namespace code_tiles;

namespace {

constexpr int kElements = Pack<Bf16>::kElements;
constexpr int kRows = PacksOf<Bf16>::kOwnRows;  // of a thread,
constexpr int kAhead = 2;                       // of which these are loaded at once

// What activations are made of, rows of f or 2 f elements.
struct ActivationRows {
  const Bf16* x;
  RowWeights<float> weights;
  Halves<float> halves;
  bool gated;

  ActivationRows(const CudaKernelArguments& args, int weights_input)
      : x(args.in<Bf16>(0)),
        weights(row_weights<float>(args, weights_input)),
        halves(args.attributes->as<QuantizeActivationAttributes>().activation),
        gated(args.attributes->as<QuantizeActivationAttributes>().activation.gated) {}
};

template <TileScales kScales, ActivationFunction kFunction>
__global__ void __launch_bounds__(kTileThreads, kTileBlocks)
    quantize_activation_kernel(ActivationRows source, TransposedGrid grid, TileOutputs out) {
  __shared__ __align__(16) TileMemory memory;
  const int f = static_cast<int>(grid.columns());
  const TilePlace tile = tile_place(grid, 0, f);
  if (tile.rows.count == 0 && out.transposed == nullptr) return;
  const int column = tile.first_column + own_column<Bf16>();
  const auto is_inside = [&](int i) {
    return own_row<Bf16>(i) < tile.rows.count && column < tile.end_column;
  };
  const int64_t width = source.gated ? 2 * f : f;
  Pack<Bf16> packs[kRows];
  static_assert(kRows % kAhead == 0);
#pragma unroll
  for (int first = 0; first < kRows; first += kAhead) {
    RawStep<Bf16, kElements> gates[kAhead] = {};
    RawStep<Bf16, kElements> ups[kAhead] = {};
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (!is_inside(first + i)) continue;
      const int64_t row = tile.rows.first + own_row<Bf16>(first + i);
      const Bf16* const from = source.x + row * width + column;
      gates[i] = load_raw<Bf16, kElements>(from);
      if (source.gated) ups[i] = load_raw<Bf16, kElements>(from + f);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      packs[first + i] = zeros<Bf16>();
      if (!is_inside(first + i)) continue;
      const int64_t slot = source.weights.slot(tile.rows.first + own_row<Bf16>(first + i));
      packs[first + i] = activate_step<kFunction, Bf16, kElements>(
          unpack(gates[i]), unpack(ups[i]), source.gated, source.halves, slot,
          source.weights.of_slot(slot));
    }
  }
  quantize_tile<__NV_E4M3, kScales>(memory, packs, tile, out);
}

// Packs that wait to be quantised, of gates and of linear halves; each thread has its own.
struct GradientMemory {
  TileMemory tile;
  uint4 halves[2][kRows][kTileThreads];
};

// What a step of a row's gradient reads.
struct GradientStep {
  RawStep<Bf16, kElements> gate = {};
  RawStep<Bf16, kElements> up = {};
  RawStep<Bf16, kElements> d = {};
};

// `sums` [rows, tiles of f columns]: parts of the gradients of rows' weights, or null.
template <__nv_fp8_interpretation_t kFormat, TileScales kScales, ActivationFunction kFunction>
__global__ void __launch_bounds__(kTileThreads, kTileBlocks)
    quantize_activation_gradient_kernel(ActivationRows source, const Bf16* dy, int f,
                                        TransposedGrid grid, TileOutputs out, float* sums) {
  extern __shared__ __align__(16) std::byte shared[];
  auto& memory = *reinterpret_cast<GradientMemory*>(shared);
  TilePlace tile = tile_place(grid, 0, f);
  if (tile.rows.count == 0 && out.transposed == nullptr) return;
  const int column = tile.first_column + own_column<Bf16>();
  const auto is_inside = [&](int i) {
    return own_row<Bf16>(i) < tile.rows.count && column < tile.end_column;
  };
  const auto load = [&](int i) {
    GradientStep step;
    if (!is_inside(i)) return step;
    const int64_t row = tile.rows.first + own_row<Bf16>(i);
    const Bf16* const from = source.x + row * tile.columns + column;
    step.gate = load_raw<Bf16, kElements>(from);
    if (source.gated) step.up = load_raw<Bf16, kElements>(from + f);
    step.d = load_raw<Bf16, kElements>(dy + row * f + column);
    return step;
  };
  // Each row is on its way while the one before is worked on.
  GradientStep step = load(0);
#pragma unroll 1
  for (int i = 0; i < kRows; ++i) {
    GradientStep next = step;
    if (i + 1 < kRows) next = load(i + 1);
    const int64_t row = tile.rows.first + own_row<Bf16>(i);
    Pack<Bf16> d_gates = zeros<Bf16>();
    Pack<Bf16> d_ups = d_gates;
    float sum = 0;
    if (is_inside(i)) {
      const int64_t slot = source.weights.slot(row);
      differentiate_step<kFunction, Bf16, kElements>(
          unpack(step.gate), unpack(step.up), unpack(step.d), source.gated, source.halves, slot,
          source.weights.of_slot(slot), d_gates, d_ups, sum);
    }
    memory.halves[0][i][threadIdx.x] = __builtin_bit_cast(uint4, d_gates);
    memory.halves[1][i][threadIdx.x] = __builtin_bit_cast(uint4, d_ups);
    step = next;
    if (sums == nullptr) continue;
#pragma unroll
    for (int lanes = PacksOf<Bf16>::kPacks / 2; lanes > 0; lanes /= 2) {
      sum += __shfl_xor_sync(0xffffffffU, sum, lanes);
    }
    if (own_column<Bf16>() == 0 && own_row<Bf16>(i) < tile.rows.count) {
      sums[row * gridDim.y + blockIdx.y] = sum;
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (half > 0 && !source.gated) return;
    if (half > 0) __syncthreads();  // the memory of the tile is used again
    Pack<Bf16> packs[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      packs[i] = __builtin_bit_cast(Pack<Bf16>, memory.halves[half][i][threadIdx.x]);
    }
    quantize_tile<kFormat, kScales>(memory.tile, packs, tile, out);
    tile.first_column += f;
    tile.end_column += f;
  }
}

// The parts of each row's sum, one tile's after the other's.
__global__ void add_tile_sums_kernel(const float* sums, int64_t tiles, RowWeights<float> weights,
                                     LiveRows rows, float* d_weights) {
  const int64_t row = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (row >= rows.count()) return;
  const int64_t slot = weights.slot(row);
  if (slot < 0) return;
  float sum = 0;
  for (int64_t tile = 0; tile < tiles; ++tile) sum += sums[row * tiles + tile];
  d_weights[slot] = sum;
}

template <ActivationFunction kFunction>
auto* select_gradient_tiles(const QuantizeAttributes& codes) {
  if (tile_scales(codes) == TileScales::lines) {
    return &quantize_activation_gradient_kernel<__NV_E4M3, TileScales::lines, kFunction>;
  }
  return codes.format == DType::f8e4m3
             ? &quantize_activation_gradient_kernel<__NV_E4M3, TileScales::whole, kFunction>
             : &quantize_activation_gradient_kernel<__NV_E5M2, TileScales::whole, kFunction>;
}

void quantize_activation_tiles(const CudaKernelArguments& args) {
  ActivationSteps<CudaKernelArguments> steps(args, &CudaKernelArguments::scratch, false);
  steps.second.scratch = args.scratch;
  const TransposedGrid grid(steps.made.shape, LiveRows(steps.made), args.input(1));
  const TileOutputs out = tile_outputs(steps.second, tile_factors(steps.second));
  const auto& [codes, activation] = args.attributes->as<QuantizeActivationAttributes>();
  const bool lines = tile_scales(codes) == TileScales::lines;
  with_function(activation.function, [&](auto function) {
    constexpr ActivationFunction kFunction = decltype(function)::value;
    launch(args, {tiles_of(grid, grid.columns()), kTileThreads},
           lines ? quantize_activation_kernel<TileScales::lines, kFunction>
                 : quantize_activation_kernel<TileScales::whole, kFunction>,
           ActivationRows(args, 3), grid, out);
  });
}

void quantize_activation_gradient_tiles(const CudaKernelArguments& args) {
  ActivationSteps<CudaKernelArguments> steps(args, &CudaKernelArguments::scratch, true);
  const Shape& dy = args.input(3).shape;
  const Shape parts = tile_sums_shape(dy);
  steps.second.scratch = args.scratch + aligned_bytes(parts, DType::f32);
  const TransposedGrid grid(steps.made.shape, LiveRows(steps.made), args.input(1));
  const TileOutputs out = tile_outputs(steps.second, tile_factors(steps.second));
  const ActivationRows source(args, 4);
  auto* const sums =
      source.weights.weights != nullptr ? reinterpret_cast<float*>(args.scratch) : nullptr;
  const auto& [codes, activation] = args.attributes->as<QuantizeActivationAttributes>();
  with_function(activation.function, [&](auto function) {
    auto* const kernel = select_gradient_tiles<decltype(function)::value>(codes);
    allow_shared_bytes(kernel, sizeof(GradientMemory));
    launch(args, {tiles_of(grid, dy[1]), kTileThreads, sizeof(GradientMemory)}, kernel, source,
           args.in<Bf16>(3), static_cast<int>(dy[1]), grid, out, sums);
  });
  if (sums == nullptr) return;
  const CudaTensor& d_weights = args.outputs.back();
  clear(args, d_weights.data, static_cast<size_t>(d_weights.shape.elements()) * sizeof(float));
  launch(args, {static_cast<unsigned>(std::max<int64_t>(1, ceil_divide(dy[0], 256))), 256},
         add_tile_sums_kernel, sums, parts[1], source.weights, LiveRows(steps.made),
         d_weights.as<float>());
}

template <bool kIsGradient>
void quantize_activation_steps(const CudaKernelArguments& args) {
  const ActivationSteps<CudaKernelArguments> steps(args, &CudaKernelArguments::scratch,
                                                   kIsGradient);
  const DType dtype = steps.made.dtype;
  (kIsGradient ? activation_gradient_cuda_kernel_of
               : activation_cuda_kernel_of)(dtype)(steps.first);
  quantize_cuda_kernel_of(steps.codes.as<QuantizeAttributes>(), steps.made)(steps.second);
}

}  // namespace

CudaKernel quantize_activation_cuda_kernel(const OpView& op) {
  const bool is_gradient = op.op.spec == &kQuantizeActivationGradient;
  if (makes_activation_tiles(op)) {
    return is_gradient ? &quantize_activation_gradient_tiles : &quantize_activation_tiles;
  }
  return is_gradient ? &quantize_activation_steps<true> : &quantize_activation_steps<false>;
}

}  // namespace troupe
