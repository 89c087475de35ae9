#include "ops/attention/attention/attention_cpu.h"

#include <algorithm>

#include "ops/cpu/attention_blocks.h"

namespace troupe {
namespace {

// The sizes and strides of one call, in elements.
struct AttentionSizes {
  explicit AttentionSizes(const AttentionAttributes& a)
      : batch(a.batch),
        sequence(a.sequence),
        heads(a.heads),
        groups(a.groups),
        head_dim(a.head_dim),
        value_dim(a.value_size()),
        block(std::min<int64_t>(kAttentionBlock, a.sequence)),
        blocks((a.sequence + block - 1) / block),
        query_stride(a.query_stride()),
        key_stride(a.key_stride()),
        key_column(a.key_column),
        out_stride(a.out_row()) {}

  int64_t batch, sequence, heads, groups, head_dim, value_dim;
  int64_t block, blocks;
  int64_t query_stride, key_stride, key_column, out_stride;

  int64_t group_of(int64_t head) const { return head / (heads / groups); }
  // Offsets of the heads in a row of q, and of kv.
  int64_t query(int64_t head) const { return head * head_dim; }
  int64_t key(int64_t group) const { return key_column + group * head_dim; }
  int64_t value(int64_t group) const { return key(groups) + group * value_dim; }

  AttentionBlock block_at(int64_t number) const {
    const int64_t first = number * block;
    return {first, std::min(block, sequence - first)};
  }
};

// The dropout of a call, by the places of its elements in the whole micro-batch.
AttentionDropout dropout_of(const AttentionAttributes& a, const int64_t* step) {
  return {a.seed, a.substream, a.probability, a.sequence, step};
}

// `starts`: of all rows, or null.
template <class A>
AttentionHead<A> attention_head(const AttentionAttributes& a, const int32_t* starts, int64_t b,
                                int64_t head) {
  return {
      .head_dim = a.head_dim,
      .value_dim = a.value_size(),
      .scale = static_cast<A>(a.scale),
      .mask = {.window = a.window, .starts = starts == nullptr ? nullptr : starts + b * a.sequence},
      .number = head_number(a, b, head)};
}

// One block of queries of one head: walks the visible blocks of keys.
template <class T>
void attend(const KernelArguments& args, const AttentionSizes& sizes,
            const AttentionAttributes& attributes, AttentionDropout dropout, int64_t b,
            int64_t head, int64_t query_block, accumulation_t<T>* scratch) {
  using A = accumulation_t<T>;
  const int64_t d = sizes.head_dim;
  const int64_t e = sizes.value_dim;
  const AttentionHead<A> of_head = attention_head<A>(attributes, args.in<int32_t>(3), b, head);
  const AttentionBlock queries = sizes.block_at(query_block);
  const T* query_rows = args.in<T>(0) + b * sizes.sequence * sizes.query_stride;
  const T* key_rows = args.in<T>(1) + b * sizes.sequence * sizes.key_stride;
  const int64_t group = sizes.group_of(head);

  A* scores = scratch;
  RunningSoftmax<A> running;
  running.sums = scores + sizes.block * sizes.block;
  running.largest = running.sums + sizes.block * e;
  running.total = running.largest + sizes.block;
  A* copies = running.total + sizes.block;
  const AttentionRows<A> q =
      attention_rows(query_rows + queries.first * sizes.query_stride + sizes.query(head),
                     sizes.query_stride, queries.count, d, copies);
  running.clear(queries.count);

  const int64_t first_block = of_head.mask.first_key(queries.first) / sizes.block;
  for (int64_t key_block = first_block; key_block <= query_block; ++key_block) {
    const AttentionBlock keys = sizes.block_at(key_block);
    A* block_copies = copies;
    const T* row = key_rows + keys.first * sizes.key_stride;
    const AttentionRows<A> k =
        attention_rows(row + sizes.key(group), sizes.key_stride, keys.count, d, block_copies);
    const AttentionRows<A> v =
        attention_rows(row + sizes.value(group), sizes.key_stride, keys.count, e, block_copies);
    attend_to_block(of_head, dropout, queries, q, keys, k, v, key_block == first_block, scores,
                    running);
  }

  const int64_t row0 = b * sizes.sequence + queries.first;
  store_attention(running, queries.count, e, static_cast<A>(dropout.scale()),
                  args.out<T>(0) + row0 * sizes.out_stride + head * e, sizes.out_stride,
                  args.out<A>(1) + row0 * sizes.heads + head, sizes.heads,
                  sink_of(args.in<A>(4), attributes, head));
}

template <class T>
struct AttentionKernel {
  static void run(const KernelArguments& args) {
    const auto& attributes = args.attributes->as<AttentionAttributes>();
    const AttentionSizes sizes(attributes);
    const AttentionDropout dropout = dropout_of(attributes, args.in<int64_t>(2));
    const int64_t sequences = sizes.batch * sizes.heads;
    args.pool->parallel_for(sequences * sizes.blocks, [&](int64_t piece, int worker) {
      // The last blocks see the most keys: they start first, so that the pool ends evenly.
      const int64_t query_block = sizes.blocks - 1 - piece / sequences;
      const int64_t b = piece % sequences / sizes.heads;
      attend<T>(args, sizes, attributes, dropout, b, piece % sizes.heads, query_block,
                args.thread_scratch<accumulation_t<T>>(worker));
    });
  }
};

// Where the gradient kernel keeps its sums: for each sequence and query head, dq and dk as [S, d],
// dv as [S, e]; and D, [B S, H].
template <class A>
struct AttentionSums {
  AttentionSums(std::byte* workspace, const AttentionSizes& sizes)
      : rows(sizes.batch * sizes.heads * sizes.sequence),
        dq(reinterpret_cast<A*>(workspace)),
        dk(dq + rows * sizes.head_dim),
        dv(dk + rows * sizes.head_dim),
        out_dot(dv + rows * sizes.value_dim) {}

  int64_t rows;  // of all sequences and query heads
  A* dq;
  A* dk;
  A* dv;
  A* out_dot;
};

// One head of one sequence: for each block of keys, all blocks of queries that see it.
template <class T>
void attend_backward(const KernelArguments& args, const AttentionSizes& sizes,
                     const AttentionAttributes& attributes, AttentionDropout dropout, int64_t b,
                     int64_t head, const AttentionSums<accumulation_t<T>>& all,
                     accumulation_t<T>* scratch) {
  using A = accumulation_t<T>;
  const int64_t d = sizes.head_dim;
  const int64_t e = sizes.value_dim;
  const int64_t row0 = b * sizes.sequence;
  const int64_t group = sizes.group_of(head);
  const AttentionHead<A> of_head = attention_head<A>(attributes, args.in<int32_t>(6), b, head);
  const T* d_out = args.in<T>(0) + row0 * sizes.out_stride + head * e;
  const T* query_rows = args.in<T>(1) + row0 * sizes.query_stride;
  const T* key_rows = args.in<T>(2) + row0 * sizes.key_stride;
  const A* lse = args.in<A>(4) + row0 * sizes.heads + head;
  const A* out_dot = all.out_dot + row0 * sizes.heads + head;
  const int64_t start = (b * sizes.heads + head) * sizes.sequence;

  A* p = scratch;
  A* ds = p + sizes.block * sizes.block;
  A* copies = ds + sizes.block * sizes.block;
  for (int64_t key_block = 0; key_block < sizes.blocks; ++key_block) {
    const AttentionBlock keys = sizes.block_at(key_block);
    A* key_copies = copies;
    const T* key_row = key_rows + keys.first * sizes.key_stride;
    const AttentionRows<A> k =
        attention_rows(key_row + sizes.key(group), sizes.key_stride, keys.count, d, key_copies);
    const AttentionRows<A> v =
        attention_rows(key_row + sizes.value(group), sizes.key_stride, keys.count, e, key_copies);
    for (int64_t query_block = key_block; query_block < sizes.blocks; ++query_block) {
      const AttentionBlock queries = sizes.block_at(query_block);
      if (!of_head.mask.any(queries, keys)) break;  // nor do later ones
      A* query_copies = key_copies;
      const AttentionRows<A> q =
          attention_rows(query_rows + queries.first * sizes.query_stride + sizes.query(head),
                         sizes.query_stride, queries.count, d, query_copies);
      const AttentionRows<A> go = attention_rows(d_out + queries.first * sizes.out_stride,
                                                 sizes.out_stride, queries.count, e, query_copies);
      attend_to_block_backward(
          of_head, dropout, queries, q,
          {.d_out = go,
           .lse = lse + queries.first * sizes.heads,
           .out_dot = out_dot + queries.first * sizes.heads,
           .stride = sizes.heads},
          keys, k, v, p, ds,
          {.dq = all.dq + (start + queries.first) * d,
           .dk = all.dk + (start + keys.first) * d,
           .dv = all.dv + (start + keys.first) * e,
           .first_of_queries = key_block == of_head.mask.first_key(queries.first) / sizes.block,
           .first_of_keys = query_block == key_block});
    }
  }
}

template <class T>
struct AttentionGradientKernel {
  static void run(const KernelArguments& args) {
    using A = accumulation_t<T>;
    const auto& attributes = args.attributes->as<AttentionAttributes>();
    const AttentionSizes sizes(attributes);
    const AttentionDropout dropout = dropout_of(attributes, args.in<int64_t>(5));
    const AttentionSums<A> sums(args.workspace, sizes);
    const int64_t d = sizes.head_dim;
    const int64_t e = sizes.value_dim;
    const int64_t tokens = sizes.batch * sizes.sequence;

    const T* d_out = args.in<T>(0);
    const T* out = args.in<T>(3);
    args.pool->parallel_ranges(tokens, attention_rows_per_piece(sizes.out_stride),
                               [&](int64_t begin, int64_t end, int) {
                                 for (int64_t i = begin * sizes.heads; i < end * sizes.heads; ++i) {
                                   sums.out_dot[i] = dot(d_out + i * e, out + i * e, e);
                                 }
                               });

    args.pool->parallel_for(sizes.batch * sizes.heads, [&](int64_t piece, int worker) {
      attend_backward<T>(args, sizes, attributes, dropout, piece / sizes.heads, piece % sizes.heads,
                         sums, args.thread_scratch<A>(worker));
    });

    // The heads' gradients into the rows of d_q and d_kv, which may be the same; those of keys and
    // values summed over the query heads of their group, in order.
    T* d_q = args.out<T>(0);
    T* d_kv = attributes.is_fused() ? d_q : args.out<T>(1);
    const int64_t heads_per_group = sizes.heads / sizes.groups;
    args.pool->parallel_ranges(
        tokens, attention_rows_per_piece(sizes.query_stride + sizes.key_stride),
        [&](int64_t begin, int64_t end, int) {
          for (int64_t token = begin; token < end; ++token) {
            const int64_t b = token / sizes.sequence;
            const int64_t s = token % sizes.sequence;
            T* query_row = d_q + token * sizes.query_stride;
            T* key_row = d_kv + token * sizes.key_stride;
            const auto of_head = [&](A* part, int64_t head, int64_t size) {
              return part + ((b * sizes.heads + head) * sizes.sequence + s) * size;
            };
            const auto of_group = [&](A* part, int64_t group, int64_t size) {
              const int64_t head = group * heads_per_group;
              A* total = of_head(part, head, size);
              for (int64_t h = 1; h < heads_per_group; ++h)
                add_to(of_head(part, head + h, size), total, size);
              return total;
            };
            for (int64_t h = 0; h < sizes.heads; ++h)
              store(of_head(sums.dq, h, d), query_row + sizes.query(h), d);
            for (int64_t g = 0; g < sizes.groups; ++g) {
              store(of_group(sums.dk, g, d), key_row + sizes.key(g), d);
              store(of_group(sums.dv, g, e), key_row + sizes.value(g), e);
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
  const bool copied = dtype != accumulation_dtype(dtype);
  const int64_t copies = copied ? 2 * sizes.head_dim + sizes.value_dim : 0;  // of q, k, v
  return sum_bytes(sizes.block * (sizes.block + sizes.value_dim + copies + 2), dtype);
}

uint64_t attention_gradient_scratch_bytes(const AttentionAttributes& attributes, DType dtype) {
  const AttentionSizes sizes(attributes);
  const bool copied = dtype != accumulation_dtype(dtype);
  // Of q, k, v and d_out.
  const int64_t copies = copied ? 2 * (sizes.head_dim + sizes.value_dim) : 0;
  return sum_bytes(sizes.block * (2 * sizes.block + copies), dtype);
}

uint64_t attention_gradient_workspace_bytes(const AttentionAttributes& attributes, DType dtype) {
  const AttentionSizes sizes(attributes);
  return sum_bytes(
      sizes.batch * sizes.heads * sizes.sequence * (2 * sizes.head_dim + sizes.value_dim + 1),
      dtype);
}

}  // namespace troupe
