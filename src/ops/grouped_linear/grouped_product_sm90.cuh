// The products of experts on Hopper, in bf16 with tensor cores (wgmma) fed by the copy unit (TMA).
// See GroupedProduct for the products and grouped_linear.h for what they are.
//
// The kernel is persistent: a block takes every gridDim.x-th tile of the result. One warp finds
// the tiles from the offsets, tells the others in notes, and keeps a ring of stages in shared
// memory filled with operands, 64 elements deep each; two warpgroups multiply them and store the
// results. Every element of the result is computed by one warpgroup in a fixed order, so the same
// operands give the same bits.
//
// Tiles do not cross groups, but boxes of rows that are copied do. Where rows are the product's
// rows, the strangers among them only reach rows of the result that are not stored. Where they are
// the depth, they are set to zero in shared memory before they are multiplied: they may be NaN.
#pragma once

#include <type_traits>

#include "ops/cuda/device.cuh"
#include "ops/cuda/sm90.cuh"
#include "ops/cuda/tensor_map.h"

namespace troupe {

enum class GroupedProduct {
  forward,          // y [R, N] = x [R, K] W^T, W [E, N, K]
  data_gradient,    // dx [R, N] = dy [R, K] W, W [E, K, N]
  weight_gradient,  // dW [E, M, N] = dy^T x, dy [R, M], x [R, N]
};

// How the kernel is cut. Out_ is the type of the result: Bf16, or float for weight gradients.
template <GroupedProduct kProduct_, class Out_ = Bf16>
struct GroupedCut {
  static constexpr GroupedProduct kProduct = kProduct_;
  static constexpr bool kDepthGrouped = kProduct == GroupedProduct::weight_gradient;
  static constexpr bool kLeftRowsFirst = kDepthGrouped;
  static constexpr bool kRightColumnsFirst = kProduct != GroupedProduct::forward;
  using Out = Out_;
  // Where the result is f32, the copy unit adds to it; to bf16 it would add what is rounded
  // already.
  static constexpr bool kAddsCopies = std::is_same_v<Out, float>;
  static_assert(kDepthGrouped || !kAddsCopies);

  static constexpr int kTileRows = 128;
  static constexpr int kTileColumns = 256;
  static constexpr int kStages = 4;
  static constexpr int kDepth = 64;       // of a stage
  static constexpr int kBoxBytes = 8192;  // 64 x 64 elements of bf16
  static constexpr int kLeftBytes = kTileRows * kDepth * 2;
  static constexpr int kRightBytes = kTileColumns * kDepth * 2;
  static constexpr int kStageBytes = kLeftBytes + kRightBytes;

  static constexpr int kWarpgroups = 2;
  static constexpr int kThreads = (1 + kWarpgroups) * 128;
  // What setmaxnreg makes of the 168 registers that each thread begins with.
  static constexpr int kLoaderRegisters = 56;
  static constexpr int kMathRegisters = 224;

  // Results leave in boxes of 64 rows of 128 bytes; a warpgroup has two on their way.
  static constexpr int kBoxColumns = 128 / static_cast<int>(sizeof(Out));
  static constexpr int kBoxes = 2;

  // Shared memory: stages, boxes of results, barriers, notes.
  static constexpr int kNotes = 4;
  static constexpr int kNoteBytes = 32;
  static constexpr int kBoxesAt = kStages * kStageBytes;
  static constexpr int kBarriersAt = kBoxesAt + kWarpgroups * kBoxes * kBoxBytes;
  static constexpr int kNotesAt = kBarriersAt + 8 * (2 * kStages + 2 * kNotes);
  static constexpr int kSharedBytes = kNotesAt + kNotes * kNoteBytes + 1024;  // to align the start
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
};

// Finds tiles by their numbers, which must not decrease. All lanes of a warp together.
template <class Cut>
class GroupedTiles {
 public:
  __device__ explicit GroupedTiles(const GroupedSizes& sizes)
      : sizes_(sizes), column_tiles_(ceil_of(sizes.columns, Cut::kTileColumns)) {
    load();
  }

  // first_block is left to the caller.
  __device__ GroupedNote find(int32_t tile) {
    while (tile >= through_ && window_ + 32 < sizes_.groups) {
      window_ += 32;
      load();
    }
    GroupedNote note{};
    note.group = -1;
    if (tile >= through_) return note;
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
    const int32_t column_tile = in_panel / height;
    const int32_t row = (panel * most + in_panel - column_tile * height) * Cut::kTileRows;
    note.column = column_tile * Cut::kTileColumns;
    note.row = Cut::kDepthGrouped ? row : begin + row;
    note.rows = min(rows - row, Cut::kTileRows);
    if constexpr (Cut::kDepthGrouped) {
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
      lane_tiles_ = counts ? ceil_of(sizes_.rows, Cut::kTileRows) * column_tiles_ : 0;
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
  __device__ uint32_t full(int stage) const { return base + Cut::kBarriersAt + 8 * stage; }
  __device__ uint32_t empty(int stage) const { return full(Cut::kStages + stage); }
  __device__ uint32_t note_full(int i) const { return full(2 * Cut::kStages + i); }
  __device__ uint32_t note_empty(int i) const { return note_full(Cut::kNotes + i); }
  __device__ uint32_t note(int i) const { return base + Cut::kNotesAt + i * Cut::kNoteBytes; }
};

// A place in the ring of stages.
template <int kStages>
struct RingPlace {
  int stage = 0;
  uint32_t parity = 0;

  __device__ void move_to(uint32_t block) {
    stage = static_cast<int>(block % kStages);
    parity = block / kStages & 1;
  }
  __device__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// The loading warp.
template <class Cut>
__device__ __forceinline__ void load_grouped_tiles(const CUtensorMap& left_map,
                                                   const CUtensorMap& right_map,
                                                   const GroupedSizes& sizes,
                                                   const GroupedShared<Cut>& shared) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  GroupedTiles<Cut> tiles(sizes);
  RingPlace<Cut::kStages> place;
  int32_t blocks = 0;
  for (uint32_t number = 0;; ++number) {
    GroupedNote note = tiles.find(static_cast<int32_t>(number * gridDim.x + blockIdx.x));
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
      const bool loads = note.last_depth > 0;
      for (int32_t i = 0; i < note.blocks; ++i) {
        const int stage = place.stage;
        sm90::barrier_wait(shared.empty(stage), place.parity ^ 1);
        place.advance();
        const uint32_t full = shared.full(stage);
        if (!loads) {
          sm90::barrier_arrive(full);
          continue;
        }
        sm90::barrier_arrive_expecting(full, Cut::kStageBytes);
        const int32_t depth = note.depth_begin + i * Cut::kDepth;
        if constexpr (Cut::kLeftRowsFirst) {
#pragma unroll
          for (int box = 0; box < Cut::kTileRows / 64; ++box) {
            sm90::load_tile(left_map, full, shared.left(stage) + box * Cut::kBoxBytes,
                            note.row + box * 64, depth, 0);
          }
        } else {
          sm90::load_tile(left_map, full, shared.left(stage), depth, note.row, 0);
        }
        const int32_t matrix = Cut::kDepthGrouped ? 0 : note.group;
        if constexpr (Cut::kRightColumnsFirst) {
#pragma unroll
          for (int box = 0; box < Cut::kTileColumns / 64; ++box) {
            sm90::load_tile(right_map, full, shared.right(stage) + box * Cut::kBoxBytes,
                            note.column + box * 64, depth, matrix);
          }
        } else {
          sm90::load_tile(right_map, full, shared.right(stage), depth, note.column, matrix);
        }
      }
    }
    blocks += note.blocks;
    __syncwarp();
  }
}

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
    float sums[Cut::kTileColumns / 2];
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
        multiply(sums, depth.x, depth.y);
      }
      if (rows <= 0) continue;
      if (Cut::kDepthGrouped && depth.y == 0) {
        store_zeros(place.x, row, rows, place.w);
        continue;
      }
      store(sums, place.x, row, rows, place.w);
    }
    if (thread_ == 0) sm90::wait_stores();
  }

 private:
  static constexpr int kOwnBarrier = 1;   // and the next: of a warpgroup
  static constexpr int kBothBarrier = 3;  // of both

  // Gives a stage back to whoever fills it.
  __device__ __forceinline__ void release(int stage) {
    if (thread_ == 0) sm90::barrier_arrive(shared_.empty(stage));
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
      if (Cut::kDepthGrouped && i == blocks - 1 && last_depth % 16 != 0) {
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
  __device__ __forceinline__ void multiply_stage(float (&sums)[Cut::kTileColumns / 2], int steps,
                                                 int& add) {
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
      sm90::multiply_add<Cut::kTileColumns, Cut::kLeftRowsFirst, Cut::kRightColumnsFirst>(
          sums, left + step * kLeftStep, right + step * kRightStep, add);
      add = 1;
    }
    sm90::commit_products();
  }

  __device__ __forceinline__ void multiply(float (&sums)[Cut::kTileColumns / 2], int32_t blocks,
                                           int32_t last_depth) {
    int add = 0;
    const auto finish = [&] {
      sm90::wait_products<0>();
      release(ring_.stage);
      ring_.advance();
    };
    const int32_t whole = Cut::kDepthGrouped ? blocks - 1 : blocks;
    for (int32_t i = 0; i < whole; ++i) {
      sm90::barrier_wait(shared_.full(ring_.stage), ring_.parity);
      multiply_stage<true>(sums, 4, add);
      finish();
    }
    if constexpr (Cut::kDepthGrouped) {
      sm90::barrier_wait(shared_.full(ring_.stage), ring_.parity);
      if (last_depth % 16 != 0) clear_beyond(ring_.stage, last_depth);
      multiply_stage<false>(sums, (last_depth + 15) / 16, add);
      finish();
    }
  }

  // The sums of 64 rows from `row` on, of which `rows` are stored, leave box by box.
  __device__ __forceinline__ void store(const float (&sums)[Cut::kTileColumns / 2], int32_t group,
                                        int32_t row, int32_t rows, int32_t column) {
    constexpr int kSums = Cut::kBoxColumns / 2;  // of a thread, in a box
#pragma unroll
    for (int i = 0; i < Cut::kTileColumns / Cut::kBoxColumns; ++i) {
      const int32_t first = column + i * Cut::kBoxColumns;
      if (rows <= 0 || first >= sizes_.columns) continue;
      const uint32_t box = shared_.box(warpgroup_, next_box_);
      next_box_ = (next_box_ + 1) % Cut::kBoxes;
      if (thread_ == 0) sm90::wait_stores_read<Cut::kBoxes - 1>();
      sm90::named_barrier(kOwnBarrier + warpgroup_, 128);
      float own[kSums];
#pragma unroll
      for (int j = 0; j < kSums; ++j) own[j] = sums[i * kSums + j];
      if constexpr (Cut::kDepthGrouped && !Cut::kAddsCopies) {
        if (sizes_.accumulate) add_result(own, group, row, rows, first);
      }
      put(own, box);
      // A copy stops at the end of the tensor, but not at that of a group.
      const bool whole = Cut::kDepthGrouped || rows >= 64;
      if (whole) sm90::fence_copies();
      sm90::named_barrier(kOwnBarrier + warpgroup_, 128);
      if (thread_ == 0 && whole) {
        const int32_t matrix = Cut::kDepthGrouped ? group : 0;
        if (Cut::kAddsCopies && sizes_.accumulate) {
          sm90::add_tile(out_map_, box, first, row, matrix);
        } else {
          sm90::store_tile(out_map_, box, first, row, matrix);
        }
      }
      if (thread_ == 0) sm90::commit_stores();  // of nothing, too: they are counted
      if (!whole) store_rows(box, row, rows, first);
    }
  }

  // Adds what the result holds to this thread's sums of a box of 64 columns from `column` on. Of
  // each 8 columns a thread has two successive ones in two rows.
  __device__ __forceinline__ void add_result(float (&sums)[32], int32_t group, int32_t row,
                                             int32_t rows, int32_t column) {
    const int lane = thread_ % 32;
    const auto* out = static_cast<const Bf16*>(sizes_.out) +
                      (int64_t{group} * sizes_.rows + row) * sizes_.columns + column;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int own_row = thread_ / 32 * 16 + half * 8 + lane / 4;
      if (own_row >= rows) continue;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int own_column = j * 8 + lane % 4 * 2;
        if (column + own_column >= sizes_.columns) continue;
        const auto pair = *reinterpret_cast<const __nv_bfloat162*>(
            out + int64_t{own_row} * sizes_.columns + own_column);
        sums[j * 4 + half * 2] += __bfloat162float(pair.x);
        sums[j * 4 + half * 2 + 1] += __bfloat162float(pair.y);
      }
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
        const __nv_bfloat162 pair =
            __floats2bfloat162_rn(sums[j * 8 + i * 2], sums[j * 8 + i * 2 + 1]);
        pairs[i] = *reinterpret_cast<const uint32_t*>(&pair);
      }
      const int chunk = (j * 2 + lane / 16) ^ (row % 8);
      sm90::store_matrices(box + row * 128 + chunk * 16, pairs);
    }
  }
  __device__ __forceinline__ void put(const float (&sums)[16], uint32_t box) {
    const int lane = thread_ % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = thread_ / 32 * 16 + half * 8 + lane / 4;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int chunk = (j * 2 + lane % 4 / 2) ^ (row % 8);
        sm90::store_shared(box + row * 128 + chunk * 16 + lane % 2 * 8,
                           make_float2(sums[j * 4 + half * 2], sums[j * 4 + half * 2 + 1]));
      }
    }
  }

  // The first `rows` rows of a box, to columns from `column` on.
  __device__ __forceinline__ void store_rows(uint32_t box, int32_t row, int32_t rows,
                                             int32_t column) {
    const int chunk = thread_ % 8;
    if (column + chunk * 8 >= sizes_.columns) return;
    for (int r = thread_ / 8; r < rows; r += 16) {
      const int4 values = sm90::load_shared(box + r * 128 + (chunk ^ (r % 8)) * 16);
      auto* out = static_cast<Bf16*>(sizes_.out);
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
  int thread_;        // of the warpgroup
  int next_box_ = 0;  // they are used in turns, so that the oldest store is waited for
  RingPlace<Cut::kStages> ring_;
};

template <class Cut>
__global__ void __launch_bounds__(Cut::kThreads, 1)
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
      sm90::barrier_init(shared.empty(i), Cut::kWarpgroups);
    }
    for (int i = 0; i < Cut::kNotes; ++i) {
      sm90::barrier_init(shared.note_full(i), 1);
      sm90::barrier_init(shared.note_empty(i), Cut::kWarpgroups);
    }
    sm90::fence_barriers();
  }
  __syncthreads();
  if (warpgroup == Cut::kWarpgroups) {
    sm90::release_registers<Cut::kLoaderRegisters>();
    if (threadIdx.x / 32 == Cut::kWarpgroups * 4) {
      load_grouped_tiles<Cut>(left_map, right_map, sizes, shared);
    }
  } else {
    sm90::take_registers<Cut::kMathRegisters>();
    GroupedMath<Cut>(out_map, sizes, shared, warpgroup).run();
  }
#endif
}

// Launches the product of left and right, which are the operands as GroupedProduct names them.
template <class Cut>
void launch_grouped_product(const CudaKernelArguments& args, const Bf16* left, const Bf16* right,
                            int64_t buffer_rows, const GroupedSizes& sizes, int multiprocessors) {
  const int64_t columns = sizes.columns;
  TiledTensor left_tensor{.data = left,
                          .dtype = DType::bf16,
                          .sizes = {sizes.depth, buffer_rows, 1},
                          .tile = {64, Cut::kTileRows}};
  TiledTensor right_tensor{.data = right,
                           .dtype = DType::bf16,
                           .sizes = {sizes.depth, columns, sizes.groups},
                           .tile = {64, Cut::kTileColumns}};
  TiledTensor out_tensor{.data = sizes.out,
                         .dtype = dtype_of<typename Cut::Out>,
                         .sizes = {columns, buffer_rows, 1},
                         .tile = {Cut::kBoxColumns, 64}};
  if constexpr (Cut::kRightColumnsFirst) {
    right_tensor.sizes = {columns, sizes.depth, sizes.groups};
    right_tensor.tile = {64, 64};
  }
  if constexpr (Cut::kDepthGrouped) {
    left_tensor.sizes = {sizes.rows, buffer_rows, 1};
    left_tensor.tile = {64, 64};
    right_tensor.sizes = {columns, buffer_rows, 1};
    out_tensor.sizes = {columns, sizes.rows, sizes.groups};
  }
  Launch shape;
  shape.grid = dim3(static_cast<unsigned>(multiprocessors));
  shape.block = dim3(Cut::kThreads);
  shape.shared_bytes = Cut::kSharedBytes;
  allow_shared_bytes(grouped_product_kernel<Cut>, shape.shared_bytes);
  launch(args, shape, grouped_product_kernel<Cut>, make_tensor_map(left_tensor),
         make_tensor_map(right_tensor), make_tensor_map(out_tensor), sizes);
}

}  // namespace troupe
