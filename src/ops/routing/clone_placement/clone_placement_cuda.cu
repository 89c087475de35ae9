#include "ops/cuda/slot_chunks.cuh"
#include "ops/routing/clone_placement/clone_placement.h"

namespace troupe {
namespace {

constexpr int kPlaceThreads = 256;
constexpr int32_t kMostRows = 0x7fffffff;

// By a warp: the number of the largest of `count` values, the lowest of equals. Those below 0 are
// left out; -1 where all are.
template <class Value>
__device__ __forceinline__ int32_t number_of_largest(int32_t count, int lane, const Value& value) {
  long long best = -1;
  for (int32_t i = lane; i < count; i += 32) {
    const int32_t own = value(i);
    const long long key = static_cast<long long>(own) << 32 | (kMostRows - i);
    if (own >= 0 && key > best) best = key;
  }
  best = warp_max(best);
  return best < 0 ? -1 : kMostRows - static_cast<int32_t>(best & kMostRows);
}

// One block: all threads lay out the slots, then one warp moves rows, a copy at a time.
__global__ void place_clones_kernel(const int32_t* loads, int32_t own,
                                    ClonePlacementAttributes attributes, int32_t* experts,
                                    int32_t* slot_loads) {
  extern __shared__ int32_t shared[];
  const int32_t parts = attributes.parts;
  const int32_t clones = attributes.clones;
  const int32_t slots = own + clones;
  int32_t* const rows = shared;          // [parts]
  int32_t* const used = shared + parts;  // [parts], places
  for_row(int64_t{parts} * clones, [=](int64_t i) { experts[i] = -1; });
  for_row(int64_t{parts} * slots, [=](int64_t i) {
    const auto rank = static_cast<int32_t>(i / slots);
    const auto slot = static_cast<int32_t>(i % slots);
    slot_loads[i] = slot < own ? loads[rank * own + slot] : 0;
  });
  for_row(parts, [=](int64_t rank) {
    int32_t sum = 0;
    for (int32_t e = 0; e < own; ++e) sum += loads[rank * own + e];
    rows[rank] = sum;
    used[rank] = 0;
  });
  __syncthreads();
  if (threadIdx.x >= 32) return;

  const int lane = static_cast<int>(threadIdx.x);
  long long sum = 0;
  for (int32_t rank = lane; rank < parts; rank += 32) sum += rows[rank];
  sum = warp_sum(sum);
  const auto mean = static_cast<int32_t>((sum + parts - 1) / parts);
  const int32_t least = max(1, mean / kLeastShareOfMean);
  while (true) {
    const int32_t fullest = number_of_largest(parts, lane, [=](int32_t i) { return rows[i]; });
    const int32_t emptiest = number_of_largest(
        parts, lane, [=](int32_t i) { return used[i] < clones ? kMostRows - rows[i] : -1; });
    if (emptiest < 0) return;
    int32_t* const here = slot_loads + fullest * slots;
    const int32_t hottest = number_of_largest(own, lane, [=](int32_t i) { return here[i]; });
    const int32_t moved = min(min(rows[fullest] - mean, mean - rows[emptiest]), here[hottest]);
    if (moved < least) return;
    __syncwarp();  // all have read
    if (lane == 0) {
      const int32_t place = used[emptiest]++;
      experts[emptiest * clones + place] = fullest * own + hottest;
      slot_loads[emptiest * slots + own + place] = moved;
      here[hottest] -= moved;
      rows[fullest] -= moved;
      rows[emptiest] += moved;
    }
    __syncwarp();
  }
}

constexpr int kScanWarps = 8;

// A warp for each expert: the number of its first row of this rank, from the counts of chunks.
__global__ void first_rows_kernel(int32_t* histograms, int64_t chunks, const int32_t* running,
                                  int32_t experts, int32_t* first_rows) {
  const int32_t e = static_cast<int32_t>(blockIdx.x) * kScanWarps + threadIdx.x / 32;
  if (e >= experts) return;
  const int32_t total = scan_chunks(histograms + e * chunks, chunks);
  if (threadIdx.x % 32 == 0) first_rows[e] = running[e] - total;
}

__global__ void spread_kernel(const int32_t* indices, int64_t choices, int32_t experts,
                              ClonePlacementAttributes attributes, const int32_t* histograms,
                              const int32_t* first_rows, const int32_t* expert_of_clone,
                              const int32_t* slot_loads, int32_t* slots) {
  extern __shared__ int32_t next[];
  const int32_t clones = attributes.clones;
  const int32_t all_clones = attributes.parts * clones;
  const int32_t own = experts / attributes.parts;
  for_row(experts,
          [=](int64_t e) { next[e] = first_rows[e] + histograms[e * gridDim.x + blockIdx.x]; });
  __syncwarp();
  walk_chunk(indices, choices, experts, next, [=](int64_t choice, int32_t expert, int32_t row) {
    int32_t slot = -1;
    if (expert >= 0) {
      slot = expert / own * (own + clones) + expert % own;
      for (int32_t clone = 0; row >= slot_loads[slot] && clone < all_clones; ++clone) {
        if (expert_of_clone[clone] != expert) continue;
        row -= slot_loads[slot];
        slot = clone / clones * (own + clones) + own + clone % clones;
      }
    }
    slots[choice] = slot;
  });
}

void run_place_clones(const CudaKernelArguments& args) {
  const auto& attributes = args.attributes->as<ClonePlacementAttributes>();
  const size_t shared_bytes = 2 * static_cast<size_t>(attributes.parts) * sizeof(int32_t);
  launch(args, {1, kPlaceThreads, shared_bytes}, place_clones_kernel, args.in<int32_t>(0),
         static_cast<int32_t>(args.input(0).shape[0] / attributes.parts), attributes,
         args.out<int32_t>(0), args.out<int32_t>(1));
}

void run_spread_over_clones(const CudaKernelArguments& args) {
  const auto& attributes = args.attributes->as<ClonePlacementAttributes>();
  const auto experts = static_cast<int32_t>(args.input(1).shape[0]);
  const int64_t choices = args.input(0).shape.elements();
  const int64_t chunks = warp_chunks(choices);
  auto* histograms = reinterpret_cast<int32_t*>(args.scratch);
  int32_t* const first_rows = histograms + chunks * experts;
  const Launch by_chunk{static_cast<unsigned>(chunks), 32,
                        static_cast<size_t>(experts) * sizeof(int32_t)};
  launch(args, by_chunk, count_slots_kernel, args.in<int32_t>(0), choices, experts, histograms);
  launch(args, {static_cast<unsigned>(ceil_divide(experts, kScanWarps)), 32 * kScanWarps},
         first_rows_kernel, histograms, chunks, args.in<int32_t>(1), experts, first_rows);
  launch(args, by_chunk, spread_kernel, args.in<int32_t>(0), choices, experts, attributes,
         histograms, first_rows, args.in<int32_t>(2), args.in<int32_t>(3), args.out<int32_t>(0));
}

}  // namespace

CudaKernel place_clones_cuda_kernel(const OpView&) {
  return &run_place_clones;
}

CudaKernel spread_over_clones_cuda_kernel(const OpView&) {
  return &run_spread_over_clones;
}

}  // namespace troupe
