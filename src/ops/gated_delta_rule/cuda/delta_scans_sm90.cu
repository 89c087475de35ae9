#include "ops/gated_delta_rule/cuda/delta_sm90.cuh"

namespace troupe {
namespace {

constexpr int kColumns = 32;  // of the state, that a block has
constexpr int kStage = 32;    // rows that lie in shared memory at a time
constexpr int kThreads = 256;
constexpr int kLanes = 8;  // of a warp, that share a column
constexpr int kParts = kDeltaHead / (4 * kLanes);
constexpr int kPack = Pack<Bf16>::kElements;
constexpr int kRowPacks = 2 * kDeltaHead / kPack;  // of a query and a key
constexpr int kFetches = kStage * kRowPacks / kThreads;
constexpr int kColumnPacks = kColumns / kPack;

static_assert(kRowPacks == 32, "a warp fetches one row's query and key");
static_assert(kColumns * kLanes == kThreads, "every thread has a part of one column");
static_assert(kDeltaChunk % kStage == 0, "chunks begin where stages do");

// forward: o of each row. states: u of each row, and S before each chunk. adjoint: backwards over
// the rows, du and dv of each, and dS after each chunk.
enum class Scan { forward, states, adjoint };

struct StageRows {
  float keys[kStage][kDeltaHead];  // normed
  float queries[kStage][kDeltaHead];
  float along[kStage];  // query . key
  float beta[kStage];
  float decay[kStage];             // 0 at the beginning of a document
  float values[kStage][kColumns];  // v, or do
  Bf16 first[kStage][kColumns];    // o, u or du
  Bf16 second[kStage][kColumns];   // dv
};

// The block's rows, on their way from memory: fetched into registers while the stage before is
// worked on.
template <Scan kScan>
class StageLoader {
 public:
  __device__ StageLoader(const DeltaOperands& in, int64_t first_row, int head, int first_column)
      : in_(in), first_row_(first_row), head_(head), first_column_(first_column) {}

  __device__ void fetch(int stage) {
    const int first = stage * kStage;
#pragma unroll
    for (int i = 0; i < kFetches; ++i) {
      const int t = first + warp() + i * (kThreads / 32);
      if (t >= in_.a.sequence) continue;
      const int64_t column = lane() < 16 ? in_.a.query_of(head_) + lane() * kPack
                                         : in_.a.key_of(head_) + (lane() - 16) * kPack;
      queries_and_keys_[i] = load_pack(in_.qkv + (first_row_ + t) * in_.a.row_size() + column);
    }
    const int t = first + thread() / kColumnPacks;
    if (thread() < kStage * kColumnPacks && t < in_.a.sequence) {
      const int64_t column = first_column_ + thread() % kColumnPacks * kPack;
      const int64_t row = first_row_ + t;
      values_ = load_pack(kScan == Scan::adjoint
                              ? in_.d_out + row * in_.a.value_size() + head_ * kDeltaHead + column
                              : in_.qkv + row * in_.a.row_size() + in_.a.value_of(head_) + column);
    }
    if (thread() < kStage && first + thread() < in_.a.sequence) {
      const int64_t row = first_row_ + first + thread();
      const float* gate = in_.gates + row * 2 * in_.a.value_heads;
      beta_ = gate[head_];
      decay_ = in_.begins_document(row) ? 0.0F : expf(gate[in_.a.value_heads + head_]);
    }
  }

  // What was fetched, into shared memory; rows beyond the sequence are not read there.
  __device__ void store(StageRows& rows) const {
    const float scale = lane() < 16 ? rsqrtf(static_cast<float>(kDeltaHead)) : 1.0F;
#pragma unroll
    for (int i = 0; i < kFetches; ++i) {
      const int t = warp() + i * (kThreads / 32);
      float x[kPack];
      float squares = 0;
#pragma unroll
      for (int j = 0; j < kPack; ++j) {
        x[j] = widen(queries_and_keys_[i].values[j]);
        squares += x[j] * x[j];
      }
#pragma unroll
      for (int width = 8; width > 0; width /= 2) {
        squares += __shfl_xor_sync(0xffffffffU, squares, width);
      }
      const float factor = rsqrtf(squares + static_cast<float>(kDeltaNormEpsilon)) * scale;
      float along = 0;
#pragma unroll
      for (int j = 0; j < kPack; ++j) {
        x[j] *= factor;
        along += x[j] * __shfl_xor_sync(0xffffffffU, x[j], 16);
      }
#pragma unroll
      for (int width = 8; width > 0; width /= 2) {
        along += __shfl_xor_sync(0xffffffffU, along, width);
      }
      float* to = (lane() < 16 ? rows.queries[t] : rows.keys[t]) + lane() % 16 * kPack;
#pragma unroll
      for (int j = 0; j < kPack; ++j) to[j] = x[j];
      if (lane() == 0) rows.along[t] = along;
    }
    if (thread() < kStage * kColumnPacks) {
      float* to = rows.values[thread() / kColumnPacks] + thread() % kColumnPacks * kPack;
#pragma unroll
      for (int j = 0; j < kPack; ++j) to[j] = widen(values_.values[j]);
    }
    if (thread() < kStage) {
      rows.beta[thread()] = beta_;
      rows.decay[thread()] = decay_;
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

  const DeltaOperands& in_;
  int64_t first_row_;
  int head_;
  int first_column_;
  Pack<Bf16> queries_and_keys_[kFetches] = {};
  Pack<Bf16> values_ = {};
  float beta_ = 0;
  float decay_ = 0;
};

// Sum over the lanes of a column.
__device__ __forceinline__ float column_sum(float x) {
#pragma unroll
  for (int width = 1; width < kLanes; width *= 2) x += __shfl_xor_sync(0xffffffffU, x, width);
  return x;
}

// The same of two numbers at once.
__device__ __forceinline__ void column_sums(float& x, float& y, bool odd) {
  float own = odd ? y : x;
  own += __shfl_xor_sync(0xffffffffU, odd ? x : y, 1);
#pragma unroll
  for (int width = 2; width < kLanes; width *= 2) own += __shfl_xor_sync(0xffffffffU, own, width);
  const float other = __shfl_xor_sync(0xffffffffU, own, 1);
  x = odd ? other : own;
  y = odd ? own : other;
}

// A lane's elements of a column of the state, or of its gradient: 4 of each 32.
struct ColumnPart {
  float4 parts[kParts] = {};

  __device__ float4 of(const float* row, int lane, int part) const {
    return *reinterpret_cast<const float4*>(row + 4 * (lane + kLanes * part));
  }
  __device__ float dot(const float* row, int lane) const {
    float sums[kParts];
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const float4 x = of(row, lane, i);
      const float4& s = parts[i];
      sums[i] = s.x * x.x + s.y * x.y + s.z * x.z + s.w * x.w;
    }
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
  }
  // decay of it + factor row
  __device__ void correct(float decay, const float* row, float factor, int lane) {
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const float4 x = of(row, lane, i);
      float4& s = parts[i];
      s.x = fmaf(x.x, factor, decay * s.x);
      s.y = fmaf(x.y, factor, decay * s.y);
      s.z = fmaf(x.z, factor, decay * s.z);
      s.w = fmaf(x.w, factor, decay * s.w);
    }
  }
  // + factor row
  __device__ void add(const float* row, float factor, int lane) {
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const float4 x = of(row, lane, i);
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
  const int column = thread / kLanes;
  const int lane = thread % kLanes;
  const int head = static_cast<int>(blockIdx.x) % a.value_heads;
  const int64_t sequence = blockIdx.x / a.value_heads;
  const int64_t first_row = sequence * a.sequence;
  const int first_column = static_cast<int>(blockIdx.y) * kColumns;
  const int stages = (a.sequence + kStage - 1) / kStage;

  StageLoader<kScan> loader(in, first_row, head, first_column);
  ColumnPart state;
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
        state.store(to, lane);
      }
    }
    const int count = min(kStage, a.sequence - first);
    for (int j = 0; j < count; ++j) {
      const int t = kBackward ? count - 1 - j : j;
      const float value = rows.values[t][column];
      const float beta = rows.beta[t];
      const float decay = rows.decay[t];
      float of_key = state.dot(rows.keys[t], lane);
      if constexpr (kScan == Scan::forward) {
        float of_query = state.dot(rows.queries[t], lane);
        column_sums(of_key, of_query, lane % 2 == 1);
        const float factor = beta * (value - decay * of_key);
        if (lane == 0) {
          rows.first[t][column] = round_to<Bf16>(decay * of_query + rows.along[t] * factor);
        }
        state.correct(decay, rows.keys[t], factor, lane);
      } else if constexpr (kScan == Scan::states) {
        const float u = value - decay * column_sum(of_key);
        if (lane == 0) rows.first[t][column] = round_to<Bf16>(u);
        state.correct(decay, rows.keys[t], beta * u, lane);
      } else {
        const float du = column_sum(of_key) + rows.along[t] * value;
        const float dv = beta * du;
        if (lane == 0) {
          rows.first[t][column] = round_to<Bf16>(du);
          rows.second[t][column] = round_to<Bf16>(dv);
        }
        state.add(rows.queries[t], value, lane);
        state.correct(decay, rows.keys[t], -dv * decay, lane);
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
      store_pack(first_out + at, *reinterpret_cast<const Pack<Bf16>*>(&rows.first[t][pack]));
      if (kBackward) {
        store_pack(in.d_qkv + row * a.row_size() + a.value_of(head) + first_column + pack,
                   *reinterpret_cast<const Pack<Bf16>*>(&rows.second[t][pack]));
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
