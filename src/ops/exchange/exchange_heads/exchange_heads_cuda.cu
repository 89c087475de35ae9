#include "comm/cuda/peer_exchange.h"
#include "ops/exchange/exchange_heads/exchange_heads.h"
#include "program/cuda/device.cuh"

namespace troupe {
namespace {

// Sizes in units of a copy.
struct HeadSizes {
  int rank = 0;
  int ranks = 0;
  int64_t sequence = 0;  // of the whole
  int64_t here = 0;      // rows of a rank in each sequence
  int64_t rows = 0;      // of a rank
  int64_t queries = 0;   // a rank's share of a row's query heads
  int64_t keys = 0;      // of a row's key heads
  int64_t values = 0;    // of its value heads

  __host__ __device__ int64_t width() const { return queries + keys + values; }
  // Where `rank` has its row `row` in the whole.
  __device__ int64_t whole_row(int place, int64_t row) const {
    const int64_t half = here / 2;
    const int64_t i = row % here;
    const int64_t position = ranks == 1 ? i
                             : i < half ? place * half + i
                                        : (2 * ranks - 2 - place) * half + i;
    return row / here * sequence + position;
  }
  // Unit i of the heads of `place` in a row of all heads.
  __device__ int64_t column(int place, int64_t i) const {
    if (i < queries) return place * queries + i;
    if (i < queries + keys) return ranks * queries + place * keys + i - queries;
    return ranks * (queries + keys) + place * values + i - queries - keys;
  }
};

template <class Unit>
struct HeadsOfRanks {
  std::array<Unit*, kMostPeers> of{};
};

// Where the two meet, or, in a staged group, where heads are packed for a rank, and where they are
// put into place.
enum class HeadStep { all, pack, unpack };

// Rows of rank blockIdx.y with this rank's heads, or rows of this rank with that one's heads. What
// is packed for a rank is what it would fetch: the sources are then places for it.
template <class Unit, bool kToHeads, HeadStep kStep>
__global__ void exchange_heads_kernel(HeadsOfRanks<Unit> sources, Unit* target, HeadSizes sizes) {
  const int other = (sizes.rank + static_cast<int>(blockIdx.y)) % sizes.ranks;
  Unit* const source = sources.of[static_cast<size_t>(other)];
  const int64_t width = sizes.width();
  const int64_t all = width * sizes.ranks;
  const int64_t threads = int64_t{gridDim.x} * blockDim.x;
#pragma unroll 4
  for (int64_t n = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; n < sizes.rows * width;
       n += threads) {
    const int64_t row = n / width;
    const int64_t i = n % width;
    if constexpr (kStep == HeadStep::pack) {
      source[n] = kToHeads ? target[row * all + sizes.column(other, i)]
                           : target[sizes.whole_row(other, row) * width + i];
    } else if constexpr (kToHeads) {
      const int64_t from = kStep == HeadStep::all ? row * all + sizes.column(sizes.rank, i) : n;
      target[sizes.whole_row(other, row) * width + i] = source[from];
    } else {
      const int64_t from =
          kStep == HeadStep::all ? sizes.whole_row(sizes.rank, row) * width + i : n;
      target[row * all + sizes.column(other, i)] = source[from];
    }
  }
}

template <class Unit, bool kToHeads, HeadStep kStep>
void launch_exchange(const CudaKernelArguments& args, const HeadsOfRanks<Unit>& sources,
                     void* target, const HeadSizes& sizes) {
  const int64_t elements = sizes.rows * sizes.width();
  const auto blocks = static_cast<unsigned>(
      std::clamp<int64_t>(ceil_divide(elements, 1024), 1, most_blocks_of_piece(args, sizes.ranks)));
  launch(args, {dim3(blocks, static_cast<unsigned>(sizes.ranks)), 256},
         exchange_heads_kernel<Unit, kToHeads, kStep>, sources, static_cast<Unit*>(target), sizes);
}

template <class Unit, bool kToHeads>
void exchange_in_units(const CudaKernelArguments& args, HeadSizes sizes) {
  const CudaPeers& peers = *args.peers;
  const auto unit = static_cast<int64_t>(sizeof(Unit));
  sizes.queries /= unit;
  sizes.keys /= unit;
  sizes.values /= unit;
  HeadsOfRanks<Unit> sources;
  if (!peers.is_staged()) {
    for (int r = 0; r < peers.size(); ++r) {
      sources.of[static_cast<size_t>(r)] = peers.in<Unit>(r, 0);
    }
    launch_exchange<Unit, kToHeads, HeadStep::all>(args, sources, args.output(0).data, sizes);
    return;
  }
  // A section for each rank, of its heads or its rows, is sent, and one received.
  const int64_t bytes = sizes.rows * sizes.width() * unit;
  std::byte* const received = args.staging + staged_section_bytes(bytes, peers.size());
  for (int r = 0; r < peers.size(); ++r) {
    sources.of[static_cast<size_t>(r)] = reinterpret_cast<Unit*>(args.staging + r * bytes);
  }
  launch_exchange<Unit, kToHeads, HeadStep::pack>(args, sources, args.input(0).data, sizes);
  exchange_sections(args, args.staging, received, bytes);
  for (int r = 0; r < peers.size(); ++r) {
    if (r == peers.rank()) continue;
    sources.of[static_cast<size_t>(r)] = reinterpret_cast<Unit*>(received + r * bytes);
  }
  launch_exchange<Unit, kToHeads, HeadStep::unpack>(args, sources, args.output(0).data, sizes);
}

template <bool kToHeads>
void exchange(const CudaKernelArguments& args) {
  const CudaPeers& peers = *args.peers;
  const auto& a = args.attributes->as<ExchangeHeadsAttributes>();
  TROUPE_CHECK(peers.size() == a.chunks.ranks && peers.rank() == a.chunks.rank,
               "an exchange of heads: another group");
  const auto element = static_cast<int64_t>(size_of(args.input(0).dtype));
  const int64_t head_bytes = a.head_dim * element;
  const int64_t value_bytes = a.value_size() * element;
  HeadSizes sizes{.rank = peers.rank(), .ranks = peers.size(), .sequence = a.sequence};
  sizes.here = a.sequence / peers.size();
  sizes.rows = a.batch * sizes.here;
  sizes.queries = a.heads / peers.size() * head_bytes;
  sizes.keys = a.groups / peers.size() * head_bytes;
  sizes.values = a.groups / peers.size() * value_bytes;
  peers.barrier(args);
  if (head_bytes % 16 == 0 && value_bytes % 16 == 0) {
    exchange_in_units<uint4, kToHeads>(args, sizes);
  } else if (head_bytes % 4 == 0 && value_bytes % 4 == 0) {
    exchange_in_units<uint32_t, kToHeads>(args, sizes);
  } else {
    exchange_in_units<uint16_t, kToHeads>(args, sizes);
  }
  peers.barrier(args);
}

}  // namespace

CudaKernel sequence_to_heads_cuda_kernel(const OpView& op) {
  require_peers(op.attributes<ExchangeHeadsAttributes>().chunks.ranks, "heads travel");
  return &exchange<true>;
}

CudaKernel heads_to_sequence_cuda_kernel(const OpView& op) {
  require_peers(op.attributes<ExchangeHeadsAttributes>().chunks.ranks, "heads travel");
  return &exchange<false>;
}

}  // namespace troupe
