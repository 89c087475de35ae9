#include "ops/cuda/device.cuh"
#include "ops/cuda/peers.h"
#include "ops/exchange_heads/exchange_heads.h"

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
  int64_t keys = 0;      // likewise

  __device__ int64_t width() const { return queries + 2 * keys; }
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
    return ranks * (queries + keys) + place * keys + i - queries - keys;
  }
};

template <class Unit>
struct HeadsOfRanks {
  std::array<const Unit*, kMostPeers> of{};
};

// Rows of rank blockIdx.y with this rank's heads, or rows of this rank with that one's heads.
template <class Unit, bool kToHeads>
__global__ void exchange_heads_kernel(HeadsOfRanks<Unit> sources, Unit* target, HeadSizes sizes) {
  const int other = (sizes.rank + static_cast<int>(blockIdx.y)) % sizes.ranks;
  const Unit* source = sources.of[static_cast<size_t>(other)];
  const int64_t width = sizes.width();
  const int64_t all = width * sizes.ranks;
  const int64_t threads = int64_t{gridDim.x} * blockDim.x;
#pragma unroll 4
  for (int64_t n = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; n < sizes.rows * width;
       n += threads) {
    const int64_t row = n / width;
    const int64_t i = n % width;
    if constexpr (kToHeads) {
      target[sizes.whole_row(other, row) * width + i] =
          source[row * all + sizes.column(sizes.rank, i)];
    } else {
      target[row * all + sizes.column(other, i)] =
          source[sizes.whole_row(sizes.rank, row) * width + i];
    }
  }
}

template <class Unit, bool kToHeads>
void exchange_in_units(const CudaKernelArguments& args, HeadSizes sizes) {
  const CudaPeers& peers = *args.peers;
  HeadsOfRanks<Unit> sources;
  for (int r = 0; r < peers.size(); ++r) {
    sources.of[static_cast<size_t>(r)] = peers.in<Unit>(r, 0);
  }
  const auto unit = static_cast<int64_t>(sizeof(Unit));
  sizes.queries /= unit;
  sizes.keys /= unit;
  const int64_t elements = sizes.rows * (sizes.queries + 2 * sizes.keys);
  const auto blocks = static_cast<unsigned>(
      std::clamp<int64_t>(ceil_divide(elements, 1024), 1, 264 / peers.size()));
  launch(args, {dim3(blocks, static_cast<unsigned>(peers.size())), 256},
         exchange_heads_kernel<Unit, kToHeads>, sources, static_cast<Unit*>(args.output(0).data),
         sizes);
}

template <bool kToHeads>
void exchange(const CudaKernelArguments& args) {
  const CudaPeers& peers = *args.peers;
  const auto& a = args.attributes->as<ExchangeHeadsAttributes>();
  TROUPE_CHECK(peers.size() == a.chunks.ranks && peers.rank() == a.chunks.rank,
               "an exchange of heads: another group");
  const int64_t head_bytes = a.head_dim * static_cast<int64_t>(size_of(args.input(0).dtype));
  HeadSizes sizes{.rank = peers.rank(), .ranks = peers.size(), .sequence = a.sequence};
  sizes.here = a.sequence / peers.size();
  sizes.rows = a.batch * sizes.here;
  sizes.queries = a.heads / peers.size() * head_bytes;
  sizes.keys = a.groups / peers.size() * head_bytes;
  peers.meet(args);
  if (head_bytes % 16 == 0) {
    exchange_in_units<uint4, kToHeads>(args, sizes);
  } else if (head_bytes % 4 == 0) {
    exchange_in_units<uint32_t, kToHeads>(args, sizes);
  } else {
    exchange_in_units<uint16_t, kToHeads>(args, sizes);
  }
  peers.meet(args);
}

}  // namespace

CudaKernel sequence_to_heads_cuda_kernel(const OpView&) {
  return &exchange<true>;
}

CudaKernel heads_to_sequence_cuda_kernel(const OpView&) {
  return &exchange<false>;
}

}  // namespace troupe
