#include <array>
#include <vector>

#include "comm/cuda/peer_exchange.h"
#include "ops/attention/attention/cuda/with_variant.h"
#include "ops/attention/context_attention/context_attention.h"
#include "ops/attention/context_attention/context_attention_cuda.h"
#include "program/cuda/device.cuh"

namespace troupe {
namespace {

// Copies the keys and values of all ranks to their positions; rows_of(r): where those of rank r
// are.
template <class RowsOf>
void copy_keys(const CudaKernelArguments& args, const AttentionShape& shape, const RowsOf& rows_of,
               std::byte* keys) {
  const SequenceChunks& chunks = shape.chunks;
  const int64_t row_bytes = key_row_elements(shape) * static_cast<int64_t>(size_of(shape.dtype));
  PeerCopies copies(args);
  for (int step = 0; step < chunks.ranks; ++step) {
    const int32_t rank = (chunks.rank + step) % chunks.ranks;
    const SequenceChunks source{.ranks = chunks.ranks, .rank = rank};
    for (int64_t b = 0; b < shape.attributes.batch; ++b) {
      for (int64_t row = 0; row < shape.rows(); row += shape.chunk()) {
        const int64_t position = source.position(row, shape.rows());
        copies.add(rows_of(rank) + (b * shape.rows() + row) * row_bytes,
                   keys + (b * shape.positions() + position) * row_bytes,
                   shape.chunk() * row_bytes);
      }
    }
  }
  copies.launch();
}

// Fetches them from the other GPUs.
void gather_keys(const CudaKernelArguments& args, const AttentionShape& shape, int input,
                 std::byte* keys) {
  const CudaPeers& peers = *args.peers;
  TROUPE_CHECK(peers.size() == shape.chunks.ranks && peers.rank() == shape.chunks.rank,
               "ring_attention: another group");
  const CudaTensor& own = args.input(input);
  peers.barrier(args);
  const auto rows =
      read_from_peers(args, input, own.shape.elements() * static_cast<int64_t>(size_of(own.dtype)));
  copy_keys(
      args, shape, [&](int32_t rank) { return rows[static_cast<size_t>(rank)]; }, keys);
  peers.barrier(args);
}

// Those of context_attention are in its input.
void arrange_keys(const CudaKernelArguments& args, const AttentionShape& shape, int input,
                  std::byte* keys) {
  const auto* all = static_cast<const std::byte*>(args.input(input).data);
  const int64_t rank_bytes = shape.attributes.batch * shape.rows() * key_row_elements(shape) *
                             static_cast<int64_t>(size_of(shape.dtype));
  copy_keys(
      args, shape, [&](int32_t rank) { return all + rank * rank_bytes; }, keys);
}

// Of operands that both directions have.
AttentionCall call_of(const AttentionShape& shape, const CudaTensor& q, const CudaTensor& out,
                      const CudaTensor& lse, std::byte* keys, const int64_t* step,
                      const int32_t* starts) {
  const int64_t row = key_row_elements(shape);
  AttentionCall call{.shape = shape};
  call.query_stride = q.shape[1];
  call.key_stride = row;
  call.q = q.data;
  call.k = keys;
  call.v = keys + key_elements(shape) * static_cast<int64_t>(size_of(shape.dtype));
  call.out = out.data;
  call.lse = lse.data;
  call.step = step;
  call.starts = starts;
  return call;
}

// Where parts of the gradients of keys and values lie, by position, in the order in which they are
// summed.
template <class A>
struct KeyGradientParts {
  std::array<const A*, kMostPeers> of{};
  int count = 0;
  bool are_staged = false;  // all but the first have the rows of the result alone
};

// Which rows of keys and values a result has: those of `ranks` ranks from `first_rank` on, one
// rank's after the other's.
struct KeyRows {
  SequenceChunks chunks;
  int32_t first_rank = 0;
  int64_t ranks = 1;
  int64_t batch = 1;
  int64_t here = 1;   // rows of a rank in each sequence
  int64_t width = 1;  // elements of a row

  int64_t rows() const { return ranks * batch * here; }
  // The row, among those by position, of row `row` of the result.
  __device__ int64_t by_position(int64_t row) const {
    const int64_t place = row / here;
    const auto rank = static_cast<int32_t>(first_rank + place / batch);
    const int64_t half = here / 2;
    const int64_t i = row % here;
    const int64_t position = chunks.ranks == 1 ? i
                             : i < half        ? rank * half + i
                                               : (2 * chunks.ranks - 2 - rank) * half + i;
    return place % batch * here * chunks.ranks + position;
  }
};

// A block takes row after row.
template <class T>
__global__ void sum_key_gradients_kernel(KeyGradientParts<accumulation_t<T>> parts, KeyRows rows,
                                         int64_t count, T* d_kv) {
  for (int64_t row = blockIdx.x; row < count; row += gridDim.x) {
    const int64_t first = rows.by_position(row) * rows.width;
    const int64_t from = parts.are_staged ? row * rows.width : first;
    for (int64_t i = threadIdx.x; i < rows.width; i += blockDim.x) {
      accumulation_t<T> sum = parts.of[0][first + i];
      for (int k = 1; k < parts.count; ++k) sum += parts.of[static_cast<size_t>(k)][from + i];
      d_kv[row * rows.width + i] = round_to<T>(sum);
    }
  }
}

template <class T>
void sum_parts(const CudaKernelArguments& args, const KeyGradientParts<accumulation_t<T>>& parts,
               const KeyRows& rows) {
  launch(args, {blocks_for(args, rows.rows(), 1), threads_for_row(rows.width, 1)},
         sum_key_gradients_kernel<T>, parts, rows, rows.rows(),
         static_cast<T*>(args.output(1).data));
}

// parts_of(k): part k of `count`.
template <class PartOf>
void sum_key_gradients(const CudaKernelArguments& args, const AttentionShape& shape, int count,
                       const PartOf& part_of, int32_t first_rank, int64_t ranks) {
  const KeyRows rows{.chunks = shape.chunks,
                     .first_rank = first_rank,
                     .ranks = ranks,
                     .batch = shape.attributes.batch,
                     .here = shape.rows(),
                     .width = key_row_elements(shape)};
  const auto sum = [&]<class T>(T) {
    using A = accumulation_t<T>;
    KeyGradientParts<A> parts;
    parts.count = count;
    parts.are_staged = count > 1 && args.peers->is_staged();
    for (int k = 0; k < count; ++k) {
      parts.of[static_cast<size_t>(k)] = reinterpret_cast<const A*>(part_of(k));
    }
    sum_parts<T>(args, parts, rows);
  };
  if (shape.dtype == DType::f64) {
    sum(double());
  } else if (shape.dtype == DType::f32) {
    sum(float());
  } else if (shape.dtype == DType::f16) {
    sum(F16());
  } else {
    sum(Bf16());
  }
}

// Of a staged group: every rank sends each other one the part of the gradients of that rank's keys
// and values.
std::array<const std::byte*, kMostPeers> exchange_parts(const CudaKernelArguments& args,
                                                        const AttentionShape& shape) {
  const CudaPeers& peers = *args.peers;
  const int64_t row_bytes =
      key_row_elements(shape) * static_cast<int64_t>(size_of(accumulation_dtype(shape.dtype)));
  const int64_t part_bytes = shape.attributes.batch * shape.rows() * row_bytes;
  std::array<const std::byte*, kMostPeers> parts{};
  std::vector<PeerBlock> sends;
  std::vector<PeerBlock> receives;
  for (int32_t other = 0; other < peers.size(); ++other) {
    if (other == peers.rank()) {
      parts[static_cast<size_t>(other)] = args.scratch;
      continue;
    }
    std::byte* const staged = args.staging + other * align_staging(part_bytes);
    parts[static_cast<size_t>(other)] = staged;
    const SequenceChunks theirs{.ranks = shape.chunks.ranks, .rank = other};
    for (int64_t b = 0; b < shape.attributes.batch; ++b) {
      for (int64_t row = 0; row < shape.rows(); row += shape.chunk()) {
        const int64_t position = theirs.position(row, shape.rows());
        const int64_t bytes = shape.chunk() * row_bytes;
        sends.push_back(
            {other, args.scratch + (b * shape.positions() + position) * row_bytes, bytes});
        receives.push_back({other, staged + (b * shape.rows() + row) * row_bytes, bytes});
      }
    }
  }
  peers.exchange(args, sends, receives);
  return parts;
}

template <bool kRing, AttentionVariant kVariant>
void forward(const CudaKernelArguments& args) {
  const auto* starts = args.in<int32_t>(3);
  const AttentionShape shape = context_shape(args.attributes->as<ContextAttentionAttributes>(),
                                             args.input(0).dtype, starts != nullptr);
  const ContextScratch scratch(shape, /*gradient=*/false, kVariant);
  (kRing ? gather_keys : arrange_keys)(args, shape, 1, args.scratch);
  AttentionCall call = call_of(shape, args.input(0), args.output(0), args.output(1), args.scratch,
                               args.in<int64_t>(2), starts);
  call.sinks = sinks_of(args.input(4), shape.attributes);
  run_attention(args, call, kVariant, args.scratch + scratch.keys);
}

template <bool kRing, AttentionVariant kVariant>
void backward(const CudaKernelArguments& args) {
  const auto* starts = args.in<int32_t>(6);
  const AttentionShape shape = context_shape(args.attributes->as<ContextAttentionAttributes>(),
                                             args.input(1).dtype, starts != nullptr);
  const ContextScratch scratch(shape, /*gradient=*/true, kVariant);
  std::byte* const keys = args.scratch + scratch.sums;
  (kRing ? gather_keys : arrange_keys)(args, shape, 2, keys);
  AttentionCall call = call_of(shape, args.input(1), args.input(3), args.input(4), keys,
                               args.in<int64_t>(5), starts);
  call.d_q = args.output(0).data;
  call.d_out = args.input(0).data;
  call.d_k = args.scratch;
  call.d_v = args.scratch +
             key_elements(shape) * static_cast<int64_t>(size_of(accumulation_dtype(shape.dtype)));
  run_attention_gradient(args, call, kVariant, keys + scratch.keys);
  if constexpr (kRing) {
    const CudaPeers& peers = *args.peers;
    peers.barrier(args);
    std::array<const std::byte*, kMostPeers> parts{};
    for (int r = 0; r < peers.size(); ++r) parts[static_cast<size_t>(r)] = peers.scratch(r);
    if (peers.is_staged()) parts = exchange_parts(args, shape);
    // From the keys' own rank on up the ring.
    sum_key_gradients(
        args, shape, peers.size(),
        [&](int k) { return parts[static_cast<size_t>((peers.rank() + k) % peers.size())]; },
        peers.rank(), 1);
    peers.barrier(args);
  } else {
    sum_key_gradients(
        args, shape, 1, [&](int) { return args.scratch; }, 0, shape.chunks.ranks);
  }
}

}  // namespace

CudaKernel context_attention_cuda_kernel(const OpView&, AttentionVariant variant) {
  return with_variant(variant, [](auto own) -> CudaKernel { return &forward<false, own.value>; });
}
CudaKernel context_attention_gradient_cuda_kernel(const OpView&, AttentionVariant variant) {
  return with_variant(variant, [](auto own) -> CudaKernel { return &backward<false, own.value>; });
}
CudaKernel ring_attention_cuda_kernel(const OpView&, AttentionVariant variant) {
  return with_variant(variant, [](auto own) -> CudaKernel { return &forward<true, own.value>; });
}
CudaKernel ring_attention_gradient_cuda_kernel(const OpView& op, AttentionVariant variant) {
  require_peers(op.attributes<ContextAttentionAttributes>().chunks.ranks,
                "gradients of keys travel");
  return with_variant(variant, [](auto own) -> CudaKernel { return &backward<true, own.value>; });
}

}  // namespace troupe
