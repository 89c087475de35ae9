#include "ops/gated_delta_rule/cuda/delta_sm90.cuh"

namespace troupe {
namespace {

constexpr int kColumns = 32;  // of the state, that a block has
constexpr int kStage = 32;    // rows that lie in shared memory at a time
constexpr int kThreads = 128;
constexpr int kLanes = 8;  // of a warp, that share two columns
constexpr int kParts = kDeltaHead / (4 * kLanes);
constexpr int kPack = kDeltaPack;
constexpr int kRowPacks = 2 * kDeltaHead / kPack;  // of a query and a key
constexpr int kFetches = kStage * kRowPacks / kThreads;
constexpr int kColumnPacks = kColumns / kPack;

static_assert(kRowPacks == 32, "a warp fetches one row's query and key");
static_assert(kColumns * kLanes == 2 * kThreads, "every thread has a part of two columns");
static_assert(kDeltaChunk % kStage == 0, "chunks begin where stages do");
static_assert(kFetches % 2 == 0, "a warp fetches pairs of rows");

// forward: o of each row. states: u of each row, and S before each chunk. adjoint: backwards over
// the rows, du and dv of each, and dS after each chunk.
enum class Scan { forward, states, adjoint };

struct StageRows {
  float keys[kStage][kDeltaHead];  // normed
  float queries[kStage][kDeltaHead];
  struct alignas(16) Numbers {
    float beta;
    float decay;  // 0 at the beginning of a document
    float along;  // query . key
    // Of the rows of a pair, the first one's key with the second one's key, in the first one, and
    // with the second one's query, in the second one.
    float across;
  };
  Numbers numbers[kStage];
  float values[kStage][kColumns];  // v, or do
  Bf16 first[kStage][kColumns];    // o, u or du
  Bf16 second[kStage][kColumns];   // dv
};

__device__ __forceinline__ float from_lane(float x, int other) {
  return __shfl_xor_sync(0xffffffffU, x, other);
}

// The block's rows, on their way from memory: fetched into registers while the stage before is
// worked on. Rows beyond the sequence are zeros that leave a state as it is.
template <Scan kScan>
class StageLoader {
 public:
  __device__ StageLoader(const DeltaOperands& in, int64_t first_row, int head, int first_column)
      : in_(in), first_row_(first_row), head_(head), first_column_(first_column) {}

  __device__ void fetch(int stage) {
    first_ = stage * kStage;
#pragma unroll
    for (int i = 0; i < kFetches; ++i) {
      const int64_t column = lane() < 16 ? in_.a.query_of(head_) + lane() * kPack
                                         : in_.a.key_of(head_) + (lane() - 16) * kPack;
      queries_and_keys_[i] = load_delta_pack(in_.qkv + row(row_of(i)) * in_.a.row_size() + column);
    }
    if (thread() < kStage * kColumnPacks) {
      const int64_t column = first_column_ + thread() % kColumnPacks * kPack;
      const int64_t from = row(thread() / kColumnPacks);
      values_ =
          load_delta_pack(kScan == Scan::adjoint
                              ? in_.d_out + from * in_.a.value_size() + head_ * kDeltaHead + column
                              : in_.qkv + from * in_.a.row_size() + in_.a.value_of(head_) + column);
    }
    if (thread() < kStage) {
      const int64_t from = row(thread());
      const float* gate = in_.gates + from * 2 * in_.a.value_heads;
      beta_ = gate[head_];
      growth_ = gate[in_.a.value_heads + head_];
      start_ = in_.starts == nullptr ? 0 : in_.starts[from];
    }
  }

  // What was fetched, into shared memory.
  __device__ void store(StageRows& rows) const {
    const bool has_query = lane() < 16;
    const float scale = has_query ? rsqrtf(static_cast<float>(kDeltaHead)) : 1.0F;
#pragma unroll
    for (int i = 0; i < kFetches; i += 2) {
      float x[2][kPack];
      float along[2] = {0, 0};
      float across = 0;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        normalize(queries_and_keys_[i + j], is_there(row_of(i + j)) ? scale : 0.0F, x[j]);
      }
#pragma unroll
      for (int j = 0; j < kPack; ++j) {
        const float other = from_lane(x[0][j], 16);
        along[0] += x[0][j] * other;
        along[1] += x[1][j] * from_lane(x[1][j], 16);
        across += x[1][j] * (has_query ? other : x[0][j]);
      }
      along[0] = sum_of_16(along[0]);
      along[1] = sum_of_16(along[1]);
      across = sum_of_16(across);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int t = row_of(i + j);
        float* to = (has_query ? rows.queries[t] : rows.keys[t]) + lane() % 16 * kPack;
#pragma unroll
        for (int k = 0; k < kPack; ++k) to[k] = x[j][k];
        if (lane() == 0) rows.numbers[t].along = along[j];
      }
      if (lane() == 0) rows.numbers[row_of(i + 1)].across = across;
      if (lane() == 16) rows.numbers[row_of(i)].across = across;
    }
    if (thread() < kStage * kColumnPacks) {
      float* to = rows.values[thread() / kColumnPacks] + thread() % kColumnPacks * kPack;
      float x[kPack];
      unpack(values_, x);
#pragma unroll
      for (int j = 0; j < kPack; ++j) to[j] = is_there(thread() / kColumnPacks) ? x[j] : 0.0F;
    }
    if (thread() < kStage) {
      StageRows::Numbers& numbers = rows.numbers[thread()];
      numbers.beta = is_there(thread()) ? beta_ : 0.0F;
      numbers.decay = !is_there(thread())           ? 1.0F
                      : first_ + thread() == start_ ? 0.0F
                                                    : expf(growth_);
    }
  }

 private:
  __device__ static int thread() {
    return static_cast<int>(threadIdx.x);
  }
  __device__ static int warp() {
    return thread() / 32;
  }
  __device__ static int lane() {
    return thread() % 32;
  }
  // Of the stage, that fetch i of the warp is: of two fetches, a pair of rows.
  __device__ static int row_of(int i) {
    return 2 * (warp() + i / 2 * (kThreads / 32)) + i % 2;
  }

  __device__ bool is_there(int row_of_stage) const {
    return first_ + row_of_stage < in_.a.sequence;
  }
  // For a row beyond the sequence the last one, which then counts for nothing.
  __device__ int64_t row(int row_of_stage) const {
    return first_row_ + min(first_ + row_of_stage, in_.a.sequence - 1);
  }

  // Over the lanes that have the query, or the key.
  __device__ static float sum_of_16(float x) {
#pragma unroll
    for (int width = 8; width > 0; width /= 2) x += from_lane(x, width);
    return x;
  }
  __device__ static void normalize(const DeltaPack& pack, float scale, float (&x)[kPack]) {
    unpack(pack, x);
    float squares = 0;
#pragma unroll
    for (const float value : x) squares += value * value;
    const float factor = rsqrtf(sum_of_16(squares) + static_cast<float>(kDeltaNormEpsilon)) * scale;
#pragma unroll
    for (float& value : x) value *= factor;
  }

  const DeltaOperands& in_;
  int64_t first_row_;
  int head_;
  int first_column_;
  // What was fetched.
  int first_ = 0;  // the stage's first row, in the sequence
  DeltaPack queries_and_keys_[kFetches] = {};
  DeltaPack values_ = {};
  float beta_ = 0;
  float growth_ = 0;
  int start_ = 0;  // the position at which the document begins
};

// Sums over the lanes of two columns, x[row][column] being a lane's part for two rows: of column 0
// in lanes with an even number, of column 1 in the others.
__device__ __forceinline__ void column_sums(const float (&x)[2][2], int lane, float (&sums)[2]) {
  const bool odd = lane % 2 == 1;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    sums[i] = (odd ? x[i][1] : x[i][0]) + from_lane(odd ? x[i][0] : x[i][1], 1);
    sums[i] += from_lane(sums[i], 2);
    sums[i] += from_lane(sums[i], 4);
  }
}

// The same, of row 1 in lanes 2, 3, 6 and 7 of a column, and of row 0 in the others.
__device__ __forceinline__ float row_and_column_sum(const float (&x)[2][2], int lane) {
  const bool odd = lane % 2 == 1;
  const bool second = lane % 4 >= 2;
  float own[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    own[i] = (odd ? x[i][1] : x[i][0]) + from_lane(odd ? x[i][0] : x[i][1], 1);
  }
  const float sum = (second ? own[1] : own[0]) + from_lane(second ? own[0] : own[1], 2);
  return sum + from_lane(sum, 4);
}

// A lane's elements of a row: 4 of each 32.
struct RowPart {
  float4 parts[kParts];

  __device__ RowPart(const float* row, int lane) {
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      parts[i] = *reinterpret_cast<const float4*>(row + 4 * (lane + kLanes * i));
    }
  }
};

// The same of a column of the state, or of its gradient.
struct ColumnPart {
  float4 parts[kParts] = {};

  __device__ float dot(const RowPart& row) const {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const float4& x = row.parts[i];
      const float4& s = parts[i];
      sum = fmaf(s.x, x.x, fmaf(s.y, x.y, fmaf(s.z, x.z, fmaf(s.w, x.w, sum))));
    }
    return sum;
  }
  __device__ void scale(float factor) {
#pragma unroll
    for (float4& s : parts) {
      s.x *= factor;
      s.y *= factor;
      s.z *= factor;
      s.w *= factor;
    }
  }
  // + factor row
  __device__ void add(const RowPart& row, float factor) {
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const float4& x = row.parts[i];
      float4& s = parts[i];
      s.x = fmaf(x.x, factor, s.x);
      s.y = fmaf(x.y, factor, s.y);
      s.z = fmaf(x.z, factor, s.z);
      s.w = fmaf(x.w, factor, s.w);
    }
  }
  __device__ void store(Bf16* to, int lane) const {
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const float4& s = parts[i];
      auto* const pairs = reinterpret_cast<__nv_bfloat162*>(to + 4 * (lane + kLanes * i));
      pairs[0] = __floats2bfloat162_rn(s.x, s.y);
      pairs[1] = __floats2bfloat162_rn(s.z, s.w);
    }
  }
};

// A block for each kColumns columns of each value head of each sequence.
template <Scan kScan>
__global__ __launch_bounds__(kThreads, 2) void delta_scan_kernel(DeltaOperands in) {
  extern __shared__ __align__(16) unsigned char memory[];
  StageRows& rows = *reinterpret_cast<StageRows*>(memory);
  const GatedDeltaRuleAttributes& a = in.a;
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % kLanes;
  const int column = thread / kLanes * 2;    // the first of two,
  const int own_column = column + lane % 2;  // and the one whose sums the lane has
  const int head = static_cast<int>(blockIdx.x) % a.value_heads;
  const int64_t sequence = blockIdx.x / a.value_heads;
  const int64_t first_row = sequence * a.sequence;
  const int first_column = static_cast<int>(blockIdx.y) * kColumns;
  const int stages = (a.sequence + kStage - 1) / kStage;

  StageLoader<kScan> loader(in, first_row, head, first_column);
  ColumnPart state[2];
  constexpr bool kBackward = kScan == Scan::adjoint;
  const auto stage_of = [&](int i) { return kBackward ? stages - 1 - i : i; };
  loader.fetch(stage_of(0));
  for (int i = 0; i < stages; ++i) {
    const int stage = stage_of(i);
    const int first = stage * kStage;
    loader.store(rows);
    __syncthreads();
    if (i + 1 < stages) loader.fetch(stage_of(i + 1));
    if (kScan != Scan::forward) {
      constexpr int kStages = kDeltaChunk / kStage;
      const bool is_border =
          kBackward ? stage + 1 == stages || (stage + 1) % kStages == 0 : stage % kStages == 0;
      if (is_border) {
        Bf16* const to = (kBackward ? in.d_states : in.states) +
                         in.state_of(sequence, head, stage / kStages) +
                         (first_column + column) * kDeltaHead;
        state[0].store(to, lane);
        state[1].store(to + kDeltaHead, lane);
      }
    }
    const int count = min(kStage, a.sequence - first);
    // Two rows at a time, in the order of the scan: what a state gives is that of the state before
    // both, and what the first row adds to it.
    for (int j = 0; j < count; j += 2) {
      const int pair = kBackward ? (count - 1 - j) / 2 * 2 : j;
      const int t[2] = {pair + (kBackward ? 1 : 0), pair + (kBackward ? 0 : 1)};
      const StageRows::Numbers numbers[2] = {rows.numbers[t[0]], rows.numbers[t[1]]};
      const float along_keys = rows.numbers[pair].across;
      const float along_query = rows.numbers[pair + 1].across;
      const float value[2] = {rows.values[t[0]][own_column], rows.values[t[1]][own_column]};
      const RowPart key[2] = {RowPart(rows.keys[t[0]], lane), RowPart(rows.keys[t[1]], lane)};
      float of_key[2][2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        for (int c = 0; c < 2; ++c) of_key[i][c] = state[c].dot(key[i]);
      }
      float sums[2];
      column_sums(of_key, lane, sums);
      const float decay = numbers[0].decay * numbers[1].decay;
      float keys[2];  // what the lane's column gets of the keys
      if constexpr (kScan == Scan::adjoint) {
        const float du_0 = sums[0] + numbers[0].along * value[0];
        const float dv_0 = numbers[0].beta * du_0;
        const float du_1 =
            numbers[0].decay * (sums[1] + along_query * value[0] - along_keys * dv_0) +
            numbers[1].along * value[1];
        const float dv_1 = numbers[1].beta * du_1;
        if (lane < 2) {
          rows.first[t[0]][own_column] = round_to<Bf16>(du_0);
          rows.first[t[1]][own_column] = round_to<Bf16>(du_1);
          rows.second[t[0]][own_column] = round_to<Bf16>(dv_0);
          rows.second[t[1]][own_column] = round_to<Bf16>(dv_1);
        }
        keys[0] = -decay * dv_0;
        keys[1] = -numbers[1].decay * dv_1;
      } else {
        const float u_0 = value[0] - numbers[0].decay * sums[0];
        const float own_0 = numbers[0].beta * u_0;
        const float u_1 =
            value[1] - numbers[1].decay * (numbers[0].decay * sums[1] + along_keys * own_0);
        const float own_1 = numbers[1].beta * u_1;
        if constexpr (kScan == Scan::forward) {
          const RowPart query[2] = {RowPart(rows.queries[t[0]], lane),
                                    RowPart(rows.queries[t[1]], lane)};
          float of_query[2][2];
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            for (int c = 0; c < 2; ++c) of_query[i][c] = state[c].dot(query[i]);
          }
          const float sum = row_and_column_sum(of_query, lane);
          const float o_0 = numbers[0].decay * sum + numbers[0].along * own_0;
          const float o_1 =
              decay * sum + numbers[1].decay * along_query * own_0 + numbers[1].along * own_1;
          if (lane < 2) rows.first[t[0]][own_column] = round_to<Bf16>(o_0);
          if (lane == 2 || lane == 3) rows.first[t[1]][own_column] = round_to<Bf16>(o_1);
        } else if (lane < 2) {
          rows.first[t[0]][own_column] = round_to<Bf16>(u_0);
          rows.first[t[1]][own_column] = round_to<Bf16>(u_1);
        }
        keys[0] = numbers[1].decay * own_0;
        keys[1] = own_1;
      }
      const float others[2] = {from_lane(keys[0], 1), from_lane(keys[1], 1)};
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        state[c].scale(decay);
        if constexpr (kScan == Scan::adjoint) {
          state[c].add(RowPart(rows.queries[t[0]], lane), decay * rows.values[t[0]][column + c]);
          state[c].add(RowPart(rows.queries[t[1]], lane),
                       numbers[1].decay * rows.values[t[1]][column + c]);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          state[c].add(key[i], lane % 2 == c ? keys[i] : others[i]);
        }
      }
    }
    __syncthreads();
    const int t = thread / kColumnPacks;
    if (t < count) {
      const int pack = thread % kColumnPacks * kPack;
      const int64_t row = first_row + first + t;
      const int64_t at = row * a.value_size() + head * kDeltaHead + first_column + pack;
      Bf16* const first_out = kScan == Scan::forward  ? in.out
                              : kScan == Scan::states ? in.u
                                                      : in.du;
      store_delta_pack(first_out + at, load_delta_pack(&rows.first[t][pack]));
      if (kBackward) {
        store_delta_pack(in.d_qkv + row * a.row_size() + a.value_of(head) + first_column + pack,
                         load_delta_pack(&rows.second[t][pack]));
      }
    }
  }
}

template <Scan kScan>
void launch_scan(const CudaKernelArguments& args, const DeltaOperands& operands) {
  allow_shared_bytes(delta_scan_kernel<kScan>, sizeof(StageRows));
  const auto heads =
      static_cast<unsigned>(operands.rows / operands.a.sequence * operands.a.value_heads);
  launch(args, {dim3(heads, kDeltaHead / kColumns), kThreads, sizeof(StageRows)},
         delta_scan_kernel<kScan>, operands);
}

}  // namespace

void delta_rule_sm90(const CudaKernelArguments& args) {
  launch_scan<Scan::forward>(args, {.a = args.attributes->as<GatedDeltaRuleAttributes>(),
                                    .rows = args.input(0).shape[0],
                                    .qkv = args.in<Bf16>(0),
                                    .gates = args.in<float>(1),
                                    .starts = args.in<int32_t>(2),
                                    .out = args.out<Bf16>(0)});
}

void delta_rule_gradient_sm90(const CudaKernelArguments& args) {
  DeltaOperands operands{.a = args.attributes->as<GatedDeltaRuleAttributes>(),
                         .rows = args.input(1).shape[0],
                         .qkv = args.in<Bf16>(1),
                         .gates = args.in<float>(2),
                         .starts = args.in<int32_t>(3),
                         .d_out = args.in<Bf16>(0),
                         .d_qkv = args.out<Bf16>(0),
                         .d_gates = args.out<float>(1),
                         .u = reinterpret_cast<Bf16*>(args.scratch)};
  const int64_t values = operands.rows * operands.a.value_size();
  const int64_t states = operands.rows / operands.a.sequence * operands.a.value_heads *
                         operands.chunks() * operands.a.state_size();
  operands.du = operands.u + values;
  operands.states = operands.du + values;
  operands.d_states = operands.states + states;
  launch_scan<Scan::states>(args, operands);
  launch_scan<Scan::adjoint>(args, operands);
  launch_delta_chunks(args, operands);
}

}  // namespace troupe
