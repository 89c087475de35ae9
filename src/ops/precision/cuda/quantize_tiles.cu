#include "ops/precision/cuda/code_tiles.cuh"
#include "ops/precision/cuda/quantize_tiles.h"

namespace troupe {

using namespace code_tiles;

namespace {

template <class T, __nv_fp8_interpretation_t kFormat, TileScales kScales>
__global__ void __launch_bounds__(kTileThreads, kTileBlocks)
    quantize_tiles_kernel(const T* x, SourceRows source, TransposedGrid grid, TileOutputs out) {
  constexpr int kOwnRows = PacksOf<T>::kOwnRows;
  __shared__ __align__(16) TileMemory memory;
  const TilePlace tile = tile_place(grid, 0, static_cast<int>(grid.columns()));
  if (tile.rows.count == 0 && out.transposed == nullptr) return;
  const int column = tile.first_column + own_column<T>();
  Pack<T> packs[kOwnRows];
#pragma unroll
  for (int i = 0; i < kOwnRows; ++i) {
    const int row = own_row<T>(i);
    const bool is_inside = row < tile.rows.count && column < tile.end_column;
    const int64_t from = is_inside ? source.of(tile.rows.first + row) : -1;
    if (from >= 0) {
      packs[i] = load_pack(x + from * tile.columns + column);
      if constexpr (std::is_same_v<T, float>) {
#pragma unroll
        for (float& value : packs[i].values) value = number_of(value, out.rounds);
      }
    } else {
      packs[i] = zeros<T>();
    }
  }
  quantize_tile<kFormat, kScales>(memory, packs, tile, out);
}

// `has_packs`: rows are whole packs of eight codes.
__global__ void __launch_bounds__(kTileThreads, kTileBlocks)
    transpose_tiles_kernel(const uint8_t* codes, TransposedGrid grid, bool has_packs,
                           uint8_t* out) {
  constexpr int kElements = 8;
  __shared__ __align__(16) TileMemory memory;
  const int64_t block = blockIdx.x;
  const TransposedRows tile = grid.rows_of(block);
  const int64_t columns = grid.columns();
  const int64_t first_column = int64_t{blockIdx.y} * kTile;
  const int within = static_cast<int>(threadIdx.x) % PacksOfCodes::kPacks * kElements;
  const auto left = static_cast<int>(min(columns - first_column - within, int64_t{kElements}));
#pragma unroll
  for (int i = 0; i < PacksOfCodes::kOwnRows; ++i) {
    const int row =
        static_cast<int>(threadIdx.x) / PacksOfCodes::kPacks + i * PacksOfCodes::kRowsAtOnce;
    const uint8_t* const from = codes + (tile.first + row) * columns + first_column + within;
    CodeWords<kElements> words = {};
    if (row < tile.count && left > 0) {
      if (has_packs) {
        words = *reinterpret_cast<const CodeWords<kElements>*>(from);
      } else {
#pragma unroll
        for (int j = 0; j < kElements; ++j) {
          if (j < left) words.words[j / 4] |= uint32_t{from[j]} << 8 * (j % 4);
        }
      }
    }
    *reinterpret_cast<CodeWords<kElements>*>(memory.rows + row * kPitch + within) = words;
  }
  __syncthreads();
  store_columns(memory, static_cast<int>(min(columns - first_column, int64_t{kTile})),
                out + (block * columns + first_column) * kTile);
}

template <class T, __nv_fp8_interpretation_t kFormat>
auto* select_tiles(TileScales scales) {
  switch (scales) {
    case TileScales::lines:
      return &quantize_tiles_kernel<T, kFormat, TileScales::lines>;
    case TileScales::squares:
      return &quantize_tiles_kernel<T, kFormat, TileScales::squares>;
    default:
      return &quantize_tiles_kernel<T, kFormat, TileScales::whole>;
  }
}

template <class T>
void launch_tiles(const CudaKernelArguments& args, const TransposedGrid& grid,
                  const TileOutputs& out) {
  const auto& attributes = args.attributes->as<QuantizeAttributes>();
  const TileScales scales = tile_scales(attributes);
  launch(args, {tiles_of(grid, grid.columns()), kTileThreads},
         attributes.format == DType::f8e4m3 ? select_tiles<T, __NV_E4M3>(scales)
                                            : select_tiles<T, __NV_E5M2>(scales),
         static_cast<const T*>(args.input(0).data), source_rows_of(args), grid, out);
}

}  // namespace

void quantize_tiles(const CudaKernelArguments& args, const float* factors) {
  const CudaTensor x = quantized_tensor(args);
  const TransposedGrid grid(x.shape, LiveRows(x), args.input(1));
  const TileOutputs out = tile_outputs(args, factors);
  if (x.dtype == DType::f32) return launch_tiles<float>(args, grid, out);
  launch_tiles<Bf16>(args, grid, out);
}

void transpose_tiles(const CudaKernelArguments& args) {
  const CudaTensor& codes = args.input(0);
  const TransposedGrid grid(codes.shape, LiveRows(codes), {});
  launch(args, {tiles_of(grid, grid.columns()), kTileThreads}, transpose_tiles_kernel,
         static_cast<const uint8_t*>(codes.data), grid, codes.shape.back() % 8 == 0,
         static_cast<uint8_t*>(args.output(0).data));
}

}  // namespace troupe
