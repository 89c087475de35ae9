#include "ops/cpu/grouped_gemm.h"

namespace troupe {
namespace {

// Rows of a tile: enough to amortise the packing of the group's weight, few enough that a handful
// of groups with uneven loads still make several tiles.
constexpr int64_t kGroupTileRows = 512;

}  // namespace

GemmTiles grouped_tiles(int64_t rows, int64_t outputs, int64_t reduction) {
  return gemm_tiles(std::min(rows, kGroupTileRows), outputs, reduction,
                    (rows + kGroupTileRows - 1) / kGroupTileRows);
}

GemmTiles grouped_weight_gradient_tiles(const Shape& dy, const Shape& x, int64_t groups) {
  GemmTiles tiles = gemm_tiles(dy[1], x[1], std::max<int64_t>(1, dy[0] / groups), groups);
  tiles.tile_k = dy[0];  // one group may have all rows
  return tiles;
}

}  // namespace troupe
