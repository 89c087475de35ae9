// The products of experts on Hopper, in bf16, f16 or of codes in 8 bits, with tensor cores (wgmma)
// fed by TMA. See GroupedProduct for the products and grouped_linear.h for what they are.
//
// The kernel is persistent: a block takes every gridDim.x-th tile of the result. One warp finds
// the tiles from the offsets, tells the others in notes (tile descriptors: GroupedNote), and keeps
// a ring of stages in shared memory filled with operands, 128 bytes deep each; two warpgroups
// multiply them and pass on the results. Every element of the result is computed by one warpgroup
// in a fixed order, so the same operands give the same bits. A box is what one TMA copy moves.
//
// Weight gradients are long results of short products: they take about as long to store as to
// multiply, and longer when they are added to what is there. So a thread for each warpgroup fetches
// that box by box while the tile is multiplied, and stores the boxes while the next one is; the
// warpgroup adds its sums in shared memory. (cp.reduce, which adds in memory, took twice the time
// of reading it.)
//
// Blocks work in pairs where groups have many rows (kPair). A pair's tiles are neighbours in the
// order of tiles, mostly one below the other: then both need the same columns of the right operand,
// the larger part of a stage, of which each loads one half and sends it to both. So a third less
// comes out of the L2 cache, which bounds long products otherwise. Both go through equally many
// stages of equal depth, whether they share or not: a stage is filled anew when both blocks'
// warpgroups have given it back, and a block ends only with the other one. Where the number of
// tiles is odd, one block goes past a tile that is not there.
//
// Tiles do not cross groups, but boxes of rows that are copied do. Where rows are the product's
// rows, the strangers among them only reach rows of the result that are not stored. Where they are
// the depth, they are set to zero in shared memory before they are multiplied: they may be NaN.
//
// Codes are multiplied only with the depth within the rows of both operands, so transposed ones are
// given where a product has it elsewhere (ops/precision/scale_blocks.h): a block of them is a
// stage. Tensor cores sum codes in fewer than 24 bits; so what a stage gives, 128 products a sum,
// is added to sums in fp32 beside it. Therefore tiles are half as wide. Scales are either one of
// each operand and group, by which sums are multiplied in the end, or those of blocks as deep as a
// stage, by which what a stage gives is multiplied: of the left operand one for each row, of the
// right one for 128 columns, or for each column of a weight gradient.
#pragma once

#include <type_traits>

#include "ops/cuda/sm90.cuh"
#include "ops/cuda/tensor_map.h"
#include "ops/experts/grouped_linear/grouped_variant.h"
#include "ops/precision/scale_blocks.h"
#include "program/cuda/device.cuh"

// Hopper's TMA and wgmma exist for the architecture 90a alone. A GPU of compute
// capability 9.0 also runs code for plain 90, where the kernel below would do nothing.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900 && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "Hopper GPUs need TROUPE_CUDA_ARCH=90a, with the a."
#endif

namespace troupe {

// Codes in 8 bits (f8e4m3, f8e5m2), as operands of a product.
struct E4m3 {
  uint8_t code;
};
struct E5m2 {
  uint8_t code;
};

// How the kernel is cut. kPair is the number of blocks in a cluster, 1 or 2, and Out the type of
// the result: Bf16, F16 of operands of that, or float for weight gradients. Left and Right: of the
// operands, Bf16 both, F16 both, or codes both. Of codes the right operand of both gradients is
// transposed, and the left one of the weight gradient. kBlockScales: of codes, as above.
template <GroupedProduct kProduct_, int kPair_, class Out_, class Left_ = Bf16, class Right_ = Bf16,
          bool kBlockScales_ = false>
struct GroupedCut {
  static constexpr GroupedProduct kProduct = kProduct_;
  static constexpr int kPair = kPair_;
  using Out = Out_;
  using Left = Left_;
  using Right = Right_;
  static constexpr bool kCodes = sizeof(Left) == 1;
  static constexpr bool kDepthGrouped = kProduct == GroupedProduct::weight_gradient;
  static constexpr bool kLeftRowsFirst = kDepthGrouped && !kCodes;
  static constexpr bool kRightColumnsFirst = kProduct != GroupedProduct::forward && !kCodes;
  static_assert(kDepthGrouped || std::is_same_v<Out, std::conditional_t<kCodes, Bf16, Left>>);
  static_assert(!kDepthGrouped || std::is_same_v<Out, Bf16> || std::is_same_v<Out, float>);
  static_assert(sizeof(Left) == sizeof(Right));
  static constexpr bool kLeftTransposed = kDepthGrouped && kCodes;
  static constexpr bool kRightTransposed = kProduct != GroupedProduct::forward && kCodes;
  static constexpr bool kBlockScales = kBlockScales_;
  static_assert(!kBlockScales || kCodes);

  static constexpr int kTileRows = 128;
  static constexpr int kTileColumns = kCodes ? 128 : 256;
  static constexpr int kStages = kCodes ? (kDepthGrouped ? 4 : 6) : (kDepthGrouped ? 3 : 4);
  static constexpr int kDepthBytes = 128;  // of a stage
  static constexpr int kDepth = kDepthBytes / static_cast<int>(sizeof(Left));
  static constexpr int kBoxBytes = 64 * kDepthBytes;
  static constexpr int kLeftBytes = kTileRows * kDepthBytes;
  static constexpr int kRightBytes = kTileColumns * kDepthBytes;
  static constexpr int kStageBytes = kLeftBytes + kRightBytes;

  static constexpr int kWarpgroups = 2;
  // Of a stage by a warpgroup. With codes nothing lies between a stage's last product and its
  // release, so each warp gives back what it has read.
  static constexpr int kReleases = kCodes ? 4 : 1;
  static constexpr int kThreads = (1 + kWarpgroups) * 128;
  // What setmaxnreg makes of the 168 registers that each thread begins with.
  static constexpr int kLoaderRegisters = 56;
  static constexpr int kMathRegisters = 224;

  // Results leave in boxes of 64 rows of 128 bytes, of which each warpgroup has some.
  static constexpr int kBoxColumns = 128 / static_cast<int>(sizeof(Out));
  static constexpr int kBoxes = kDepthGrouped ? 5 : 2;

  // Scales of a stage of a weight gradient, for each row and each column of the tile.
  static constexpr bool kLoadsScales = kBlockScales && kDepthGrouped;
  static constexpr int kScaleBytes = kLoadsScales ? (kTileRows + kTileColumns) * 4 : 0;

  // Shared memory: stages, boxes of results, scales, barriers, notes, places of boxes.
  static constexpr int kNotes = 4;
  static constexpr int kNoteBytes = 32;
  static constexpr int kBoxesAt = kStages * kStageBytes;
  static constexpr int kScalesAt = kBoxesAt + kWarpgroups * kBoxes * kBoxBytes;
  static constexpr int kBarriersAt = kScalesAt + kStages * kScaleBytes;
  static constexpr int kBarriers = 2 * (kStages + kNotes + kWarpgroups * kBoxes);
  static constexpr int kNotesAt = kBarriersAt + 8 * kBarriers;
  static constexpr int kPlacesAt = kNotesAt + kNotes * kNoteBytes;
  static constexpr int kSharedBytes = kPlacesAt + kWarpgroups * kBoxes * 16 + 1024;  // to align it
  static_assert(kSharedBytes <= 232448 && kNotesAt % 16 == 0);
};

struct GroupedSizes {
  const int32_t* offsets = nullptr;  // [groups + 1]
  int32_t groups = 0;
  int32_t rows = 0;         // M, of the weight gradient; otherwise the groups have them
  int32_t columns = 0;      // N
  int32_t depth = 0;        // K, but of the weight gradient
  int32_t panel = 0;        // about as many tiles of rows are swept together over all columns
  bool accumulate = false;  // the weight gradient is added to what is there
  void* out = nullptr;
  // Of codes: one of each group, or of blocks [rows or blocks, depth blocks or columns].
  const float* left_scales = nullptr;
  const float* right_scales = nullptr;
  int32_t left_rows = 0;       // of the left operand, in all groups
  const Bf16* bias = nullptr;  // of codes: [columns], added to each row; nullptr: none
};

// What the multiplying warpgroups are told of a tile.
struct GroupedNote {
  int32_t group;  // -1: there are no more
  int32_t row;    // first row of the result; counted within the group for weight gradients
  int32_t rows;   // of the tile that are stored, at most kTileRows
  int32_t column;
  int32_t blocks;       // stages of depth, at least one
  int32_t last_depth;   // elements of the last one that count; 0: there is no depth at all
  int32_t first_block;  // number of the first stage, counted from the start of the kernel
  int32_t depth_begin;  // first element of depth
  bool shared_right;    // the other block of the pair has the same columns of the same group
};

// Finds tiles by their numbers, which must not decrease. All lanes of a warp together.
template <class Cut>
class GroupedTiles {
 public:
  __device__ explicit GroupedTiles(const GroupedSizes& sizes)
      : sizes_(sizes), column_tiles_(ceil_of(sizes.columns, Cut::kTileColumns)) {
    load();
  }

  // `rank`: of the block in its pair, which has a number of the same parity. first_block is left to
  // the caller.
  __device__ GroupedNote find(int32_t tile, int32_t rank) {
    while (tile >= through_ && window_ + 32 < sizes_.groups) {
      window_ += 32;
      load();
    }
    GroupedNote note{};
    note.group = -1;
    if (tile >= through_) {
      // Beside the very last tile, the other block of the pair goes through the motions.
      if (tile - rank >= through_) return note;
      note.group = 0;
      set_depth(note, 0, sizes_.depth);
      return note;
    }
    const uint32_t finder =
        __ballot_sync(0xffffffffU, tile >= lane_start_ && tile < lane_start_ + lane_tiles_);
    const int lane = __ffs(static_cast<int>(finder)) - 1;
    const int32_t begin = __shfl_sync(0xffffffffU, lane_begin_, lane);
    const int32_t count = __shfl_sync(0xffffffffU, lane_rows_, lane);
    const int32_t within = tile - __shfl_sync(0xffffffffU, lane_start_, lane);
    note.group = window_ + lane;

    const int32_t rows = Cut::kDepthGrouped ? sizes_.rows : count;
    const int32_t row_tiles = ceil_of(rows, Cut::kTileRows);
    const int32_t panels = max((row_tiles + sizes_.panel / 2) / sizes_.panel, 1);
    const int32_t most = ceil_of(row_tiles, panels);  // tiles of rows, of each but the last
    const int32_t panel = within / (most * column_tiles_);
    const int32_t in_panel = within - panel * most * column_tiles_;
    const int32_t height = min(most, row_tiles - panel * most);
    if (height > 0) {  // it is not where an odd number of tiles was made even
      const int32_t column_tile = in_panel / height;
      const int32_t in_column = in_panel - column_tile * height;
      const int32_t row = (panel * most + in_column) * Cut::kTileRows;
      note.column = column_tile * Cut::kTileColumns;
      note.row = Cut::kDepthGrouped ? row : begin + row;
      note.rows = min(rows - row, Cut::kTileRows);
      note.shared_right = Cut::kPair == 2 && (rank == 0 ? in_column + 1 < height : in_column > 0);
    }
    if constexpr (Cut::kLeftTransposed) {
      constexpr int32_t kRows = kTransposedRows;
      set_depth(note, (begin / kRows + note.group) * kRows, ceil_of(count, kRows) * kRows);
    } else if constexpr (Cut::kDepthGrouped) {
      set_depth(note, begin, count);
    } else {
      set_depth(note, 0, sizes_.depth);
    }
    return note;
  }

 private:
  __device__ static int32_t ceil_of(int32_t a, int32_t b) { return (a + b - 1) / b; }

  __device__ static void set_depth(GroupedNote& note, int32_t begin, int32_t depth) {
    note.depth_begin = begin;
    note.blocks = max(ceil_of(depth, Cut::kDepth), 1);
    note.last_depth = depth - (note.blocks - 1) * Cut::kDepth;
  }

  // The window of 32 groups that begins at window_.
  __device__ void load() {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int32_t group = window_ + lane;
    const bool exists = group < sizes_.groups;
    lane_begin_ = exists ? sizes_.offsets[group] : 0;
    lane_rows_ = exists ? sizes_.offsets[group + 1] - lane_begin_ : 0;
    if constexpr (Cut::kDepthGrouped) {
      const bool counts = exists && (lane_rows_ > 0 || !sizes_.accumulate);
      const int32_t tiles = ceil_of(sizes_.rows, Cut::kTileRows) * column_tiles_;
      lane_tiles_ = counts ? ceil_of(tiles, Cut::kPair) * Cut::kPair : 0;
    } else {
      lane_tiles_ = ceil_of(lane_rows_, Cut::kTileRows) * column_tiles_;
    }
    int32_t sum = lane_tiles_;
#pragma unroll
    for (int width = 1; width < 32; width *= 2) {
      const int32_t other = __shfl_up_sync(0xffffffffU, sum, static_cast<unsigned>(width));
      if (lane >= width) sum += other;
    }
    lane_start_ = through_ + sum - lane_tiles_;
    through_ += __shfl_sync(0xffffffffU, sum, 31);
  }

  const GroupedSizes& sizes_;
  int32_t column_tiles_;
  int32_t window_ = 0;
  int32_t through_ = 0;  // tiles of all groups up to the window's end
  int32_t lane_begin_ = 0;
  int32_t lane_rows_ = 0;
  int32_t lane_tiles_ = 0;
  int32_t lane_start_ = 0;
};

// Where things lie in shared memory.
template <class Cut>
struct GroupedShared {
  uint32_t base;

  __device__ uint32_t left(int stage) const { return base + stage * Cut::kStageBytes; }
  __device__ uint32_t right(int stage) const { return left(stage) + Cut::kLeftBytes; }
  __device__ uint32_t box(int warpgroup, int i) const {
    return base + Cut::kBoxesAt + (warpgroup * Cut::kBoxes + i) * Cut::kBoxBytes;
  }
  __device__ uint32_t left_scales(int stage) const {
    return base + Cut::kScalesAt + stage * Cut::kScaleBytes;
  }
  __device__ uint32_t right_scales(int stage) const {
    return left_scales(stage) + Cut::kTileRows * 4;
  }
  __device__ uint32_t full(int stage) const { return base + Cut::kBarriersAt + 8 * stage; }
  __device__ uint32_t empty(int stage) const { return full(Cut::kStages + stage); }
  __device__ uint32_t note_full(int i) const { return full(2 * Cut::kStages + i); }
  __device__ uint32_t note_empty(int i) const { return note_full(Cut::kNotes + i); }
  __device__ uint32_t box_open(int warpgroup, int i) const {
    return note_empty(Cut::kNotes + warpgroup * Cut::kBoxes + i);
  }
  __device__ uint32_t box_ready(int warpgroup, int i) const {
    return box_open(Cut::kWarpgroups + warpgroup, i);
  }
  __device__ uint32_t note(int i) const { return base + Cut::kNotesAt + i * Cut::kNoteBytes; }
  __device__ uint32_t box_place(int warpgroup, int i) const {
    return base + Cut::kPlacesAt + (warpgroup * Cut::kBoxes + i) * 16;
  }
};

// Of the transposed right operand, the block that holds this depth.
template <class Cut>
__device__ __forceinline__ int32_t right_block(const GroupedNote& note, const GroupedSizes& sizes,
                                               int32_t depth) {
  const int32_t block = depth / kTransposedRows;
  if constexpr (Cut::kDepthGrouped) return block;
  return note.group * ((sizes.depth + kTransposedRows - 1) / kTransposedRows) + block;
}

// Announces a stage of a weight gradient, and loads its scales.
template <class Cut>
__device__ __forceinline__ void load_stage_scales(const GroupedNote& note,
                                                  const GroupedSizes& sizes,
                                                  const GroupedShared<Cut>& shared, int stage,
                                                  int32_t block) {
  const uint32_t full = shared.full(stage);
  const auto left = static_cast<uint32_t>(min(sizes.rows - note.row, Cut::kTileRows)) * 4;
  const auto right = static_cast<uint32_t>(min(sizes.columns - note.column, Cut::kTileColumns)) * 4;
  sm90::barrier_arrive_expecting(full, Cut::kStageBytes + left + right);
  sm90::load_bytes(full, shared.left_scales(stage),
                   sizes.left_scales + int64_t{block} * sizes.rows + note.row, left);
  sm90::load_bytes(full, shared.right_scales(stage),
                   sizes.right_scales + int64_t{block} * sizes.columns + note.column, right);
}

// The loading warp.
template <class Cut>
__device__ __forceinline__ void load_grouped_tiles(const CUtensorMap& left_map,
                                                   const CUtensorMap& right_map,
                                                   const GroupedSizes& sizes,
                                                   const GroupedShared<Cut>& shared) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int32_t rank = Cut::kPair == 2 ? static_cast<int32_t>(sm90::cluster_rank()) : 0;
  GroupedTiles<Cut> tiles(sizes);
  sm90::RingPlace<Cut::kStages> place;
  int32_t blocks = 0;
  for (uint32_t number = 0;; ++number) {
    GroupedNote note = tiles.find(static_cast<int32_t>(number * gridDim.x + blockIdx.x), rank);
    note.first_block = blocks;
    const int slot = static_cast<int>(number % Cut::kNotes);
    sm90::barrier_wait(shared.note_empty(slot), (number / Cut::kNotes & 1) ^ 1);
    __syncwarp();
    if (lane == 0) {
      sm90::store_shared(shared.note(slot),
                         make_int4(note.group, note.row, note.rows, note.column));
      sm90::store_shared(shared.note(slot) + 16,
                         make_int4(note.blocks, note.last_depth, note.first_block, 0));
      sm90::barrier_arrive(shared.note_full(slot));
    }
    if (note.group < 0) break;
    if (lane == 0) {
      const bool loads = note.rows > 0 && note.last_depth > 0;
      for (int32_t i = 0; i < note.blocks; ++i) {
        const int stage = place.stage;
        sm90::barrier_wait(shared.empty(stage), place.parity ^ 1);
        place.advance();
        const uint32_t full = shared.full(stage);
        if (!loads) {
          sm90::barrier_arrive(full);
          continue;
        }
        const int32_t depth = note.depth_begin + i * Cut::kDepth;
        if constexpr (Cut::kLoadsScales) {
          load_stage_scales(note, sizes, shared, stage, depth / kTransposedRows);
        } else {
          sm90::barrier_arrive_expecting(full, Cut::kStageBytes);
        }
        if constexpr (Cut::kLeftTransposed) {
          sm90::load_tile(left_map, full, shared.left(stage), 0, note.row, depth / kTransposedRows);
        } else if constexpr (Cut::kLeftRowsFirst) {
#pragma unroll
          for (int box = 0; box < Cut::kTileRows / 64; ++box) {
            sm90::load_tile(left_map, full, shared.left(stage) + box * Cut::kBoxBytes,
                            note.row + box * 64, depth, 0);
          }
        } else {
          sm90::load_tile(left_map, full, shared.left(stage), depth, note.row, 0);
        }
        // A right operand that the pair shares comes in two halves, of which each block loads one
        // for both.
        const int32_t matrix = Cut::kRightTransposed ? right_block<Cut>(note, sizes, depth)
                               : Cut::kDepthGrouped  ? 0
                                                     : note.group;
        const auto load_right = [&](uint32_t to, int32_t x, int32_t y) {
          if (Cut::kPair == 2 && note.shared_right) {
            sm90::load_tile_to(3, right_map, full, to, x, y, matrix);
          } else {
            sm90::load_tile(right_map, full, to, x, y, matrix);
          }
        };
#pragma unroll
        for (int part = 0; part < Cut::kPair; ++part) {
          if (Cut::kPair == 2 && note.shared_right && part != rank) continue;
          constexpr int kPartColumns = Cut::kTileColumns / Cut::kPair;
          const uint32_t to = shared.right(stage) + part * (Cut::kRightBytes / Cut::kPair);
          const int32_t column = note.column + part * kPartColumns;
          if constexpr (Cut::kRightColumnsFirst) {
#pragma unroll
            for (int box = 0; box < kPartColumns / 64; ++box) {
              load_right(to + box * Cut::kBoxBytes, column + box * 64, depth);
            }
          } else {
            load_right(to, Cut::kRightTransposed ? 0 : depth, column);
          }
        }
      }
    }
    blocks += note.blocks;
    __syncwarp();
  }
}

// The thread that serves the boxes of a warpgroup, of weight gradients. It opens one box after the
// other for the results: fetches what they are added to, long before they are there, or only says
// that the box is free. When the results are ready it stores them, and opens the box again once
// they have been read.
template <class Cut>
class GroupedBoxes {
 public:
  __device__ GroupedBoxes(const CUtensorMap& out_map, const GroupedSizes& sizes,
                          const GroupedShared<Cut>& shared, int warpgroup)
      : out_map_(out_map), sizes_(sizes), shared_(shared), warpgroup_(warpgroup) {}

  __device__ void run() {
    // It never waits for a tile with boxes open that the warpgroup cannot fill: what has been
    // opened leads through all tiles before that one.
    uint32_t opened = 0;
    while (opened < Cut::kBoxes && open(opened)) ++opened;
    bool more = opened == Cut::kBoxes;
    for (uint32_t stored = 0; stored < opened; ++stored) {
      store(stored);
      if (stored == 0) continue;
      sm90::wait_stores_read<1>();  // the box before this one can be used again
      more = more && open(opened);
      if (more) ++opened;
    }
    sm90::wait_stores();
  }

 private:
  // Opens the box of a use; false when there are no more tiles.
  __device__ bool open(uint32_t use) {
    while (column_ >= columns_end_) {
      if (!next_tile()) return false;
    }
    const int i = static_cast<int>(use % Cut::kBoxes);
    const uint32_t barrier = shared_.box_open(warpgroup_, i);
    sm90::store_shared(shared_.box_place(warpgroup_, i), make_int4(column_, row_, group_, 0));
    if (sizes_.accumulate) {
      sm90::barrier_arrive_expecting(barrier, Cut::kBoxBytes);
      sm90::load_tile(out_map_, barrier, shared_.box(warpgroup_, i), column_, row_, group_);
    } else {
      sm90::barrier_arrive(barrier);
    }
    column_ += Cut::kBoxColumns;
    return true;
  }

  // Stores the box of a use when it is ready.
  __device__ void store(uint32_t use) {
    const int i = static_cast<int>(use % Cut::kBoxes);
    sm90::barrier_wait(shared_.box_ready(warpgroup_, i), use / Cut::kBoxes & 1);
    const int4 place = sm90::load_shared(shared_.box_place(warpgroup_, i));
    sm90::store_tile(out_map_, shared_.box(warpgroup_, i), place.x, place.y, place.z);
    sm90::commit_stores();
  }

  // Goes to the next tile, in which there may be no boxes; false when there is none.
  __device__ bool next_tile() {
    const int slot = static_cast<int>(number_ % Cut::kNotes);
    sm90::barrier_wait(shared_.note_full(slot), number_ / Cut::kNotes & 1);
    const int4 place = sm90::load_shared(shared_.note(slot));
    const int4 depth = sm90::load_shared(shared_.note(slot) + 16);
    if (place.x < 0) return false;
    sm90::barrier_arrive(shared_.note_empty(slot));
    ++number_;
    group_ = place.x;
    row_ = place.y + warpgroup_ * 64;
    column_ = place.w;
    const bool boxes = place.z > warpgroup_ * 64 && depth.y > 0;
    columns_end_ = boxes ? min(column_ + Cut::kTileColumns, sizes_.columns) : column_;
    return true;
  }

  const CUtensorMap& out_map_;
  const GroupedSizes& sizes_;
  const GroupedShared<Cut>& shared_;
  int warpgroup_;
  uint32_t number_ = 0;  // of the next tile
  // The next box to be opened.
  int32_t group_ = 0;
  int32_t row_ = 0;
  int32_t column_ = 0;
  int32_t columns_end_ = 0;  // of the tile; none are left when column_ is there
};

// What a multiplying warpgroup computes: 64 rows from `row` on of a group's result. Depth as in
// GroupedNote.
struct GroupedTile {
  int32_t group;
  int32_t row;
  int32_t column;
  int32_t blocks;
  int32_t last_depth;
};

// A multiplying warpgroup.
template <class Cut>
class GroupedMath {
 public:
  __device__ GroupedMath(const CUtensorMap& out_map, const GroupedSizes& sizes,
                         const GroupedShared<Cut>& shared, int warpgroup)
      : out_map_(out_map),
        sizes_(sizes),
        shared_(shared),
        warpgroup_(warpgroup),
        thread_(static_cast<int>(threadIdx.x) % 128) {}

  __device__ __forceinline__ void run() {
    Sums sums;
#pragma unroll
    for (float& sum : sums) sum = 0;
    for (uint32_t number = 0;; ++number) {
      const int slot = static_cast<int>(number % Cut::kNotes);
      sm90::barrier_wait(shared_.note_full(slot), number / Cut::kNotes & 1);
      const int4 place = sm90::load_shared(shared_.note(slot));
      const int4 depth = sm90::load_shared(shared_.note(slot) + 16);
      if (place.x < 0) break;
      sm90::named_barrier(kOwnBarrier + warpgroup_, 128);  // all have read it
      if (thread_ == 0) sm90::barrier_arrive(shared_.note_empty(slot));

      const int32_t row = place.y + warpgroup_ * 64;
      const int32_t rows = place.z - warpgroup_ * 64;
      ring_.move_to(static_cast<uint32_t>(depth.z));
      if (rows <= 0 || depth.y == 0) {
        pass(depth.x, depth.y);
      } else {
        multiply(sums, {place.x, row, place.w, depth.x, depth.y});
      }
      if (rows <= 0) continue;
      if (Cut::kDepthGrouped && depth.y == 0) {
        store_zeros(place.x, row, rows, place.w);
        continue;
      }
      if constexpr (Cut::kDepthGrouped) {
        fill_boxes(sums, place.w);
      } else {
        store(sums, row, rows, place.w);
      }
    }
    if (!Cut::kDepthGrouped && thread_ == 0) sm90::wait_stores();
  }

 private:
  using Sums = float[Cut::kTileColumns / 2];
  static constexpr int kOwnBarrier = 1;   // and the next: of a warpgroup
  static constexpr int kBothBarrier = 3;  // of both

  // Gives a stage back to the loader that fills it.
  __device__ __forceinline__ void release(int stage) {
    const int of_release = thread_ % (128 / Cut::kReleases);
    if constexpr (Cut::kPair == 2) {
      if (of_release < 2) sm90::barrier_arrive_at(shared_.empty(stage), of_release);
    } else {
      if (of_release == 0) sm90::barrier_arrive(shared_.empty(stage));
    }
  }

  // Sets what lies beyond `depth` in a stage to zero, as far as it is going to be multiplied.
  __device__ __forceinline__ void clear_beyond(int stage, int32_t depth) {
    const int32_t rows = (16 - depth % 16) % 16;  // of 128 bytes, in each box
    constexpr int kBoth = Cut::kWarpgroups * 128;
    const int first = warpgroup_ * 128 + thread_;
    for (int i = first; i < rows * 8 * (Cut::kStageBytes / Cut::kBoxBytes); i += kBoth) {
      const int box = i / (rows * 8);
      const int within = i - box * rows * 8;
      sm90::store_shared(shared_.left(stage) + box * Cut::kBoxBytes + depth * 128 + within * 16,
                         make_int4(0, 0, 0, 0));
    }
    sm90::fence_copies();
    sm90::named_barrier(kBothBarrier, kBoth);
  }

  // Goes past a tile of which this warpgroup has nothing to compute.
  __device__ __forceinline__ void pass(int32_t blocks, int32_t last_depth) {
    for (int32_t i = 0; i < blocks; ++i) {
      sm90::barrier_wait(shared_.full(ring_.stage), ring_.parity);
      if (Cut::kLeftRowsFirst && i == blocks - 1 && last_depth % 16 != 0) {
        clear_beyond(ring_.stage, last_depth);
      }
      // A warp that came late might otherwise wait for a phase that is long over.
      sm90::named_barrier(kOwnBarrier + warpgroup_, 128);
      release(ring_.stage);
      ring_.advance();
    }
  }

  // Adds products of `steps` times 16 elements of depth.
  template <bool kWhole>
  __device__ __forceinline__ void multiply_stage(Sums& sums, int steps, int& add) {
    constexpr uint32_t kLeftStep = (Cut::kLeftRowsFirst ? 2048 : 32) >> 4;
    constexpr uint32_t kRightStep = (Cut::kRightColumnsFirst ? 2048 : 32) >> 4;
    const uint32_t left_at = shared_.left(ring_.stage) + warpgroup_ * Cut::kBoxBytes;
    const uint64_t left =
        sm90::matrix_descriptor(left_at, Cut::kLeftRowsFirst ? Cut::kBoxBytes : 16);
    const uint64_t right = sm90::matrix_descriptor(shared_.right(ring_.stage),
                                                   Cut::kRightColumnsFirst ? Cut::kBoxBytes : 16);
    if constexpr (kWhole) sm90::fence_products();
#pragma unroll
    for (int step = 0; step < Cut::kDepth / 16; ++step) {
      if constexpr (!kWhole) {
        if (step >= steps) break;
        sm90::fence_products();
      }
      sm90::multiply_add<Cut::kTileColumns, Cut::kLeftRowsFirst, Cut::kRightColumnsFirst,
                         typename Cut::Left>(sums, left + step * kLeftStep,
                                             right + step * kRightStep, add);
      add = 1;
    }
    sm90::commit_products();
  }

  // Begins the products of a stage of codes.
  __device__ __forceinline__ void begin_codes(Sums& of_stage) {
    const uint64_t left =
        sm90::matrix_descriptor(shared_.left(ring_.stage) + warpgroup_ * Cut::kBoxBytes, 16);
    const uint64_t right = sm90::matrix_descriptor(shared_.right(ring_.stage), 16);
    sm90::order_sums(of_stage);
    sm90::fence_products();
#pragma unroll
    for (int step = 0; step < Cut::kDepthBytes / 32; ++step) {
      sm90::multiply_add_codes<std::is_same_v<typename Cut::Left, E5m2>>(
          of_stage, left + step * 2, right + step * 2, step > 0 ? 1 : 0);
    }
    sm90::commit_products();
  }

  __device__ __forceinline__ void finish_stage(Sums& of_stage) {
    sm90::wait_products<0>();
    sm90::order_sums(of_stage);
    release(ring_.stage);
    ring_.advance();
  }

  // The stages of codes: each is multiplied by itself, and added, with its scales where it has
  // some.
  __device__ __forceinline__ void multiply_codes(Sums& sums, const GroupedTile& tile) {
#pragma unroll
    for (float& sum : sums) sum = 0;
    Sums of_stage;
#pragma unroll
    for (float& sum : of_stage) sum = 0;
    if constexpr (Cut::kLoadsScales) {
      add_column_scaled(sums, of_stage, tile.blocks);
    } else if constexpr (Cut::kBlockScales) {
      add_row_scaled(sums, of_stage, tile);
    } else {
      for (int32_t i = 0; i < tile.blocks; ++i) {
        sm90::barrier_wait(shared_.full(ring_.stage), ring_.parity);
        begin_codes(of_stage);
        finish_stage(of_stage);
#pragma unroll
        for (int j = 0; j < Cut::kTileColumns / 2; ++j) sums[j] += of_stage[j];
      }
    }
  }

  // Of each stage a scale for each row, and one for the columns; both are read a stage ahead.
  __device__ __forceinline__ void add_row_scaled(Sums& sums, Sums& of_stage,
                                                 const GroupedTile& tile) {
    const int32_t stages = tile.blocks;
    const int32_t row = tile.row + thread_ / 32 * 16 + thread_ % 32 / 4;
    const int32_t last = sizes_.left_rows - 1;
    const float* const upper = sizes_.left_scales + int64_t{min(row, last)} * stages;
    const float* const lower = sizes_.left_scales + int64_t{min(row + 8, last)} * stages;
    // Of a weight [N, K] in squares; the depth is K of a forward product, and N of a gradient.
    const int32_t squares = (sizes_.columns + kTransposedRows - 1) / kTransposedRows;
    const int32_t square = tile.column / kTransposedRows;
    const float* right = sizes_.right_scales + int64_t{tile.group} * squares * stages;
    const int32_t step = Cut::kRightTransposed ? squares : 1;
    right += Cut::kRightTransposed ? square : square * stages;
    float next_upper = upper[0];
    float next_lower = lower[0];
    float next_right = right[0];
    for (int32_t i = 0; i < stages; ++i) {
      const float scale_upper = next_upper * next_right;
      const float scale_lower = next_lower * next_right;
      sm90::barrier_wait(shared_.full(ring_.stage), ring_.parity);
      begin_codes(of_stage);
      const int32_t next = min(i + 1, stages - 1);
      next_upper = upper[next];
      next_lower = lower[next];
      next_right = right[next * step];
      finish_stage(of_stage);
#pragma unroll
      for (int j = 0; j < Cut::kTileColumns / 2; ++j) {
        sums[j] += of_stage[j] * (j % 4 < 2 ? scale_upper : scale_lower);
      }
    }
  }

  // Of each stage a scale for each row and each column.
  __device__ __forceinline__ void add_column_scaled(Sums& sums, Sums& of_stage, int32_t stages) {
    const int lane = thread_ % 32;
    const int row = warpgroup_ * 64 + thread_ / 32 * 16 + lane / 4;
    for (int32_t i = 0; i < stages; ++i) {
      sm90::barrier_wait(shared_.full(ring_.stage), ring_.parity);
      begin_codes(of_stage);
      const uint32_t left = shared_.left_scales(ring_.stage);
      const uint32_t right = shared_.right_scales(ring_.stage) + lane % 4 * 8;
      const float upper = __uint_as_float(sm90::load_shared_word(left + row * 4));
      const float lower = __uint_as_float(sm90::load_shared_word(left + row * 4 + 32));
      float2 of_columns[Cut::kTileColumns / 8];
#pragma unroll
      for (int j = 0; j < Cut::kTileColumns / 8; ++j) {
        of_columns[j] = sm90::load_shared_pair(right + j * 32);
      }
      finish_stage(of_stage);
#pragma unroll
      for (int j = 0; j < Cut::kTileColumns / 2; ++j) {
        const float2 pair = of_columns[j / 4];
        sums[j] += of_stage[j] * ((j % 4 < 2 ? upper : lower) * (j % 2 == 0 ? pair.x : pair.y));
      }
    }
  }

  // The scales of a group, where it has one of each operand, and a bias.
  __device__ __forceinline__ void finish_codes(Sums& sums, const GroupedTile& tile) {
    if constexpr (!Cut::kBlockScales) {
      const float scale = sizes_.left_scales[tile.group] * sizes_.right_scales[tile.group];
#pragma unroll
      for (float& sum : sums) sum *= scale;
    }
    if (sizes_.bias == nullptr) return;
#pragma unroll
    for (int i = 0; i < Cut::kTileColumns / 2; ++i) {
      const int32_t at = tile.column + i / 4 * 8 + thread_ % 4 * 2 + i % 2;
      if (at < sizes_.columns) sums[i] += __bfloat162float(sizes_.bias[at]);
    }
  }

  __device__ __forceinline__ void multiply(Sums& sums, const GroupedTile& tile) {
    if constexpr (Cut::kCodes) {
      multiply_codes(sums, tile);
      finish_codes(sums, tile);
    } else {
      multiply_numbers(sums, tile.blocks, tile.last_depth);
    }
  }

  __device__ __forceinline__ void multiply_numbers(Sums& sums, int32_t blocks, int32_t last_depth) {
    int add = 0;
    int last_stage = -1;
    // A stage is given back when the next one's products have been handed to the tensor cores.
    const auto finish_last = [&] {
      if (last_stage >= 0) {
        sm90::wait_products<1>();
        release(last_stage);
      }
      last_stage = ring_.stage;
      ring_.advance();
    };
    const int32_t whole = Cut::kDepthGrouped ? blocks - 1 : blocks;
    for (int32_t i = 0; i < whole; ++i) {
      sm90::barrier_wait(shared_.full(ring_.stage), ring_.parity);
      multiply_stage<true>(sums, 4, add);
      finish_last();
    }
    if constexpr (Cut::kDepthGrouped) {
      sm90::barrier_wait(shared_.full(ring_.stage), ring_.parity);
      if (last_depth % 16 != 0) clear_beyond(ring_.stage, last_depth);
      multiply_stage<false>(sums, (last_depth + 15) / 16, add);
      finish_last();
    }
    sm90::wait_products<0>();
    release(last_stage);
  }

  // Hands the sums of a weight gradient over, box by box as they open.
  __device__ __forceinline__ void fill_boxes(const Sums& sums, int32_t column) {
    constexpr int kSums = Cut::kBoxColumns / 2;  // of a thread, in a box
#pragma unroll
    for (int i = 0; i < Cut::kTileColumns / Cut::kBoxColumns; ++i) {
      if (column + i * Cut::kBoxColumns >= sizes_.columns) continue;
      float own[kSums];
#pragma unroll
      for (int j = 0; j < kSums; ++j) own[j] = sums[i * kSums + j];
      sm90::barrier_wait(shared_.box_open(warpgroup_, boxes_.stage), boxes_.parity);
      const uint32_t box = shared_.box(warpgroup_, boxes_.stage);
      if (sizes_.accumulate) add_held(own, box);
      put(own, box);
      sm90::fence_copies();
      __syncwarp();
      if (thread_ % 32 == 0) sm90::barrier_arrive(shared_.box_ready(warpgroup_, boxes_.stage));
      boxes_.advance();
    }
  }

  // The sums of 64 rows from `row` on, of which `rows` are stored, leave box by box.
  __device__ __forceinline__ void store(const Sums& sums, int32_t row, int32_t rows,
                                        int32_t column) {
    constexpr int kSums = Cut::kBoxColumns / 2;  // of a thread, in a box
#pragma unroll
    for (int i = 0; i < Cut::kTileColumns / Cut::kBoxColumns; ++i) {
      const int32_t first = column + i * Cut::kBoxColumns;
      if (first >= sizes_.columns) continue;
      const uint32_t box = shared_.box(warpgroup_, boxes_.stage);
      boxes_.advance();
      if (thread_ == 0) sm90::wait_stores_read<Cut::kBoxes - 1>();
      sm90::named_barrier(kOwnBarrier + warpgroup_, 128);
      float own[kSums];
#pragma unroll
      for (int j = 0; j < kSums; ++j) own[j] = sums[i * kSums + j];
      put(own, box);
      // A copy stops at the end of the tensor, but not at that of a group.
      const bool whole = rows >= 64;
      if (whole) sm90::fence_copies();
      sm90::named_barrier(kOwnBarrier + warpgroup_, 128);
      if (thread_ == 0 && whole) sm90::store_tile(out_map_, box, first, row, 0);
      if (thread_ == 0) sm90::commit_stores();  // of nothing, too: they are counted
      if (!whole) store_rows(box, row, rows, first);
    }
  }

  // Two sums rounded to a result of 2 bytes.
  __device__ static uint32_t pair_of(float a, float b) {
    if constexpr (std::is_same_v<typename Cut::Out, F16>) {
      const __half2 pair = __floats2half2_rn(a, b);
      return *reinterpret_cast<const uint32_t*>(&pair);
    } else {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
      return *reinterpret_cast<const uint32_t*>(&pair);
    }
  }

  // Writes this thread's sums of a box to shared memory, swizzled.
  __device__ __forceinline__ void put(const float (&sums)[32], uint32_t box) {
    const int lane = thread_ % 32;
    const int row = thread_ / 32 * 16 + lane % 16;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint32_t pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        pairs[i] = pair_of(sums[j * 8 + i * 2], sums[j * 8 + i * 2 + 1]);
      }
      const int chunk = (j * 2 + lane / 16) ^ (row % 8);
      sm90::store_matrices(box + row * 128 + chunk * 16, pairs);
    }
  }
  // In fp32, lanes of odd rows take the other half of a box first: so half a warp, whose 16 places
  // of 8 bytes lie in four rows, meets every bank once.
  __device__ __forceinline__ void put(const float (&sums)[16], uint32_t box) {
    const bool odd = thread_ / 4 % 2 != 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int even_at = i % 4 * 4 + i / 4 * 2;
      const int odd_at = even_at ^ 8;
      sm90::store_shared(wide_place(box, i, odd),
                         make_float2(odd ? sums[odd_at] : sums[even_at],
                                     odd ? sums[odd_at + 1] : sums[even_at + 1]));
    }
  }

  // Adds what a box holds to this thread's sums.
  __device__ __forceinline__ void add_held(float (&sums)[16], uint32_t box) {
    const bool odd = thread_ / 4 % 2 != 0;
    float2 held[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) held[i] = sm90::load_shared_pair(wide_place(box, i, odd));
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      sums[i % 4 * 4 + i / 4 * 2] += odd ? held[i ^ 2].x : held[i].x;
      sums[i % 4 * 4 + i / 4 * 2 + 1] += odd ? held[i ^ 2].y : held[i].y;
    }
  }
  __device__ __forceinline__ void add_held(float (&sums)[32], uint32_t box) {
    const int lane = thread_ % 32;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int row = thread_ / 32 * 16 + i % 2 * 8 + lane / 4;
      const int chunk = i / 2 ^ (row % 8);
      const uint32_t held = sm90::load_shared_word(box + row * 128 + chunk * 16 + lane % 4 * 4);
      sums[i * 2] += __uint_as_float(held << 16);
      sums[i * 2 + 1] += __uint_as_float(held & 0xffff0000U);
    }
  }

  // Where this thread's pair i of a box in fp32 lies.
  __device__ __forceinline__ uint32_t wide_place(uint32_t box, int i, bool odd) const {
    const int lane = thread_ % 32;
    const int row = thread_ / 32 * 16 + i / 4 * 8 + lane / 4;
    const int chunk = ((i % 4 ^ (odd ? 2 : 0)) * 2 + lane % 4 / 2) ^ (row % 8);
    return box + row * 128 + chunk * 16 + lane % 2 * 8;
  }

  // The first `rows` rows of a box, to columns from `column` on.
  __device__ __forceinline__ void store_rows(uint32_t box, int32_t row, int32_t rows,
                                             int32_t column) {
    const int chunk = thread_ % 8;
    if (column + chunk * 8 >= sizes_.columns) return;
    for (int r = thread_ / 8; r < rows; r += 16) {
      const int4 values = sm90::load_shared(box + r * 128 + (chunk ^ (r % 8)) * 16);
      auto* out = static_cast<typename Cut::Out*>(sizes_.out);
      *reinterpret_cast<int4*>(out + int64_t{row + r} * sizes_.columns + column + chunk * 8) =
          values;
    }
  }

  // The part of a weight gradient that no rows contribute to.
  __device__ __forceinline__ void store_zeros(int32_t group, int32_t row, int32_t rows,
                                              int32_t column) {
    const int32_t columns = min(sizes_.columns - column, Cut::kTileColumns);
    using Out = typename Cut::Out;
    Out* out = static_cast<Out*>(sizes_.out) +
               (int64_t{group} * sizes_.rows + row) * sizes_.columns + column;
    for (int32_t r = 0; r < min(rows, 64); ++r) {
      for (int32_t c = thread_; c < columns; c += 128) {
        out[int64_t{r} * sizes_.columns + c] = round_to<Out>(0.0F);
      }
    }
  }

  const CUtensorMap& out_map_;
  const GroupedSizes& sizes_;
  const GroupedShared<Cut>& shared_;
  int warpgroup_;
  int thread_;                          // of the warpgroup
  sm90::RingPlace<Cut::kBoxes> boxes_;  // used in turns, so that the oldest store is waited for
  sm90::RingPlace<Cut::kStages> ring_;
};

template <class Cut>
__global__ void __cluster_dims__(Cut::kPair, 1, 1) __launch_bounds__(Cut::kThreads, 1)
    grouped_product_kernel(const __grid_constant__ CUtensorMap left_map,
                           const __grid_constant__ CUtensorMap right_map,
                           const __grid_constant__ CUtensorMap out_map,
                           const __grid_constant__ GroupedSizes sizes) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ std::byte shared_memory[];
  const GroupedShared<Cut> shared{(sm90::shared_address(shared_memory) + 1023) & ~1023U};
  const int warpgroup = __shfl_sync(0xffffffffU, static_cast<int>(threadIdx.x) / 128, 0);
  if (threadIdx.x == 0) {
    sm90::prefetch_map(left_map);
    sm90::prefetch_map(right_map);
    sm90::prefetch_map(out_map);
    for (int i = 0; i < Cut::kStages; ++i) {
      sm90::barrier_init(shared.full(i), 1);
      sm90::barrier_init(shared.empty(i), Cut::kWarpgroups * Cut::kReleases * Cut::kPair);
    }
    for (int i = 0; i < Cut::kNotes; ++i) {
      sm90::barrier_init(shared.note_full(i), 1);
      sm90::barrier_init(shared.note_empty(i), Cut::kWarpgroups * (Cut::kDepthGrouped ? 2 : 1));
    }
    for (int warpgroup = 0; Cut::kDepthGrouped && warpgroup < Cut::kWarpgroups; ++warpgroup) {
      for (int i = 0; i < Cut::kBoxes; ++i) {
        sm90::barrier_init(shared.box_open(warpgroup, i), 1);
        sm90::barrier_init(shared.box_ready(warpgroup, i), 4);
      }
    }
    sm90::fence_barriers();
  }
  if constexpr (Cut::kPair == 2) {
    sm90::cluster_barrier();
  } else {
    __syncthreads();
  }
  if (warpgroup == Cut::kWarpgroups) {
    sm90::release_registers<Cut::kLoaderRegisters>();
    const int warp = static_cast<int>(threadIdx.x) / 32 - Cut::kWarpgroups * 4;
    if (warp == 0) {
      load_grouped_tiles<Cut>(left_map, right_map, sizes, shared);
    } else if (Cut::kDepthGrouped && warp <= Cut::kWarpgroups && threadIdx.x % 32 == 0) {
      GroupedBoxes<Cut>(out_map, sizes, shared, warp - 1).run();
    }
  } else {
    sm90::take_registers<Cut::kMathRegisters>();
    GroupedMath<Cut>(out_map, sizes, shared, warpgroup).run();
  }
  // The other block may still arrive at this one's barriers.
  if constexpr (Cut::kPair == 2) {
    __syncwarp();
    sm90::cluster_barrier();
  }
#else
  __trap();  // chosen for GPUs of compute capability 9.0 alone
#endif
}

// Launches the product of left and right, which are the operands as GroupedProduct names them.
// `left_extent`: rows of the left operand in all groups; of a transposed one, its blocks.
template <class Cut>
void launch_grouped_product(const CudaKernelArguments& args, const void* left, const void* right,
                            int64_t left_extent, const GroupedSizes& sizes, int multiprocessors) {
  const int64_t columns = sizes.columns;
  constexpr DType kOperand = [] {
    if constexpr (Cut::kCodes) {
      return DType::u8;
    } else {
      return dtype_of<typename Cut::Left>;
    }
  }();
  TiledTensor left_tensor{.data = left,
                          .dtype = kOperand,
                          .sizes = {sizes.depth, left_extent, 1},
                          .tile = {Cut::kDepth, Cut::kTileRows}};
  TiledTensor right_tensor{.data = right,
                           .dtype = kOperand,
                           .sizes = {sizes.depth, columns, sizes.groups},
                           .tile = {Cut::kDepth, Cut::kTileColumns / Cut::kPair}};
  TiledTensor out_tensor{.data = sizes.out,
                         .dtype = dtype_of<typename Cut::Out>,
                         .sizes = {columns, left_extent, 1},
                         .tile = {Cut::kBoxColumns, 64}};
  if constexpr (Cut::kRightColumnsFirst) {
    right_tensor.sizes = {columns, sizes.depth, sizes.groups};
    right_tensor.tile = {64, 64};
  }
  if constexpr (Cut::kDepthGrouped) out_tensor.sizes = {columns, sizes.rows, sizes.groups};
  if constexpr (Cut::kLeftTransposed) {
    left_tensor.sizes = {kTransposedRows, sizes.rows, left_extent};
    right_tensor.sizes = {kTransposedRows, columns, left_extent};
  } else if constexpr (Cut::kRightTransposed) {
    right_tensor.sizes = {kTransposedRows, columns,
                          sizes.groups * ceil_divide(sizes.depth, kTransposedRows)};
  } else if constexpr (Cut::kDepthGrouped) {
    left_tensor.sizes = {sizes.rows, left_extent, 1};
    left_tensor.tile = {64, 64};
    right_tensor.sizes = {columns, left_extent, 1};
  }
  Launch shape;
  shape.grid = dim3(static_cast<unsigned>(multiprocessors / Cut::kPair * Cut::kPair));
  shape.block = dim3(Cut::kThreads);
  shape.shared_bytes = Cut::kSharedBytes;
  allow_shared_bytes(grouped_product_kernel<Cut>, shape.shared_bytes);
  launch(args, shape, grouped_product_kernel<Cut>, make_tensor_map(left_tensor),
         make_tensor_map(right_tensor), make_tensor_map(out_tensor), sizes);
}

}  // namespace troupe
