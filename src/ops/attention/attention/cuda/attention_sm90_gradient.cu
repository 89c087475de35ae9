// The gradients of attention on Hopper. See attention_sm90.cuh.
//
// A block has 128 keys of some query heads of a group and goes through the queries that see them,
// head after head. What it adds to their gradients goes to sums in global memory, in fp32, block
// after block in the order of falling keys: a turn for each tile of queries says whose it is. So
// every sum has one order, and the same operands give the same bits. A block begins with the first
// queries that see it, so blocks come to a tile one after the other by themselves, and the order
// costs little.
//
// The gradients of queries take the gradients of scores of both warpgroups' keys. Each computes its
// share of the last tile's after the scores of the next, when the other has left its own. So they
// may be most of a tile apart, and one multiplies while the other does arithmetic.
#include "ops/attention/attention/attention_cuda.h"
#include "ops/attention/attention/cuda/attention_sm90.cuh"

namespace troupe {
namespace {

constexpr int kTileRows = kSm90TileRows;

// Columns of queries' gradients that a warpgroup computes and hands on at a time, as boxes of
// kTileRows x 64 numbers. Number i of its thread t, in fours, is number i 128 + t of the box: rows
// and columns as ThreadPlace says.
constexpr int kBoxNumbers = kTileRows * 64;
constexpr int kBoxBytes = kBoxNumbers * 4;
// Gradients of scores, in bf16, twice, of all keys of a block; and a box of each warpgroup.
constexpr int kScoreGradientBytes = kBlockRows * 128;
constexpr int kHandBytes = 2 * kScoreGradientBytes + kMathGroups * kBoxBytes;

template <class Sizes>
using GradientCut = AttentionCut<Sizes::kKey, Sizes::kValue, true, kTileRows,
                                 Sizes::kKey <= 128 ? 3 : 2, kHandBytes>;

// The scratch memory. Queries are rows of [B, H, chunks, padded].
struct GradientScratch {
  float* lse;   // in powers of two; of rows that are not there, so large that probabilities are 0
  float* dots;  // D (attention.h)
  float* d_q;   // boxes of the tiles of rows
  int32_t* turns;   // of the same boxes: how many blocks have added to it
  int32_t* ticket;  // how many blocks have begun
  // Gradients of keys and values of the heads of a block: a part of those of a group.
  Bf16* d_k;  // [B positions, parts d]
  Bf16* d_v;  // [B positions, parts e]
  int heads_each;
  int parts;
  int64_t chunks;
  int64_t padded;  // rows of a chunk, in whole blocks
  int boxes;       // of a tile

  GradientScratch(const AttentionShape& shape, std::byte* scratch)
      : heads_each(sm90_heads_each(shape)),
        parts(shape.attributes.heads / heads_each),
        chunks(shape.rows() / shape.chunk()),
        padded(sm90_padded_rows(shape)),
        boxes(sm90_key_columns(shape.attributes) / 64) {
    const Sm90Scratch begins = sm90_gradient_scratch(shape);
    lse = reinterpret_cast<float*>(scratch + begins.lse);
    dots = reinterpret_cast<float*>(scratch + begins.dots);
    d_q = reinterpret_cast<float*>(scratch + begins.d_q);
    turns = reinterpret_cast<int32_t*>(scratch + begins.turns);
    ticket = turns + sm90_prepared_rows(shape) / kTileRows * boxes;
    d_k = reinterpret_cast<Bf16*>(scratch + begins.head_gradients);
    d_v = d_k + shape.attributes.batch * shape.positions() * parts * shape.attributes.head_dim;
  }

  __device__ int64_t index(const AttentionSizes& sizes, int64_t b, int head, int64_t chunk,
                           int64_t row) const {
    return ((b * sizes.heads + head) * chunks + chunk) * padded + row;
  }
};

// Where the gradients of the keys and values of each part of the heads go.
struct PartGradients {
  Bf16* d_k;
  Bf16* d_v;
  int64_t key_stride;  // elements from row to row
  int64_t value_stride;
};

// A row of the scratch memory's queries.
struct PreparedRow {
  int64_t b;
  int head;
  int64_t chunk;
  int64_t row;  // of the chunk

  __device__ PreparedRow(const GradientScratch& scratch, const AttentionSizes& sizes, int64_t index)
      : b(index / scratch.padded / scratch.chunks / sizes.heads),
        head(static_cast<int>(index / scratch.padded / scratch.chunks % sizes.heads)),
        chunk(index / scratch.padded % scratch.chunks),
        row(index % scratch.padded) {}
  __device__ bool exists(const AttentionSizes& sizes) const { return row < sizes.chunk; }
  // Among the rows of all queries.
  __device__ int64_t token(const AttentionSizes& sizes) const {
    return b * sizes.rows + chunk * sizes.chunk + row;
  }
};

// A warp for each row and head.
__global__ void prepare_kernel(const Bf16* d_out, const Bf16* out, const float* lse,
                               GradientScratch scratch, int64_t count, AttentionSizes sizes) {
  const int64_t i = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / 32;
  if (i >= count) return;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  // Neighbouring warps have neighbouring heads.
  const int64_t rest = i / sizes.heads;
  const int64_t per_sequence = scratch.chunks * scratch.padded;
  const int64_t to =
      (rest / per_sequence * sizes.heads + i % sizes.heads) * per_sequence + rest % per_sequence;
  const PreparedRow own(scratch, sizes, to);
  const bool exists = own.exists(sizes);
  const int64_t from = own.token(sizes) * sizes.heads + own.head;
  constexpr int kElements = Pack<Bf16>::kElements;
  const int column = lane * kElements;
  float sum = 0;
  if (exists && column < sizes.value_dim) {
    const Pack<Bf16> a = load_pack(d_out + from * sizes.value_dim + column);
    const Pack<Bf16> c = load_pack(out + from * sizes.value_dim + column);
#pragma unroll
    for (int j = 0; j < kElements; ++j) sum += widen(a.values[j]) * widen(c.values[j]);
  }
  sum = warp_sum(sum);
  if (to % kTileRows == 0 && lane < scratch.boxes) {
    scratch.turns[to / kTileRows * scratch.boxes + lane] = 0;
  }
  if (lane != 0) return;
  scratch.lse[to] = exists ? lse[from] * kLog2E : infinity<float>();
  scratch.dots[to] = sum;
  if (to == 0) *scratch.ticket = 0;
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// The query heads and keys of a block, of sequence b.
struct KeyBlock {
  int64_t b;
  int first_head;
  int end_head;
  AttentionBlock keys;
};

// Calls visit(head, chunk, queries) for the tiles of queries that see any of the keys, in order.
template <class Visit>
__device__ __forceinline__ void for_query_tiles(const AttentionSizes& sizes, const KeyBlock& block,
                                                const Visit& visit) {
  const auto chunks = static_cast<int>(sizes.rows / sizes.chunk);
  const auto tiles = static_cast<int>((sizes.chunk + kTileRows - 1) / kTileRows);
  for (int head = block.first_head; head < block.end_head; ++head) {
    for (int chunk = 0; chunk < chunks; ++chunk) {
      const int64_t before = block.keys.first - sizes.position(chunk);
      for (int tile = before > 0 ? static_cast<int>(before / kTileRows) : 0; tile < tiles; ++tile) {
        const QueryTile queries = QueryTile::make<kTileRows>(sizes, chunk, tile);
        // Nor do later ones.
        if (!queries.mask(sizes, block.b).any(queries.block(), block.keys)) break;
        visit(head, chunk, queries);
      }
    }
  }
}

// What the multiplying warps know of a stage's tile of queries. No queries: there are no more.
struct StagePlace {
  int position;   // of the first query
  int count;      // of queries
  int row;        // of the first query, of its sequence
  int first_key;  // that the last query sees
  int box;        // the first of the tile's sums
  int turn;       // the block's

  __device__ static StagePlace load(uint32_t address) {
    const int4 queries = sm90::load_shared(address);
    const int4 sums = sm90::load_shared(address + 16);
    return {queries.x, queries.y, queries.z, queries.w, sums.x, sums.y};
  }
  __device__ void store(uint32_t address) const {
    sm90::store_shared(address, make_int4(position, count, row, first_key));
    sm90::store_shared(address + 16, make_int4(box, turn, 0, 0));
  }
};

// Adds the boxes that a warpgroup hands on to the sums, each in its turn, until one is none. By one
// thread.
template <class Cut>
__device__ void add_boxes(const AttentionShared<Cut>& shared, const GradientScratch& scratch,
                          int group) {
  const uint32_t hand = shared.own() + 2 * kScoreGradientBytes + group * kBoxBytes;
  for (uint32_t parity = 0;; parity ^= 1) {
    sm90::barrier_wait(shared.written(group), parity);
    const auto box = static_cast<int>(sm90::load_shared_word(shared.handed(group)));
    const auto turn = static_cast<int>(sm90::load_shared_word(shared.handed(group) + 4));
    if (box < 0) return;
    float* const sums = scratch.d_q + int64_t{box} * kBoxNumbers;
    int32_t* const turns = scratch.turns + box;
    if (turn == 0) {
      sm90::store_bytes(sums, hand, kBoxBytes);
    } else {
      sm90::wait_turn(turns, turn);
      sm90::fence_all_copies();
      sm90::add_numbers(sums, hand, kBoxBytes);
    }
    sm90::commit_stores();
    sm90::wait_stores_read<0>();
    sm90::barrier_arrive(shared.taken(group));
    sm90::wait_stores();
    sm90::fence_all_copies();
    sm90::pass_turn(turns, turn + 1);
  }
}

// Number `i` of the sums that were packed.
template <int kSteps>
__device__ __forceinline__ float unpack_weight(const uint32_t (&weights)[kSteps][4], int i) {
  const uint32_t pair = weights[i / 8][i % 8 / 2];
  return __uint_as_float(i % 2 == 0 ? pair << 16 : pair & 0xFFFF0000U);
}

// Stores the gradients of scores of a warpgroup's keys, packed, as rows of keys in which queries
// follow each other, swizzled.
__device__ __forceinline__ void store_score_gradients(const uint32_t (&packed)[kTileRows / 16][4],
                                                      uint32_t tile, int group) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) % 128 / 32;
  const int row = group * kGroupRows + warp * 16 + lane / 8 % 2 * 8 + lane % 8;
#pragma unroll
  for (int step = 0; step < kTileRows / 16; ++step) {
    const int place = (2 * step + lane / 16) ^ (lane % 8);
    sm90::store_matrices(tile + row * 128 + place * 16, packed[step]);
  }
}

#endif

// A block for 128 keys of some query heads: which, the order says in which blocks begin. A block
// waits for those with later keys alone, which have begun before it, so there is no deadlock.
template <class Sizes>
__global__ void __launch_bounds__(kAttentionThreads, 1)
    gradients_kernel(const __grid_constant__ CUtensorMap q_map,
                     const __grid_constant__ CUtensorMap d_out_map,
                     const __grid_constant__ CUtensorMap k_map,
                     const __grid_constant__ CUtensorMap v_map,
                     const __grid_constant__ GradientScratch scratch,
                     const __grid_constant__ PartGradients gradients,
                     const __grid_constant__ AttentionSizes sizes) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Cut = GradientCut<Sizes>;
  using FixedKeys = typename Cut::FixedKeys;
  using FixedValues = typename Cut::FixedValues;
  using Keys = typename Cut::Keys;
  using Values = typename Cut::Values;
  __shared__ int32_t own_ticket;
  if (threadIdx.x == 0) own_ticket = atomicAdd(scratch.ticket, 1);
  const AttentionShared<Cut> shared = open_shared<Cut>();
  const auto blocks = static_cast<int>((sizes.positions + kBlockRows - 1) / kBlockRows);
  const int block = blocks - 1 - own_ticket % blocks;
  const int part = own_ticket / blocks % scratch.parts;
  const int64_t b = own_ticket / blocks / scratch.parts;
  const int group = part / (scratch.parts / sizes.groups);
  const AttentionBlock keys{int64_t{block} * kBlockRows, kBlockRows};
  const KeyBlock whole{b, part * scratch.heads_each, (part + 1) * scratch.heads_each, keys};
  const ThreadPlace place;
  Ring<Cut> ring(shared);
  if (place.group == kMathGroups) {
    sm90::release_registers<kLoaderRegisters>();
    const int warp = static_cast<int>(threadIdx.x) / 32 - 4 * kMathGroups;
    if (threadIdx.x % 32 != 0 || warp > kMathGroups) return;
    if (warp > 0) return add_boxes(shared, scratch, warp - 1);
    sm90::barrier_arrive_expecting(shared.loaded(), Cut::kFixedBytes);
    FixedKeys::load(k_map, shared.loaded(), shared.fixed_keys(), group, keys.first, b);
    FixedValues::load(v_map, shared.loaded(), shared.fixed_values(), group, keys.first, b);
    for_query_tiles(sizes, whole, [&](int head, int chunk, const QueryTile& queries) {
      const int64_t row = scratch.index(sizes, b, head, chunk, queries.row - chunk * sizes.chunk);
      const int64_t last = queries.position + queries.count - 1;
      const int64_t first_key = queries.mask(sizes, b).first_key(last);
      // The block of the last keys that any of the queries sees is the first.
      const int64_t turn = last / kBlockRows - block;
      ring.fill(Cut::kStageBytes + 2 * Cut::kNumberBytes, [&](uint32_t barrier, int stage) {
        const StagePlace tile{.position = static_cast<int>(queries.position),
                              .count = static_cast<int>(queries.count),
                              .row = static_cast<int>(queries.row),
                              .first_key = static_cast<int>(first_key),
                              .box = static_cast<int>(row / kTileRows) * (Cut::kKey / 64),
                              .turn = static_cast<int>(turn)};
        tile.store(shared.place(stage));
        Keys::load(q_map, barrier, shared.keys(stage), head, queries.row, b);
        Values::load(d_out_map, barrier, shared.values(stage), head, queries.row, b);
        sm90::load_bytes(barrier, shared.numbers(stage, 0), scratch.lse + row, Cut::kNumberBytes);
        sm90::load_bytes(barrier, shared.numbers(stage, 1), scratch.dots + row, Cut::kNumberBytes);
      });
    });
    ring.fill(0, [&](uint32_t, int stage) { StagePlace{}.store(shared.place(stage)); });
    return;
  }
  sm90::take_registers<kMathRegisters>();
  // Then probabilities are not kept but as they are multiplied, and values' gradients are waited
  // for: with more in flight the compiler puts wgmma in series.
  constexpr bool kFewRegisters = Cut::kKey > 128;
  const int first_row = place.group * kGroupRows;
  const int own_first = static_cast<int>(keys.first) + first_row;
  const auto key = static_cast<int>(keys.first) + place.row;
  const float scale = static_cast<float>(sizes.scale) * kLog2E;
  const uint32_t hand =
      shared.own() + 2 * kScoreGradientBytes + place.group * kBoxBytes + threadIdx.x % 128 * 16;
  uint32_t hand_parity = 1;
  float dk[Cut::kKey / 2] = {};
  float dv[Cut::kValue / 2] = {};
  const auto score_gradients_at = [&](int number) {
    return shared.own() + number % 2 * kScoreGradientBytes;
  };
  // Once the last box that was handed on is taken.
  const auto wait_for_hand = [&] {
    sm90::barrier_wait(shared.taken(place.group), hand_parity);
    hand_parity ^= 1;
  };
  const auto hand_on = [&](int box, int turn) {
    if (threadIdx.x % 128 == 0) {
      sm90::store_shared(shared.handed(place.group),
                         make_float2(__int_as_float(box), __int_as_float(turn)));
    }
    sm90::fence_copies();
    __syncwarp();
    if (threadIdx.x % 32 == 0) sm90::barrier_arrive(shared.written(place.group));
  };
  // Computes this warpgroup's boxes of the gradients of tile `number` of queries, once all warps
  // have left what they have of their scores; of the boxes, from `first` on, the two take turns. No
  // products may be under way.
  const auto add_to_queries = [&](int number, int first, int turn) {
#pragma unroll
    for (int by = 0; by < kMathGroups; ++by) {
      sm90::barrier_wait(shared.left(by, number % 2), number / 2 % 2);
    }
    for (int box = (place.group + number) % kMathGroups; box < Cut::kKey / 64; box += kMathGroups) {
      float sums[32];
      sm90::fence_products();
#pragma unroll
      for (int step = 0; step < kBlockRows / 16; ++step) {
        sm90::multiply_add<64, true, true>(
            sums, sm90::matrix_descriptor(score_gradients_at(number) + step * 2048, 16),
            FixedKeys::across_rows(shared.fixed_keys() + box * FixedKeys::kBoxBytes, step),
            step > 0);
      }
      sm90::commit_products();
      sm90::wait_products<0>();
      sm90::order_sums(sums);
      wait_for_hand();
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        sm90::store_shared(
            hand + i * 2048,
            make_int4(__float_as_int(sums[4 * i]), __float_as_int(sums[4 * i + 1]),
                      __float_as_int(sums[4 * i + 2]), __float_as_int(sums[4 * i + 3])));
      }
      hand_on(first + box, turn);
    }
  };
  sm90::barrier_wait(shared.loaded(), 0);
  int number = 0;
  int last_stage = -1;
  int last_box = 0;
  int last_turn = 0;
  for (;; ++number) {
    const int stage = ring.take();
    const StagePlace queries = StagePlace::load(shared.place(stage));
    if (queries.count == 0) break;
    float p[kTileRows / 2];
    sm90::fence_products();
    multiply_heads<FixedKeys, Keys, Cut::kKey>(shared.fixed_keys(), first_row, shared.keys(stage),
                                               p);
    sm90::commit_products();
    sm90::wait_products<0>();
    sm90::order_sums(p);
    // The last tile's products are done, too.
    if (last_stage >= 0) ring.give_back(last_stage);
    last_stage = stage;
    const bool all =
        own_first + kGroupRows - 1 <= queries.position && queries.first_key <= own_first;
#pragma unroll
    for (int j = 0; j < kTileRows / 8; ++j) {
      const int column = 8 * j + place.column;
      const float2 lse = sm90::load_shared_pair(shared.numbers(stage, 0) + 4 * column);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        p[4 * j + i] = power_of_two(fmaf(p[4 * j + i], scale, i % 2 == 0 ? -lse.x : -lse.y));
      }
      if (all) continue;
      const AttentionMask mask = sizes.mask(b, queries.row, queries.position);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int query = queries.position + column + i;
        const bool exists = column + i < queries.count;
        const int first_seen = exists ? static_cast<int>(mask.first_key(query)) : query + 1;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row_key = key + 8 * half;
          if (row_key > query || row_key < first_seen) p[4 * j + 2 * half + i] = 0;
        }
      }
    }
    uint32_t weights[kTileRows / 16][4];
    pack_weights(p, weights);
    if (number > 0) add_to_queries(number - 1, last_box, last_turn);
    last_box = queries.box;
    last_turn = queries.turn;
    float ds[kTileRows / 2];
    sm90::fence_products();
    multiply_heads<FixedValues, Values, Cut::kValue>(shared.fixed_values(), first_row,
                                                     shared.values(stage), ds);
    sm90::commit_products();
    add_weighted_rows<Values>(weights, shared.values(stage), dv);
    sm90::commit_products();
    sm90::wait_products<kFewRegisters ? 0 : 1>();
    sm90::order_sums(ds);
#pragma unroll
    for (int j = 0; j < kTileRows / 8; ++j) {
      const float2 dots =
          sm90::load_shared_pair(shared.numbers(stage, 1) + 4 * (8 * j + place.column));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = 4 * j + i;
        const float probability = kFewRegisters ? unpack_weight(weights, at) : p[at];
        ds[at] = probability * (ds[at] - (i % 2 == 0 ? dots.x : dots.y));
      }
    }
    uint32_t score_gradients[kTileRows / 16][4];
    pack_weights(ds, score_gradients);
    // All have left those of the last tile, so they are done with the one before, which lay here.
    store_score_gradients(score_gradients, score_gradients_at(number), place.group);
    sm90::fence_copies();
    __syncwarp();
    if (threadIdx.x % 32 == 0) sm90::barrier_arrive(shared.left(place.group, number % 2));
    sm90::fence_products();
    add_weighted_rows<Keys>(score_gradients, shared.keys(stage), dk);
    sm90::commit_products();
  }
  sm90::wait_products<0>();
  sm90::order_sums(dv);
  sm90::order_sums(dk);
  if (number > 0) add_to_queries(number - 1, last_box, last_turn);
  wait_for_hand();
  hand_on(-1, 0);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t row = keys.first + place.row + 8 * half;
    if (row >= sizes.positions) continue;
    const int64_t token = b * sizes.positions + row;
    store_head(dk, half, static_cast<float>(sizes.scale), place, sizes.head_dim,
               gradients.d_k + token * gradients.key_stride + part * sizes.head_dim);
    store_head(dv, half, 1.0F, place, sizes.value_dim,
               gradients.d_v + token * gradients.value_stride + part * sizes.value_dim);
  }
#else
  __trap();
#endif
}

// A block for each box; a thread has 8 columns of two rows.
__global__ void __launch_bounds__(256)
    round_query_gradients_kernel(GradientScratch scratch, Bf16* d_q, AttentionSizes sizes) {
  const int64_t tile = int64_t{blockIdx.x} / scratch.boxes;
  const PreparedRow first(scratch, sizes, tile * kTileRows);
  const int fours = static_cast<int>(threadIdx.x) % 8;
  const int pair = static_cast<int>(threadIdx.x) / 8;
  const int column = static_cast<int>(blockIdx.x) % scratch.boxes * 64 + 8 * fours;
  if (column >= sizes.head_dim) return;
  const auto* sums = reinterpret_cast<const float4*>(scratch.d_q) +
                     int64_t{blockIdx.x} * (kBoxNumbers / 4) + fours * 128 + pair * 4;
  const auto scale = static_cast<float>(sizes.scale);
  Pack<Bf16> rows[2];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float4 four = sums[i];
    rows[0].values[2 * i] = round_to<Bf16>(scale * four.x);
    rows[0].values[2 * i + 1] = round_to<Bf16>(scale * four.y);
    rows[1].values[2 * i] = round_to<Bf16>(scale * four.z);
    rows[1].values[2 * i + 1] = round_to<Bf16>(scale * four.w);
  }
  const int64_t to =
      first.token(sizes) * sizes.query_stride + first.head * int64_t{sizes.head_dim} + column;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = pair / 8 * 16 + pair % 8 + 8 * half;
    if (first.row + row >= sizes.chunk) continue;
    store_pack(d_q + to + row * sizes.query_stride, rows[half]);
  }
}

// The gradients of a group's keys and values: sums over the parts of its query heads.
template <class Out>
__global__ void sum_parts_kernel(GradientScratch scratch, Out* d_k, Out* d_v, AttentionSizes sizes,
                                 int64_t rows) {
  constexpr int kElements = Pack<Bf16>::kElements;
  const int parts = scratch.parts / sizes.groups;
  const int key_packs = sizes.groups * sizes.head_dim / kElements;
  const int packs = key_packs + sizes.groups * sizes.value_dim / kElements;
  const int64_t threads = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < rows * packs; i += threads) {
    const int64_t row = i / packs;
    const int pack = static_cast<int>(i % packs);
    const bool is_key = pack < key_packs;
    const int d = is_key ? sizes.head_dim : sizes.value_dim;
    const int element = (is_key ? pack : pack - key_packs) * kElements;
    const int group = element / d;
    const Bf16* from = (is_key ? scratch.d_k : scratch.d_v) +
                       (row * scratch.parts + group * parts) * d + element % d;
    float sums[kElements] = {};
#pragma unroll 4
    for (int part = 0; part < parts; ++part) {
      const Pack<Bf16> own = load_pack(from + part * d);
#pragma unroll
      for (int j = 0; j < kElements; ++j) sums[j] += widen(own.values[j]);
    }
    Out* to = (is_key ? d_k : d_v) + row * sizes.key_stride + element;
#pragma unroll
    for (int j = 0; j < kElements; j += 2) store_pair(to + j, sums[j], sums[j + 1]);
  }
}

template <class Out>
void sum_parts(const CudaKernelArguments& args, const AttentionCall& call,
               const GradientScratch& scratch) {
  const AttentionAttributes& a = call.shape.attributes;
  const int64_t rows = a.batch * call.shape.positions();
  launch(args, {blocks_for(args, rows * a.key_value_row() / 8, 256), 256}, sum_parts_kernel<Out>,
         scratch, static_cast<Out*>(call.d_k), static_cast<Out*>(call.d_v), AttentionSizes(call),
         rows);
}

template <class Sizes>
void run_gradients(const CudaKernelArguments& args, const AttentionCall& call,
                   std::byte* scratch_memory) {
  using Cut = GradientCut<Sizes>;
  const AttentionAttributes& a = call.shape.attributes;
  const AttentionMaps maps(call);
  const AttentionSizes sizes(call);
  const GradientScratch scratch(call.shape, scratch_memory);
  const int64_t count = sm90_prepared_rows(call.shape);
  launch(args, {static_cast<unsigned>(ceil_divide(count, 8)), 256}, prepare_kernel,
         static_cast<const Bf16*>(call.d_out), static_cast<const Bf16*>(call.out),
         static_cast<const float*>(call.lse), scratch, count, sizes);
  const bool by_parts = sm90_sums_parts(call.shape);
  const PartGradients gradients =
      by_parts ? PartGradients{scratch.d_k, scratch.d_v, int64_t{scratch.parts} * a.head_dim,
                               int64_t{scratch.parts} * a.value_size()}
               : PartGradients{static_cast<Bf16*>(call.d_k), static_cast<Bf16*>(call.d_v),
                               call.key_stride, call.key_stride};
  const int64_t blocks = ceil_divide(call.shape.positions(), kBlockRows);
  allow_shared_bytes(gradients_kernel<Sizes>, Cut::kSharedBytes);
  launch(args,
         {static_cast<unsigned>(blocks * scratch.parts * a.batch), kAttentionThreads,
          Cut::kSharedBytes},
         gradients_kernel<Sizes>, maps.queries(kTileRows), maps.d_out(kTileRows),
         maps.keys(kBlockRows), maps.values(kBlockRows), scratch, gradients, sizes);
  launch(args, {static_cast<unsigned>(count / kTileRows * scratch.boxes), 256},
         round_query_gradients_kernel, scratch, static_cast<Bf16*>(call.d_q), sizes);
  if (!by_parts) return;
  if (call.shape.wide_key_gradients) return sum_parts<float>(args, call, scratch);
  sum_parts<Bf16>(args, call, scratch);
}

}  // namespace

void sm90_attention_gradient(const CudaKernelArguments& args, const AttentionCall& call,
                             std::byte* scratch) {
  with_head_sizes(call.shape.attributes,
                  [&](auto sizes) { run_gradients<decltype(sizes)>(args, call, scratch); });
}

}  // namespace troupe
