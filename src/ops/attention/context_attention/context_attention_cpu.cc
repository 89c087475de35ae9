#include "ops/attention/context_attention/context_attention_cpu.h"

#include <algorithm>
#include <array>
#include <utility>

#include "ops/cpu/attention_blocks.h"

namespace troupe {
namespace {

// The sizes of one call. A rank's rows of a sequence are cut into blocks that lie within a chunk.
struct ContextSizes {
  explicit ContextSizes(const ContextAttentionAttributes& attributes)
      : chunks(attributes.chunks),
        batch(attributes.attention.batch),
        rows(attributes.attention.sequence),
        heads(attributes.attention.heads),
        groups(attributes.attention.groups),
        head_dim(attributes.attention.head_dim),
        value_dim(attributes.attention.value_size()),
        chunk(chunks.ranks == 1 ? rows : rows / 2),
        block(std::min(kAttentionBlock, chunk)),
        chunk_blocks((chunk + block - 1) / block),
        blocks(chunk_blocks * (rows / chunk)),
        tokens(batch * rows),
        query_stride(attributes.attention.query_row()),
        key_stride(attributes.attention.key_value_row()),
        out_stride(attributes.attention.out_row()) {}

  SequenceChunks chunks;
  int64_t batch, rows, heads, groups, head_dim, value_dim;
  int64_t chunk, block, chunk_blocks, blocks;
  int64_t tokens;  // of a rank
  int64_t query_stride, key_stride, out_stride;

  int64_t group_of(int64_t head) const { return head / (heads / groups); }
  // Offsets of the heads in a row of kv.
  int64_t key(int64_t group) const { return group * head_dim; }
  int64_t value(int64_t group) const { return groups * head_dim + group * value_dim; }

  // The first row, among a rank's rows of a sequence, of its block `number`.
  int64_t first_row(int64_t number) const {
    return number / chunk_blocks * chunk + number % chunk_blocks * block;
  }
  // The positions of rank `rank`'s block `number`.
  AttentionBlock positions(int32_t rank, int64_t number) const {
    const SequenceChunks of{.ranks = chunks.ranks, .rank = rank};
    const int64_t row = first_row(number);
    return {of.position(row, rows), std::min(block, chunk - row % chunk)};
  }
  // The source that this rank takes `turn`-th: itself, then down the ring.
  int32_t source(int32_t turn) const { return (chunks.rank - turn + chunks.ranks) % chunks.ranks; }
};

AttentionDropout context_dropout(const ContextAttentionAttributes& attributes,
                                 const int64_t* step) {
  const AttentionAttributes& a = attributes.attention;
  return {a.seed, a.substream, a.probability, int64_t{a.sequence} * attributes.chunks.ranks, step};
}

// Of queries from position `first` on, whose first one is row `row` of all that the rank has.
// `starts`: of these, or null.
AttentionMask context_mask(const AttentionAttributes& a, const int32_t* starts, int64_t row,
                           int64_t first) {
  return {.window = a.window,
          .starts = starts == nullptr ? nullptr : starts + row,
          .first_query = first};
}

// Without the mask, which is of a block of queries.
template <class A>
AttentionHead<A> context_head(const AttentionAttributes& a, int64_t b, int64_t head) {
  return {.head_dim = a.head_dim,
          .value_dim = a.value_size(),
          .scale = static_cast<A>(a.scale),
          .mask = {},
          .number = head_number(a, b, head)};
}

// The forward pass: one source of keys and values after the other, then the outputs. Between
// sources the running softmax of all queries is in the workspace.
template <class T>
class ContextForward {
 public:
  using A = accumulation_t<T>;

  explicit ContextForward(const KernelArguments& args)
      : args_(args),
        attributes_(args.attributes->as<ContextAttentionAttributes>()),
        sizes_(attributes_),
        dropout_(context_dropout(attributes_, args.in<int64_t>(2))),
        sums_(reinterpret_cast<A*>(args.workspace)),
        largest_(sums_ + sizes_.tokens * sizes_.out_stride),
        total_(largest_ + sizes_.tokens * sizes_.heads) {
    each_block([this](int64_t b, int64_t head, int64_t number, int) {
      const int64_t queries = sizes_.positions(sizes_.chunks.rank, number).count;
      const RunningSoftmax<A> running = running_at(b, head, number);
      running.clear(queries);
      std::fill_n(running.sums, queries * sizes_.value_dim, A(0));
    });
  }

  const ContextSizes& sizes() const { return sizes_; }
  // After what this class needs of the workspace.
  std::byte* rest() const {
    return reinterpret_cast<std::byte*>(total_ + sizes_.tokens * sizes_.heads);
  }

  // `kv`: the rows of rank `source`.
  void add_source(const T* kv, int32_t source) {
    each_block([=, this](int64_t b, int64_t head, int64_t number, int worker) {
      attend(kv, source, b, head, number, args_.template thread_scratch<A>(worker));
    });
  }

  void finish() {
    each_block([this](int64_t b, int64_t head, int64_t number, int) {
      const int64_t row = b * sizes_.rows + sizes_.first_row(number);
      store_attention(running_at(b, head, number),
                      sizes_.positions(sizes_.chunks.rank, number).count, sizes_.value_dim,
                      static_cast<A>(dropout_.scale()),
                      args_.out<T>(0) + row * sizes_.out_stride + head * sizes_.value_dim,
                      sizes_.out_stride, args_.out<A>(1) + row * sizes_.heads + head, sizes_.heads,
                      sink_of(args_.in<A>(4), attributes_.attention, head));
    });
  }

 private:
  // For all blocks of queries; the last ones of a chunk see the most keys and start first.
  template <class Body>
  void each_block(const Body& body) {
    const int64_t sequences = sizes_.batch * sizes_.heads;
    args_.pool->parallel_for(sequences * sizes_.blocks, [&](int64_t piece, int worker) {
      const int64_t sequence = piece % sequences;
      body(sequence / sizes_.heads, sequence % sizes_.heads, sizes_.blocks - 1 - piece / sequences,
           worker);
    });
  }

  RunningSoftmax<A> running_at(int64_t b, int64_t head, int64_t number) const {
    const int64_t at = (b * sizes_.heads + head) * sizes_.rows + sizes_.first_row(number);
    return {.sums = sums_ + at * sizes_.value_dim, .largest = largest_ + at, .total = total_ + at};
  }

  void attend(const T* kv, int32_t source, int64_t b, int64_t head, int64_t number, A* scratch) {
    const int64_t d = sizes_.head_dim;
    const int64_t group = sizes_.group_of(head);
    const AttentionBlock queries = sizes_.positions(sizes_.chunks.rank, number);
    const int64_t query_row = b * sizes_.rows + sizes_.first_row(number);
    AttentionHead<A> of_head = context_head<A>(attributes_.attention, b, head);
    of_head.mask =
        context_mask(attributes_.attention, args_.in<int32_t>(3), query_row, queries.first);
    AttentionDropout dropout = dropout_;
    A* scores = scratch;
    A* copies = scores + sizes_.block * sizes_.block;
    AttentionRows<A> q;
    for (int64_t key_block = 0; key_block < sizes_.blocks; ++key_block) {
      const AttentionBlock keys = sizes_.positions(source, key_block);
      if (!of_head.mask.any(queries, keys)) continue;
      if (q.data == nullptr) {
        const T* row = args_.in<T>(0) + query_row * sizes_.query_stride;
        q = attention_rows(row + head * d, sizes_.query_stride, queries.count, d, copies);
      }
      A* block_copies = copies;
      const T* row = kv + (b * sizes_.rows + sizes_.first_row(key_block)) * sizes_.key_stride;
      const AttentionRows<A> k =
          attention_rows(row + sizes_.key(group), sizes_.key_stride, keys.count, d, block_copies);
      const AttentionRows<A> v = attention_rows(row + sizes_.value(group), sizes_.key_stride,
                                                keys.count, sizes_.value_dim, block_copies);
      attend_to_block(of_head, dropout, queries, q, keys, k, v, /*first=*/false, scores,
                      running_at(b, head, number));
    }
  }

  const KernelArguments& args_;
  const ContextAttentionAttributes& attributes_;
  const ContextSizes sizes_;
  const AttentionDropout dropout_;
  A* sums_;
  A* largest_;
  A* total_;
};

// The backward pass: the gradients of one source's keys and values after the other, then those of
// the queries.
template <class T>
class ContextBackward {
 public:
  using A = accumulation_t<T>;

  explicit ContextBackward(const KernelArguments& args)
      : args_(args),
        attributes_(args.attributes->as<ContextAttentionAttributes>()),
        sizes_(attributes_),
        dropout_(context_dropout(attributes_, args.in<int64_t>(5))),
        dq_(reinterpret_cast<A*>(args.workspace)),
        dk_(dq_ + sizes_.tokens * sizes_.query_stride),
        dv_(dk_ + sizes_.tokens * sizes_.query_stride),
        out_dot_(dv_ + sizes_.tokens * sizes_.out_stride) {
    const int64_t e = sizes_.value_dim;
    const T* d_out = args.in<T>(0);
    const T* out = args.in<T>(3);
    args.pool->parallel_ranges(
        sizes_.tokens, attention_rows_per_piece(sizes_.query_stride),
        [&](int64_t begin, int64_t end, int) {
          for (int64_t i = begin * sizes_.heads; i < end * sizes_.heads; ++i) {
            out_dot_[i] = dot(d_out + i * e, out + i * e, e);
          }
          std::fill(dq_ + begin * sizes_.query_stride, dq_ + end * sizes_.query_stride, A(0));
        });
  }

  const ContextSizes& sizes() const { return sizes_; }
  std::byte* rest() const {
    return reinterpret_cast<std::byte*>(out_dot_ + sizes_.tokens * sizes_.heads);
  }

  // `kv`: the rows of rank `source`. Calls store(row, column, gradient, its elements) for every row
  // of it and every key and value head.
  template <class Store>
  void add_source(const T* kv, int32_t source, const Store& store_head) {
    args_.pool->parallel_for(sizes_.batch * sizes_.heads, [&](int64_t piece, int worker) {
      attend_backward(kv, source, piece / sizes_.heads, piece % sizes_.heads,
                      args_.template thread_scratch<A>(worker));
    });
    // Summed over the query heads of each group, in order.
    const int64_t heads_per_group = sizes_.heads / sizes_.groups;
    each_row(sizes_.key_stride, [&](int64_t token) {
      for (int64_t group = 0; group < sizes_.groups; ++group) {
        const auto store_group = [&](A* part, int64_t column, int64_t size) {
          A* total = of_head(part, token, group * heads_per_group, size);
          for (int64_t h = 1; h < heads_per_group; ++h) {
            add_to(of_head(part, token, group * heads_per_group + h, size), total, size);
          }
          store_head(token, column, total, size);
        };
        store_group(dk_, sizes_.key(group), sizes_.head_dim);
        store_group(dv_, sizes_.value(group), sizes_.value_dim);
      }
    });
  }

  void finish() {
    T* d_q = args_.out<T>(0);
    each_row(sizes_.query_stride, [&](int64_t token) {
      for (int64_t head = 0; head < sizes_.heads; ++head) {
        store(of_head(dq_, token, head, sizes_.head_dim),
              d_q + token * sizes_.query_stride + head * sizes_.head_dim, sizes_.head_dim);
      }
    });
  }

 private:
  template <class Body>
  void each_row(int64_t row_elements, const Body& body) {
    args_.pool->parallel_ranges(sizes_.tokens, attention_rows_per_piece(row_elements),
                                [&](int64_t begin, int64_t end, int) {
                                  for (int64_t token = begin; token < end; ++token) body(token);
                                });
  }

  // `size`: elements of the part's rows.
  A* of_head(A* part, int64_t token, int64_t head, int64_t size) const {
    const int64_t b = token / sizes_.rows;
    const int64_t row = token % sizes_.rows;
    return part + ((b * sizes_.heads + head) * sizes_.rows + row) * size;
  }

  // One head of one sequence: for each block of keys, all blocks of queries that see it.
  void attend_backward(const T* kv, int32_t source, int64_t b, int64_t head, A* scratch) {
    const int64_t d = sizes_.head_dim;
    const int64_t e = sizes_.value_dim;
    const int64_t group = sizes_.group_of(head);
    AttentionHead<A> of_this = context_head<A>(attributes_.attention, b, head);
    AttentionDropout dropout = dropout_;
    A* p = scratch;
    A* ds = p + sizes_.block * sizes_.block;
    A* copies = ds + sizes_.block * sizes_.block;
    std::fill_n(of_head(dk_, b * sizes_.rows, head, d), sizes_.rows * d, A(0));
    std::fill_n(of_head(dv_, b * sizes_.rows, head, e), sizes_.rows * e, A(0));
    for (int64_t key_block = 0; key_block < sizes_.blocks; ++key_block) {
      const AttentionBlock keys = sizes_.positions(source, key_block);
      const int64_t key_token = b * sizes_.rows + sizes_.first_row(key_block);
      A* key_copies = copies;
      const T* key_row = kv + key_token * sizes_.key_stride;
      const AttentionRows<A> k =
          attention_rows(key_row + sizes_.key(group), sizes_.key_stride, keys.count, d, key_copies);
      const AttentionRows<A> v = attention_rows(key_row + sizes_.value(group), sizes_.key_stride,
                                                keys.count, e, key_copies);
      for (int64_t query_block = 0; query_block < sizes_.blocks; ++query_block) {
        const AttentionBlock queries = sizes_.positions(sizes_.chunks.rank, query_block);
        const int64_t token = b * sizes_.rows + sizes_.first_row(query_block);
        of_this.mask =
            context_mask(attributes_.attention, args_.in<int32_t>(6), token, queries.first);
        if (!of_this.mask.any(queries, keys)) continue;
        A* query_copies = key_copies;
        const AttentionRows<A> q =
            attention_rows(args_.in<T>(1) + token * sizes_.query_stride + head * d,
                           sizes_.query_stride, queries.count, d, query_copies);
        const AttentionRows<A> go =
            attention_rows(args_.in<T>(0) + token * sizes_.out_stride + head * e, sizes_.out_stride,
                           queries.count, e, query_copies);
        attend_to_block_backward(of_this, dropout, queries, q,
                                 {.d_out = go,
                                  .lse = args_.in<A>(4) + token * sizes_.heads + head,
                                  .out_dot = out_dot_ + token * sizes_.heads + head,
                                  .stride = sizes_.heads},
                                 keys, k, v, p, ds,
                                 {.dq = of_head(dq_, token, head, d),
                                  .dk = of_head(dk_, key_token, head, d),
                                  .dv = of_head(dv_, key_token, head, e)});
      }
    }
  }

  const KernelArguments& args_;
  const ContextAttentionAttributes& attributes_;
  const ContextSizes sizes_;
  const AttentionDropout dropout_;
  A* dq_;       // for each sequence and query head [rows, d]
  A* dk_;       // as dq_, of the key heads of one source
  A* dv_;       // the same [rows, e]
  A* out_dot_;  // [tokens, heads]
};

// Messages round the ring of the cp group: to the next rank, from the one before.
class Ring {
 public:
  Ring(const KernelArguments& args, const SequenceChunks& chunks)
      : args_(args),
        next_((chunks.rank + 1) % chunks.ranks),
        before_((chunks.rank + chunks.ranks - 1) % chunks.ranks) {
    TROUPE_CHECK(
        args.communicator->size() == chunks.ranks && args.communicator->rank() == chunks.rank,
        "ring_attention: another group");
  }

  void send(const TensorView& tensor) const { args_.communicator->send(call(), tensor, next_); }
  // Messages are finished in the order in which they were sent.
  void finish_send() const { args_.communicator->finish_send(call(), next_); }
  void receive(const TensorView& tensor) const {
    args_.communicator->receive(call(), tensor, before_);
  }

 private:
  CollectiveCall call() const { return {.op = args_.op, .index = args_.op_index}; }

  const KernelArguments& args_;
  const int next_;
  const int before_;
};

// The keys and values that travel: this rank's own, then what comes into one of two buffers while
// the other one is sent on.
template <class T>
class TravellingKeys {
 public:
  TravellingKeys(const TensorView& own, std::byte* buffers) : view_(own) {
    auto* data = reinterpret_cast<T*>(buffers);
    buffers_ = {data, data + own.shape.elements()};
  }

  const TensorView& view() const { return view_; }
  const T* data() const { return view_.as<T>(); }
  // Where the next ones come to.
  TensorView incoming() const {
    TensorView view = view_;
    view.data = buffers_[static_cast<size_t>(turn_ % 2)];
    return view;
  }
  void take(const TensorView& incoming) {
    view_ = incoming;
    ++turn_;
  }

 private:
  TensorView view_;
  std::array<T*, 2> buffers_{};
  int turn_ = 0;
};

// No rank can wait forever: a rank sends on what it has before it waits for anything of the same
// turn, and what it waits for was sent in this turn's beginning or in the turn before.
template <class T>
struct RingAttentionKernel {
  static void run(const KernelArguments& args) {
    ContextForward<T> forward(args);
    const ContextSizes& sizes = forward.sizes();
    const Ring ring(args, sizes.chunks);
    TravellingKeys<T> keys(args.input(1), forward.rest());
    for (int32_t turn = 0; turn < sizes.chunks.ranks; ++turn) {
      const bool last = turn + 1 == sizes.chunks.ranks;
      if (!last) ring.send(keys.view());
      forward.add_source(keys.data(), sizes.source(turn));
      if (last) break;
      const TensorView incoming = keys.incoming();
      ring.receive(incoming);
      ring.finish_send();
      keys.take(incoming);
    }
    forward.finish();
  }
};

template <class T>
struct ContextAttentionKernel {
  static void run(const KernelArguments& args) {
    ContextForward<T> forward(args);
    const ContextSizes& sizes = forward.sizes();
    for (int32_t turn = 0; turn < sizes.chunks.ranks; ++turn) {
      const int32_t source = sizes.source(turn);
      forward.add_source(args.in<T>(1) + source * sizes.tokens * sizes.key_stride, source);
    }
    forward.finish();
  }
};

template <class T>
struct ContextAttentionGradientKernel {
  static void run(const KernelArguments& args) {
    using A = accumulation_t<T>;
    ContextBackward<T> backward(args);
    const ContextSizes& sizes = backward.sizes();
    for (int32_t turn = 0; turn < sizes.chunks.ranks; ++turn) {
      const int32_t source = sizes.source(turn);
      const int64_t first = source * sizes.tokens * sizes.key_stride;
      T* d_kv = args.out<T>(1) + first;
      backward.add_source(args.in<T>(2) + first, source,
                          [&](int64_t token, int64_t column, const A* gradient, int64_t size) {
                            store(gradient, d_kv + token * sizes.key_stride + column, size);
                          });
    }
    backward.finish();
  }
};

// In each turn a rank sends on the keys and values that it has, adds what it makes of them to the
// gradients that came with them in the turn before, and sends those on, too. After the last turn
// the gradients of its own come home.
template <class T>
struct RingAttentionGradientKernel {
  static void run(const KernelArguments& args) {
    using A = accumulation_t<T>;
    ContextBackward<T> backward(args);
    const ContextSizes& sizes = backward.sizes();
    const int32_t ranks = sizes.chunks.ranks;
    const Ring ring(args, sizes.chunks);
    const int64_t elements = sizes.tokens * sizes.key_stride;
    auto* gradients = reinterpret_cast<A*>(backward.rest());
    const auto gradient_view = [&](int32_t number) {
      return TensorView{.data = gradients + number * elements,
                        .dtype = dtype_of<A>,
                        .shape = args.input(2).shape};
    };
    const TensorView arrived = gradient_view(2);
    TravellingKeys<T> keys(args.input(2), reinterpret_cast<std::byte*>(gradients + 3 * elements));
    for (int32_t turn = 0; turn < ranks; ++turn) {
      const bool last = turn + 1 == ranks;
      if (!last) ring.send(keys.view());
      // Of the turn before the last one its message is finished: the buffer is free.
      const TensorView mine = gradient_view(turn % 2);
      A* sums = mine.as<A>();
      backward.add_source(keys.data(), sizes.source(turn),
                          [&](int64_t token, int64_t column, const A* gradient, int64_t size) {
                            std::copy_n(gradient, size, sums + token * sizes.key_stride + column);
                          });
      if (turn > 0) {
        ring.receive(arrived);
        const A* before = arrived.as<A>();
        args.pool->parallel_ranges(elements, row_grain(1), [&](int64_t begin, int64_t end, int) {
          for (int64_t i = begin; i < end; ++i) sums[i] += before[i];
        });
      }
      if (ranks > 1) ring.send(mine);
      if (turn > 0) ring.finish_send();  // of the gradients of the turn before
      if (last) break;
      const TensorView incoming = keys.incoming();
      ring.receive(incoming);
      ring.finish_send();  // of the keys
      keys.take(incoming);
    }
    const A* home = gradient_view(0).template as<A>();
    if (ranks > 1) {
      ring.receive(arrived);
      ring.finish_send();
      home = arrived.as<A>();
    }
    T* d_kv = args.out<T>(1);
    args.pool->parallel_ranges(elements, row_grain(1), [&](int64_t begin, int64_t end, int) {
      store(home + begin, d_kv + begin, end - begin);
    });
    backward.finish();
  }
};

uint64_t context_sum_bytes(int64_t elements, DType dtype) {
  return static_cast<uint64_t>(elements) * size_of(accumulation_dtype(dtype));
}

// Two buffers of keys and values.
uint64_t travelling_bytes(const ContextSizes& sizes, DType dtype) {
  return static_cast<uint64_t>(2 * sizes.tokens * sizes.key_stride) * size_of(dtype);
}

}  // namespace

CpuKernel context_attention_cpu_kernel(const OpView& op) {
  return select_float_kernel<ContextAttentionKernel>(op.input(0).dtype);
}

CpuKernel context_attention_gradient_cpu_kernel(const OpView& op) {
  return select_float_kernel<ContextAttentionGradientKernel>(op.input(0).dtype);
}

CpuKernel ring_attention_cpu_kernel(const OpView& op) {
  return select_float_kernel<RingAttentionKernel>(op.input(0).dtype);
}

CpuKernel ring_attention_gradient_cpu_kernel(const OpView& op) {
  return select_float_kernel<RingAttentionGradientKernel>(op.input(0).dtype);
}

uint64_t context_attention_scratch_bytes(const ContextAttentionAttributes& attributes,
                                         DType dtype) {
  const ContextSizes sizes(attributes);
  const bool copied = dtype != accumulation_dtype(dtype);
  const int64_t copies = copied ? 2 * sizes.head_dim + sizes.value_dim : 0;  // of q, k, v
  return context_sum_bytes(sizes.block * (sizes.block + copies), dtype);
}

uint64_t context_attention_gradient_scratch_bytes(const ContextAttentionAttributes& attributes,
                                                  DType dtype) {
  const ContextSizes sizes(attributes);
  const bool copied = dtype != accumulation_dtype(dtype);
  // Of q, k, v and d_out.
  const int64_t copies = copied ? 2 * (sizes.head_dim + sizes.value_dim) : 0;
  return context_sum_bytes(sizes.block * (2 * sizes.block + copies), dtype);
}

uint64_t context_attention_workspace_bytes(const ContextAttentionAttributes& attributes,
                                           DType dtype, bool ring) {
  const ContextSizes sizes(attributes);
  return context_sum_bytes(sizes.tokens * sizes.heads * (sizes.value_dim + 2), dtype) +
         (ring ? travelling_bytes(sizes, dtype) : 0);
}

uint64_t context_attention_gradient_workspace_bytes(const ContextAttentionAttributes& attributes,
                                                    DType dtype, bool ring) {
  const ContextSizes sizes(attributes);
  const int64_t travelling = ring ? 3 * sizes.tokens * sizes.key_stride : 0;
  const int64_t of_head = 2 * sizes.head_dim + sizes.value_dim + 1;
  return context_sum_bytes(sizes.tokens * sizes.heads * of_head + travelling, dtype) +
         (ring ? travelling_bytes(sizes, dtype) : 0);
}

}  // namespace troupe
