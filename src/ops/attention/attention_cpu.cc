#include "ops/attention/attention_cpu.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <optional>
#include <type_traits>

#include "ops/cpu/dropout_mask.h"
#include "ops/cpu/gemm.h"
#include "ops/cpu/vector.h"

namespace troupe {
namespace {

// Queries and keys of a block of scores. Larger blocks make better products, smaller ones waste
// less work above the diagonal; a block of scores with its operands fits in the second-level cache.
constexpr int64_t kAttentionBlock = 128;

// The sizes and strides of one call, in elements.
struct AttentionSizes {
  explicit AttentionSizes(const AttentionAttributes& a)
      : batch(a.batch),
        sequence(a.sequence),
        heads(a.heads),
        groups(a.groups),
        head_dim(a.head_dim),
        window(a.window),
        block(std::min<int64_t>(kAttentionBlock, a.sequence)),
        blocks((a.sequence + block - 1) / block),
        qkv_stride((heads + 2 * groups) * head_dim),
        out_stride(heads * head_dim) {}

  int64_t batch, sequence, heads, groups, head_dim, window;
  int64_t block, blocks;
  int64_t qkv_stride, out_stride;

  int64_t group_of(int64_t head) const { return head / (heads / groups); }
  // Offsets of the heads in a row of qkv.
  int64_t query(int64_t head) const { return head * head_dim; }
  int64_t key(int64_t group) const { return (heads + group) * head_dim; }
  int64_t value(int64_t group) const { return (heads + groups + group) * head_dim; }

  // Keys visible from query i: [first_key(i), i].
  int64_t first_key(int64_t i) const {
    return window == 0 ? 0 : std::max<int64_t>(0, i - window + 1);
  }
  // Queries that see key j: [j, end_query(j)).
  int64_t end_query(int64_t j) const {
    return window == 0 ? sequence : std::min(sequence, j + window);
  }
};

// Which probabilities a call drops, if it drops any.
class AttentionDropout {
 public:
  AttentionDropout(const AttentionAttributes& attributes, const int64_t* step)
      : sequence_(attributes.sequence), row_((sequence_ + 3) / 4 * 4) {
    if (step == nullptr) return;
    mask_.emplace(attributes.seed, attributes.substream, *step, attributes.probability);
  }

  bool active() const { return mask_.has_value(); }
  // The factor of the probabilities that are kept.
  double scale() const { return mask_.has_value() ? mask_->scale() : 1; }

  // Draws for the keys [first, first + count) of a query; `number` is b H + h.
  void draw(int64_t number, int64_t query, int64_t first, int64_t count) {
    const int64_t element = (number * sequence_ + query) * row_ + first;
    mask_->draw(static_cast<uint64_t>(element), count, words_.data());
  }

  // values[i] *= factor where key number i of those drawn is kept, = 0 elsewhere.
  template <class A>
  void apply(A factor, A* values, int64_t count) const {
    TROUPE_INDEPENDENT
    for (int64_t i = 0; i < count; ++i) {
      values[i] = mask_->keeps(words_[static_cast<size_t>(i)]) ? values[i] * factor : A(0);
    }
  }

 private:
  int64_t sequence_, row_;
  std::optional<DropoutMask> mask_;
  std::array<uint32_t, kAttentionBlock> words_{};
};

// AttentionRows of a head: the operand itself, or its copy in the type of the sums.
template <class A>
struct AttentionRows {
  const A* data = nullptr;
  int64_t stride = 0;
};

template <class T, class A>
AttentionRows<A> attention_rows(const T* source, int64_t stride, int64_t rows, int64_t columns,
                                A*& scratch) {
  if constexpr (std::is_same_v<T, A>) {
    return {source, stride};
  } else {
    A* copy = scratch;
    scratch += rows * columns;
    for (int64_t i = 0; i < rows; ++i) load(source + i * stride, copy + i * columns, columns);
    return {copy, columns};
  }
}

// One block of queries of one head: walks the visible blocks of keys with a running maximum and
// sum of each row, rescaling what was summed when the maximum grows.
template <class T>
void attend(const KernelArguments& args, const AttentionSizes& sizes, double scale,
            AttentionDropout dropout, int64_t b, int64_t head, int64_t query_block,
            accumulation_t<T>* scratch) {
  using A = accumulation_t<T>;
  constexpr A kNone = -std::numeric_limits<A>::infinity();
  const int64_t d = sizes.head_dim;
  const int64_t q0 = query_block * sizes.block;
  const int64_t queries = std::min(sizes.block, sizes.sequence - q0);
  const T* qkv = args.in<T>(0) + b * sizes.sequence * sizes.qkv_stride;
  const int64_t group = sizes.group_of(head);

  A* scores = scratch;
  A* sums = scores + sizes.block * sizes.block;
  A* largest = sums + sizes.block * d;
  A* total = largest + sizes.block;
  A* copies = total + sizes.block;
  const AttentionRows<A> q = attention_rows(qkv + q0 * sizes.qkv_stride + sizes.query(head),
                                            sizes.qkv_stride, queries, d, copies);
  std::fill(largest, largest + queries, kNone);
  std::fill(total, total + queries, A(0));

  const int64_t first_block = sizes.first_key(q0) / sizes.block;
  for (int64_t key_block = first_block; key_block <= query_block; ++key_block) {
    const int64_t k0 = key_block * sizes.block;
    const int64_t keys = std::min(sizes.block, sizes.sequence - k0);
    A* block_copies = copies;
    const T* row = qkv + k0 * sizes.qkv_stride;
    const AttentionRows<A> k =
        attention_rows(row + sizes.key(group), sizes.qkv_stride, keys, d, block_copies);
    const AttentionRows<A> v =
        attention_rows(row + sizes.value(group), sizes.qkv_stride, keys, d, block_copies);
    gemm_tile<A>(false, true, queries, keys, d, static_cast<A>(scale), q.data, q.stride, k.data,
                 k.stride, A(0), scores, keys);
    for (int64_t i = 0; i < queries; ++i) {
      const int64_t begin = std::clamp<int64_t>(sizes.first_key(q0 + i) - k0, 0, keys);
      const int64_t end = std::clamp<int64_t>(q0 + i + 1 - k0, begin, keys);
      A* p = scores + i * keys;
      std::fill(p, p + begin, A(0));
      std::fill(p + end, p + keys, A(0));
      if (begin == end) continue;
      const A before = largest[i];
      const A now = std::max(before, max(p + begin, end - begin));
      TROUPE_INDEPENDENT
      for (int64_t j = begin; j < end; ++j) p[j] = exp_fast(p[j] - now);
      const A grown = before == kNone ? A(0) : exp_fast(before - now);
      total[i] = total[i] * grown + sum(p + begin, end - begin);
      largest[i] = now;
      if (dropout.active()) {
        dropout.draw(b * sizes.heads + head, q0 + i, k0 + begin, end - begin);
        dropout.apply(A(1), p + begin, end - begin);
      }
      if (key_block > first_block && grown != A(1)) {
        A* to = sums + i * d;
        for (int64_t c = 0; c < d; ++c) to[c] *= grown;
      }
    }
    gemm_tile<A>(false, false, queries, d, keys, A(1), scores, keys, v.data, v.stride,
                 key_block == first_block ? A(0) : A(1), sums, d);
  }

  const int64_t row0 = b * sizes.sequence + q0;
  T* out = args.out<T>(0) + row0 * sizes.out_stride + head * d;
  A* lse = args.out<A>(1) + row0 * sizes.heads + head;
  const A kept = static_cast<A>(dropout.scale());
  for (int64_t i = 0; i < queries; ++i) {
    const A factor = kept / total[i];
    A* from = sums + i * d;
    for (int64_t c = 0; c < d; ++c) from[c] *= factor;
    store(from, out + i * sizes.out_stride, d);
    lse[i * sizes.heads] = largest[i] + std::log(total[i]);
  }
}

template <class T>
struct AttentionKernel {
  static void run(const KernelArguments& args) {
    const auto& attributes = args.attributes->as<AttentionAttributes>();
    const AttentionSizes sizes(attributes);
    const AttentionDropout dropout(attributes, args.in<int64_t>(1));
    const int64_t sequences = sizes.batch * sizes.heads;
    args.pool->parallel_for(sequences * sizes.blocks, [&](int64_t piece, int worker) {
      // The last blocks see the most keys: they start first, so that the pool ends evenly.
      const int64_t query_block = sizes.blocks - 1 - piece / sequences;
      const int64_t b = piece % sequences / sizes.heads;
      attend<T>(args, sizes, attributes.scale, dropout, b, piece % sizes.heads, query_block,
                args.thread_scratch<accumulation_t<T>>(worker));
    });
  }
};

// Where the gradient kernel keeps its sums: for each sequence and query head, dq, dk and dv as
// [S, d]; and D, [B S, H].
template <class A>
struct AttentionSums {
  AttentionSums(std::byte* workspace, const AttentionSizes& sizes)
      : part(sizes.batch * sizes.heads * sizes.sequence * sizes.head_dim),
        dq(reinterpret_cast<A*>(workspace)),
        dk(dq + part),
        dv(dk + part),
        out_dot(dv + part) {}

  int64_t part;
  A* dq;
  A* dk;
  A* dv;
  A* out_dot;
};

// One head of one sequence: for each block of keys, all blocks of queries that see it.
template <class T>
void attend_backward(const KernelArguments& args, const AttentionSizes& sizes, double scale,
                     AttentionDropout dropout, int64_t b, int64_t head,
                     const AttentionSums<accumulation_t<T>>& all, accumulation_t<T>* scratch) {
  using A = accumulation_t<T>;
  const int64_t d = sizes.head_dim;
  const int64_t row0 = b * sizes.sequence;
  const int64_t group = sizes.group_of(head);
  const T* d_out = args.in<T>(0) + row0 * sizes.out_stride + head * d;
  const T* qkv = args.in<T>(1) + row0 * sizes.qkv_stride;
  const A* lse = args.in<A>(3) + row0 * sizes.heads + head;
  const A* out_dot = all.out_dot + row0 * sizes.heads + head;
  const int64_t start = (b * sizes.heads + head) * sizes.sequence * d;
  A* dq = all.dq + start;
  A* dk = all.dk + start;
  A* dv = all.dv + start;

  const A kept = static_cast<A>(dropout.scale());
  A* p = scratch;
  A* ds = p + sizes.block * sizes.block;
  A* copies = ds + sizes.block * sizes.block;
  for (int64_t key_block = 0; key_block < sizes.blocks; ++key_block) {
    const int64_t k0 = key_block * sizes.block;
    const int64_t keys = std::min(sizes.block, sizes.sequence - k0);
    A* key_copies = copies;
    const T* key_row = qkv + k0 * sizes.qkv_stride;
    const AttentionRows<A> k =
        attention_rows(key_row + sizes.key(group), sizes.qkv_stride, keys, d, key_copies);
    const AttentionRows<A> v =
        attention_rows(key_row + sizes.value(group), sizes.qkv_stride, keys, d, key_copies);
    const int64_t end_query = sizes.end_query(k0 + keys - 1);
    for (int64_t query_block = key_block; query_block * sizes.block < end_query; ++query_block) {
      const int64_t q0 = query_block * sizes.block;
      const int64_t queries = std::min(sizes.block, sizes.sequence - q0);
      A* query_copies = key_copies;
      const AttentionRows<A> q = attention_rows(qkv + q0 * sizes.qkv_stride + sizes.query(head),
                                                sizes.qkv_stride, queries, d, query_copies);
      const AttentionRows<A> go =
          attention_rows(d_out + q0 * sizes.out_stride, sizes.out_stride, queries, d, query_copies);
      gemm_tile<A>(false, true, queries, keys, d, static_cast<A>(scale), q.data, q.stride, k.data,
                   k.stride, A(0), p, keys);
      gemm_tile<A>(false, true, queries, keys, d, A(1), go.data, go.stride, v.data, v.stride, A(0),
                   ds, keys);
      for (int64_t i = 0; i < queries; ++i) {
        const int64_t begin = std::clamp<int64_t>(sizes.first_key(q0 + i) - k0, 0, keys);
        const int64_t end = std::clamp<int64_t>(q0 + i + 1 - k0, begin, keys);
        const A shift = lse[(q0 + i) * sizes.heads];
        const A dot = out_dot[(q0 + i) * sizes.heads];
        A* p_row = p + i * keys;
        A* ds_row = ds + i * keys;
        std::fill(p_row, p_row + begin, A(0));
        std::fill(ds_row, ds_row + begin, A(0));
        if (dropout.active()) {
          dropout.draw(b * sizes.heads + head, q0 + i, k0 + begin, end - begin);
          dropout.apply(kept, ds_row + begin, end - begin);
        }
        TROUPE_INDEPENDENT
        for (int64_t j = begin; j < end; ++j) {
          p_row[j] = exp_fast(p_row[j] - shift);
          ds_row[j] = p_row[j] * (ds_row[j] - dot);
        }
        if (dropout.active()) dropout.apply(kept, p_row + begin, end - begin);
        std::fill(p_row + end, p_row + keys, A(0));
        std::fill(ds_row + end, ds_row + keys, A(0));
      }
      const A first_query = query_block == key_block ? A(0) : A(1);
      const A first_key = key_block == sizes.first_key(q0) / sizes.block ? A(0) : A(1);
      gemm_tile<A>(true, false, keys, d, queries, A(1), p, keys, go.data, go.stride, first_query,
                   dv + k0 * d, d);
      gemm_tile<A>(true, false, keys, d, queries, static_cast<A>(scale), ds, keys, q.data, q.stride,
                   first_query, dk + k0 * d, d);
      gemm_tile<A>(false, false, queries, d, keys, static_cast<A>(scale), ds, keys, k.data,
                   k.stride, first_key, dq + q0 * d, d);
    }
  }
}

// AttentionRows of qkv that one piece of the memory-bound loops handles, at about 16k elements.
int64_t attention_rows_per_piece(int64_t row_elements) {
  return std::max<int64_t>(1, 16384 / row_elements);
}

template <class T>
struct AttentionGradientKernel {
  static void run(const KernelArguments& args) {
    using A = accumulation_t<T>;
    const auto& attributes = args.attributes->as<AttentionAttributes>();
    const AttentionSizes sizes(attributes);
    const AttentionDropout dropout(attributes, args.in<int64_t>(4));
    const AttentionSums<A> sums(args.workspace, sizes);
    const int64_t d = sizes.head_dim;
    const int64_t tokens = sizes.batch * sizes.sequence;

    const T* d_out = args.in<T>(0);
    const T* out = args.in<T>(2);
    args.pool->parallel_ranges(tokens, attention_rows_per_piece(sizes.out_stride),
                               [&](int64_t begin, int64_t end, int) {
                                 for (int64_t i = begin * sizes.heads; i < end * sizes.heads; ++i) {
                                   sums.out_dot[i] = dot(d_out + i * d, out + i * d, d);
                                 }
                               });

    args.pool->parallel_for(sizes.batch * sizes.heads, [&](int64_t piece, int worker) {
      attend_backward<T>(args, sizes, attributes.scale, dropout, piece / sizes.heads,
                         piece % sizes.heads, sums, args.thread_scratch<A>(worker));
    });

    // The heads' gradients into the rows of d_qkv; those of keys and values summed over the query
    // heads of their group, in order.
    T* d_qkv = args.out<T>(0);
    const int64_t heads_per_group = sizes.heads / sizes.groups;
    args.pool->parallel_ranges(
        tokens, attention_rows_per_piece(sizes.qkv_stride), [&](int64_t begin, int64_t end, int) {
          for (int64_t token = begin; token < end; ++token) {
            const int64_t b = token / sizes.sequence;
            const int64_t s = token % sizes.sequence;
            T* row = d_qkv + token * sizes.qkv_stride;
            const auto of_head = [&](A* part, int64_t head) {
              return part + ((b * sizes.heads + head) * sizes.sequence + s) * d;
            };
            const auto of_group = [&](A* part, int64_t group) {
              const int64_t head = group * heads_per_group;
              A* total = of_head(part, head);
              for (int64_t h = 1; h < heads_per_group; ++h)
                add_to(of_head(part, head + h), total, d);
              return total;
            };
            for (int64_t h = 0; h < sizes.heads; ++h)
              store(of_head(sums.dq, h), row + sizes.query(h), d);
            for (int64_t g = 0; g < sizes.groups; ++g) {
              store(of_group(sums.dk, g), row + sizes.key(g), d);
              store(of_group(sums.dv, g), row + sizes.value(g), d);
            }
          }
        });
  }
};

uint64_t sum_bytes(int64_t elements, DType dtype) {
  return static_cast<uint64_t>(elements) * size_of(accumulation_dtype(dtype));
}

}  // namespace

CpuKernel attention_cpu_kernel(const OpView& op) {
  return select_float_kernel<AttentionKernel>(op.input(0).dtype);
}

CpuKernel attention_gradient_cpu_kernel(const OpView& op) {
  return select_float_kernel<AttentionGradientKernel>(op.input(0).dtype);
}

uint64_t attention_scratch_bytes(const AttentionAttributes& attributes, DType dtype) {
  const AttentionSizes sizes(attributes);
  const int64_t copies = dtype == accumulation_dtype(dtype) ? 0 : 3;  // of q, k, v
  return sum_bytes(sizes.block * (sizes.block + (1 + copies) * sizes.head_dim + 2), dtype);
}

uint64_t attention_gradient_scratch_bytes(const AttentionAttributes& attributes, DType dtype) {
  const AttentionSizes sizes(attributes);
  const int64_t copies = dtype == accumulation_dtype(dtype) ? 0 : 4;  // of q, k, v, d_out
  return sum_bytes(sizes.block * (2 * sizes.block + copies * sizes.head_dim), dtype);
}

uint64_t attention_gradient_workspace_bytes(const AttentionAttributes& attributes, DType dtype) {
  const AttentionSizes sizes(attributes);
  return sum_bytes(sizes.batch * sizes.heads * sizes.sequence * (3 * sizes.head_dim + 1), dtype);
}

}  // namespace troupe
