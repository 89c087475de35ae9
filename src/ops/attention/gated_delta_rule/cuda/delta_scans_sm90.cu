#include "ops/attention/gated_delta_rule/cuda/delta_tiles.cuh"

namespace troupe {
namespace {

constexpr int kColumns = 64;  // of the state, that a block has
constexpr int kThreads = 256;
constexpr int kRowWarps = 4;     // of 16 rows of a chunk each, or of 16 columns of the state
constexpr int kColumnWarps = 2;  // of 32 columns of the state, or of 64 of its rows
constexpr int kTiles = kColumns / kColumnWarps / 8;         // of rows of a chunk, that a warp has
constexpr int kStateTiles = kDeltaHead / kColumnWarps / 8;  // the same of the state
constexpr int kPitch = kColumns + 8;
constexpr int kRowPacks = kDeltaHead / kDeltaPack;
constexpr int kColumnPacks = kColumns / kDeltaPack;

static_assert(kRowWarps * kColumnWarps * 32 == kThreads && kRowWarps * 16 == kDeltaChunk);
static_assert(kColumns == kDeltaChunk, "a warp has as many rows of a chunk as columns of a state");

// forward: o of each row. states: u of each row, and S before each chunk. ends: S after the last
// one. adjoint: backwards over the chunks, du and dv of each row, E after each chunk, and that
// before all.
enum class Scan { forward, states, ends, adjoint };

struct ScanStage {
  Bf16 key[kDeltaChunk][kDeltaPitch];
  Bf16 query[kDeltaChunk][kDeltaPitch];
  Bf16 values[kDeltaChunk][kPitch];  // v, or do
  Bf16 coupling[kDeltaChunk][kDeltaSquarePitch];
  Bf16 attention[kDeltaChunk][kDeltaSquarePitch];
  DeltaNumbers numbers[kDeltaChunk];
};

struct ScanTiles {
  ScanStage stages[2];
  Bf16 state[kColumns][kDeltaPitch];     // S^T, or E^T
  Bf16 weighted[kDeltaChunk][kPitch];    // b R, or b N
  Bf16 written[kDeltaChunk][kPitch];     // what keys add to the state, by row
  Bf16 other[kDeltaChunk][kPitch];       // forward: b u. adjoint: what queries add to the state
  Bf16 results[2][kDeltaChunk][kPitch];  // o; u; or du and dv
};

// 16 bytes to shared memory; zeros if there is nothing to copy.
__device__ __forceinline__ void copy_pack(void* to, const void* from, bool is_there = true) {
  const auto at = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from),
               "r"(is_there ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

__device__ __forceinline__ void store_pair(Bf16* to, float x, float y) {
  *reinterpret_cast<__nv_bfloat162*>(to) = __floats2bfloat162_rn(x, y);
}

// Some columns of a part of the state of one value head of one sequence.
template <Scan kScan>
class DeltaScan {
 public:
  __device__ DeltaScan(const DeltaOperands& in, ScanTiles& tiles)
      : in_(in),
        tiles_(tiles),
        head_(static_cast<int>(blockIdx.x) % in.a.value_heads),
        sequence_(blockIdx.x / in.a.value_heads),
        part_(static_cast<int>(blockIdx.z)),
        first_column_(static_cast<int>(blockIdx.y) * kColumns),
        row_(warp() % kRowWarps * 16),
        column_(warp() / kRowWarps * (kTiles * 8)),
        state_row_(warp() / kRowWarps * (kStateTiles * 8)) {}

  __device__ void run() {
    const int chunks = in_.chunks();
    const auto chunk_of = [&](int i) { return kIsBackward ? chunks - 1 - i : i; };
    load(tiles_.stages[0], chunk_of(0));
    begin_state();
    store_state();
    for (int i = 0; i < chunks; ++i) {
      wait_for_copies();
      __syncthreads();
      if (i + 1 < chunks) load(tiles_.stages[(i + 1) % 2], chunk_of(i + 1));
      if (i > 0) store_results(chunk_of(i - 1));
      if (kScan == Scan::states || kIsBackward) keep_state(chunk_of(i));
      run_chunk(tiles_.stages[i % 2], chunk_of(i));
    }
    __syncthreads();
    store_results(chunk_of(chunks - 1));
    if (kScan == Scan::ends) write_state(in_.ends, 2);
    if (kIsBackward && in_.d_initial != nullptr) write_state(in_.d_initial, 1);
  }

 private:
  static constexpr bool kIsBackward = kScan == Scan::adjoint;
  static constexpr bool kHasQueries = kScan == Scan::forward || kIsBackward;

  __device__ static int thread() { return static_cast<int>(threadIdx.x); }
  __device__ static int warp() { return thread() / 32; }
  // Of a tile's values: rows row(0) and row(1), columns column() and the next one.
  __device__ int row(int half) const { return row_ + lane_of() / 4 + 8 * half; }
  __device__ int column(int tile) const { return column_ + tile * 8 + lane_of() % 4 * 2; }
  __device__ int64_t first_row(int chunk) const {
    return sequence_ * in_.a.sequence + int64_t{chunk} * kDeltaChunk;
  }
  __device__ int rows_of(int chunk) const {
    return min(kDeltaChunk, in_.a.sequence - chunk * kDeltaChunk);
  }

  __device__ void load(ScanStage& stage, int chunk) const {
    const int64_t first = first_row(chunk);
    const int count = rows_of(chunk);
    const int at = thread() % kRowPacks * kDeltaPack;
#pragma unroll
    for (int t = thread() / kRowPacks; t < kDeltaChunk; t += kThreads / kRowPacks) {
      const Bf16* row = in_.qkv + (first + min(t, count - 1)) * in_.a.row_size() + at;
      copy_pack(&stage.key[t][at], row + in_.a.key_of(head_), t < count);
      if (kHasQueries) copy_pack(&stage.query[t][at], row + in_.a.query_of(head_), t < count);
    }
    const int64_t place = in_.chunk_of(sequence_, head_, chunk);
    const int pack = thread() % kColumnPacks * kDeltaPack;
#pragma unroll
    for (int t = thread() / kColumnPacks; t < kDeltaChunk; t += kThreads / kColumnPacks) {
      const int64_t row = first + min(t, count - 1);
      const bool has_values = kIsBackward ? in_.d_out != nullptr : part_ == 0;
      const Bf16* values = kIsBackward && has_values
                               ? in_.d_out + row * in_.a.value_size() + head_ * kDeltaHead
                               : in_.qkv + row * in_.a.row_size() + in_.a.value_of(head_);
      copy_pack(&stage.values[t][pack], values + first_column_ + pack, has_values && t < count);
      const int64_t square = (place * kDeltaChunk + t) * kDeltaChunk + pack;
      copy_pack(&stage.coupling[t][pack], in_.coupling + square);
      if (kHasQueries) copy_pack(&stage.attention[t][pack], in_.attention + square);
    }
    if (thread() < kDeltaChunk) {
      copy_pack(&stage.numbers[thread()], in_.numbers + place * kDeltaChunk + thread());
    }
  }

  // visit(element, index) for the elements of the state that the thread has: where they are in a
  // tensor [B, H_v, d_k, parts d_v].
  template <class Visit>
  __device__ void for_state(int parts, const Visit& visit) {
    const int64_t first = (sequence_ * in_.a.value_heads + head_) * kDeltaHead;
#pragma unroll
    for (int tile = 0; tile < kStateTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int k = state_row_ + tile * 8 + lane_of() % 4 * 2 + i % 2;
        const int column = part_ * kDeltaHead + first_column_ + row(i / 2);
        visit(state_[tile].values[i], (first + k) * parts * kDeltaHead + column, k, column);
      }
    }
  }
  __device__ void begin_state() {
    const float* const from = kIsBackward ? in_.d_ends : in_.initial;
    for_state(kIsBackward ? 2 : 1, [&](float& element, int64_t at, int k, int column) {
      const bool is_identity = !kIsBackward && column == kDeltaHead + k;
      element = from != nullptr ? from[at] : is_identity ? 1.0F : 0.0F;
    });
  }
  __device__ void write_state(float* to, int parts) {
    for_state(parts, [&](float element, int64_t at, int, int) { to[at] = element; });
  }

  __device__ void store_state() const {
#pragma unroll
    for (int tile = 0; tile < kStateTiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        store_pair(&tiles_.state[row(half)][state_row_ + tile * 8 + lane_of() % 4 * 2],
                   state_[tile].values[2 * half], state_[tile].values[2 * half + 1]);
      }
    }
  }

  // The state at the border of the chunk, for the gradients.
  __device__ void keep_state(int chunk) const {
    Bf16* const to = (kIsBackward ? in_.d_states : in_.states) +
                     in_.state_of(part_, sequence_, head_, chunk) + first_column_ * kDeltaHead;
    const int at = thread() % kRowPacks * kDeltaPack;
#pragma unroll
    for (int j = thread() / kRowPacks; j < kColumns; j += kThreads / kRowPacks) {
      store_delta_pack(to + j * kDeltaHead + at, load_delta_pack(&tiles_.state[j][at]));
    }
  }

  __device__ void store_results(int chunk) const {
    if (kScan == Scan::ends) return;
    const int64_t first = first_row(chunk);
    const int count = rows_of(chunk);
    const int pack = thread() % kColumnPacks * kDeltaPack;
    Bf16* const to =
        kScan == Scan::forward ? in_.out : (kIsBackward ? in_.du : in_.u) + in_.part_of(part_);
    const bool is_rest = kIsBackward && part_ == 1;
    Bf16* const dv = is_rest ? in_.dv + head_ * kDeltaHead : in_.d_qkv + in_.a.value_of(head_);
    const int64_t dv_row = is_rest ? in_.a.value_size() : in_.a.row_size();
#pragma unroll
    for (int t = thread() / kColumnPacks; t < kDeltaChunk; t += kThreads / kColumnPacks) {
      if (t >= count) continue;
      const int64_t column = first_column_ + pack;
      store_delta_pack(to + (first + t) * in_.a.value_size() + head_ * kDeltaHead + column,
                       load_delta_pack(&tiles_.results[0][t][pack]));
      if (kIsBackward) {
        store_delta_pack(dv + (first + t) * dv_row + column,
                         load_delta_pack(&tiles_.results[1][t][pack]));
      }
    }
  }

  // visit(t, column, numbers, x) for each pair x of neighbours of the tiles, in row t.
  template <class Visit>
  __device__ void for_pairs(const ScanStage& stage, Tile (&tiles)[kTiles],
                            const Visit& visit) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const DeltaNumbers numbers = stage.numbers[row(half)];
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        visit(row(half), column(tile), numbers, tiles[tile].values + 2 * half);
      }
    }
  }

  __device__ void run_chunk(const ScanStage& stage, int chunk) {
    const float decay = in_.decays[in_.chunk_of(sequence_, head_, chunk) * 4];
    // R, or N.
    Tile rows[kTiles];
    multiply<kDeltaHead, false, true>(rows, stage.key, tiles_.state, row_, column_);
    for_pairs(stage, rows, [&](int t, int column, const DeltaNumbers& numbers, float* x) {
      const float2 value =
          __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&stage.values[t][column]));
      if constexpr (kIsBackward) {
        x[0] *= numbers.to_end;
        x[1] *= numbers.to_end;
        store_pair(&tiles_.other[t][column], numbers.query * value.x, numbers.query * value.y);
      } else {
        x[0] = value.x - numbers.from_start * x[0];
        x[1] = value.y - numbers.from_start * x[1];
      }
    });
    if constexpr (kIsBackward) {
      multiply<kDeltaChunk, true, false>(rows, stage.attention, stage.values, row_, column_);
    }
    for_pairs(stage, rows, [&](int t, int column, const DeltaNumbers& numbers, const float* x) {
      store_pair(&tiles_.weighted[t][column], numbers.beta * x[0], numbers.beta * x[1]);
    });
    Tile outs[kTiles];
    if constexpr (kScan == Scan::forward) {
      multiply<kDeltaHead, false, true>(outs, stage.query, tiles_.state, row_, column_);
      for_pairs(stage, outs, [](int, int, const DeltaNumbers& numbers, float* x) {
        x[0] *= numbers.query;
        x[1] *= numbers.query;
      });
    }
    __syncthreads();

    // u, or du.
    multiply<kDeltaChunk, kIsBackward, false, Sign::minus>(rows, stage.coupling, tiles_.weighted,
                                                           row_, column_);
    for_pairs(stage, rows, [&](int t, int column, const DeltaNumbers& numbers, const float* x) {
      const float y[2] = {numbers.beta * x[0], numbers.beta * x[1]};
      const float factor = kIsBackward ? -numbers.from_start : numbers.to_end;
      store_pair(&tiles_.written[t][column], factor * y[0], factor * y[1]);
      if constexpr (kScan == Scan::forward) {
        store_pair(&tiles_.other[t][column], y[0], y[1]);
      } else {
        store_pair(&tiles_.results[0][t][column], x[0], x[1]);
        if (kIsBackward) store_pair(&tiles_.results[1][t][column], y[0], y[1]);
      }
    });
    __syncthreads();

#pragma unroll
    for (Tile& tile : state_) {
#pragma unroll
      for (float& element : tile.values) element *= decay;
    }
    multiply<kDeltaChunk, true, false>(state_, tiles_.written, stage.key, row_, state_row_);
    if constexpr (kIsBackward) {
      multiply<kDeltaChunk, true, false>(state_, tiles_.other, stage.query, row_, state_row_);
    }
    store_state();
    if constexpr (kScan == Scan::forward) {
      multiply<kDeltaChunk, false, false>(outs, stage.attention, tiles_.other, row_, column_);
      for_pairs(stage, outs, [&](int t, int column, const DeltaNumbers&, const float* x) {
        store_pair(&tiles_.results[0][t][column], x[0], x[1]);
      });
    }
  }

  const DeltaOperands& in_;
  ScanTiles& tiles_;
  const int head_;
  const int64_t sequence_;
  const int part_;
  const int first_column_;  // of the part, that the block has
  const int row_;           // the warp's first row of a chunk, and its first column of the state
  const int column_;        // with rows of a chunk, the warp's first column of the state
  const int state_row_;     // with columns of the state, the warp's first row of it
  Tile state_[kStateTiles];
};

template <Scan kScan>
__global__ __launch_bounds__(kThreads, 1) void delta_scan_kernel(DeltaOperands operands) {
  extern __shared__ __align__(16) unsigned char memory[];
  DeltaScan<kScan>(operands, *reinterpret_cast<ScanTiles*>(memory)).run();
}

template <Scan kScan>
void launch_scan(const CudaKernelArguments& args, const DeltaOperands& operands) {
  allow_shared_bytes(delta_scan_kernel<kScan>, sizeof(ScanTiles));
  const auto heads =
      static_cast<unsigned>(operands.rows / operands.a.sequence * operands.a.value_heads);
  const auto parts = static_cast<unsigned>(operands.parts);
  launch(args, {dim3(heads, kDeltaHead / kColumns, parts), kThreads, sizeof(ScanTiles)},
         delta_scan_kernel<kScan>, operands);
}

// Places what both passes have in scratch; returns what comes after it.
Bf16* place_couplings(DeltaOperands& operands, std::byte* scratch) {
  const int64_t chunks = delta_sm90_chunks(operands.rows, operands.a);
  constexpr int kSquare = kDeltaChunk * kDeltaChunk;
  operands.numbers = reinterpret_cast<DeltaNumbers*>(scratch);
  operands.decays = reinterpret_cast<float*>(operands.numbers + chunks * kDeltaChunk);
  operands.coupling = reinterpret_cast<Bf16*>(operands.decays + 4 * chunks);
  operands.attention = operands.coupling + chunks * kSquare;
  return operands.attention + chunks * kSquare;
}

void launch_gradient(const CudaKernelArguments& args, DeltaOperands operands) {
  operands.u = place_couplings(operands, args.scratch);
  const int64_t values = operands.rows * operands.a.value_size();
  const int64_t states =
      delta_sm90_chunks(operands.rows, operands.a) * operands.a.state_size() * operands.parts;
  operands.du = operands.u + operands.parts * values;
  operands.states = operands.du + operands.parts * values;
  operands.d_states = operands.states + states;
  operands.dv = operands.d_states + states;
  launch_delta_couplings(args, operands);
  launch_scan<Scan::states>(args, operands);
  launch_scan<Scan::adjoint>(args, operands);
  launch_delta_chunks(args, operands);
}

}  // namespace

void delta_rule_sm90(const CudaKernelArguments& args) {
  DeltaOperands operands{.a = args.attributes->as<GatedDeltaRuleAttributes>(),
                         .rows = args.input(0).shape[0],
                         .qkv = args.in<Bf16>(0),
                         .gates = args.in<float>(1),
                         .starts = args.in<int32_t>(2),
                         .initial = args.in<float>(3),
                         .out = args.out<Bf16>(0)};
  place_couplings(operands, args.scratch);
  launch_delta_couplings(args, operands);
  launch_scan<Scan::forward>(args, operands);
}

void delta_state_sm90(const CudaKernelArguments& args) {
  DeltaOperands operands{.a = args.attributes->as<GatedDeltaRuleAttributes>(),
                         .parts = 2,
                         .rows = args.input(0).shape[0],
                         .qkv = args.in<Bf16>(0),
                         .gates = args.in<float>(1),
                         .starts = args.in<int32_t>(2),
                         .ends = args.out<float>(0)};
  place_couplings(operands, args.scratch);
  launch_delta_couplings(args, operands);
  launch_scan<Scan::ends>(args, operands);
}

void delta_rule_gradient_sm90(const CudaKernelArguments& args) {
  const float* initial = args.in<float>(4);
  launch_gradient(args, {.a = args.attributes->as<GatedDeltaRuleAttributes>(),
                         .rows = args.input(1).shape[0],
                         .qkv = args.in<Bf16>(1),
                         .gates = args.in<float>(2),
                         .starts = args.in<int32_t>(3),
                         .initial = initial,
                         .d_initial = initial == nullptr ? nullptr : args.out<float>(2),
                         .d_out = args.in<Bf16>(0),
                         .d_qkv = args.out<Bf16>(0),
                         .d_gates = args.out<float>(1)});
}

void delta_state_gradient_sm90(const CudaKernelArguments& args) {
  launch_gradient(args, {.a = args.attributes->as<GatedDeltaRuleAttributes>(),
                         .parts = 2,
                         .rows = args.input(1).shape[0],
                         .qkv = args.in<Bf16>(1),
                         .gates = args.in<float>(2),
                         .starts = args.in<int32_t>(3),
                         .d_ends = args.in<float>(0),
                         .d_qkv = args.out<Bf16>(0),
                         .d_gates = args.out<float>(1)});
}

}  // namespace troupe
