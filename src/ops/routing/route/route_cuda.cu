#include "ops/cuda/slot_chunks.cuh"
#include "ops/routing/route/route.h"

namespace troupe {
namespace {

// A counting sort in three launches: each chunk of slots counts its slots per expert; one block
// lays out the experts' rows; each chunk places its slots.

// One block. The histograms become the number of slots that each expert has in earlier chunks.
__global__ void lay_out_rows_kernel(int32_t* histograms, int64_t chunks, int32_t* counts,
                                    int32_t* offsets, int32_t* row_slot, int32_t bound,
                                    RouteAttributes attributes) {
  const int32_t experts = attributes.experts;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int warps = static_cast<int>(blockDim.x) / 32;
  for (int32_t e = warp; e < experts; e += warps) {
    const int32_t total = scan_chunks(histograms + e * chunks, chunks);
    if (lane == 0) counts[e] = total;
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    int32_t row = 0;
    for (int32_t first = 0; first < experts; first += 32) {
      const int32_t e = first + lane;
      int32_t rows = 0;
      if (e < experts) {
        rows = attributes.padded_capacity;
        if (rows == 0) {
          rows = (counts[e] + attributes.row_multiple - 1) / attributes.row_multiple *
                 attributes.row_multiple;
        }
      }
      const int32_t through = warp_prefix_sum(rows);
      if (e < experts) {
        offsets[e] = min(row + through - rows, bound);
        counts[e] = min(counts[e], min(row + through, bound) - offsets[e]);
      }
      row += __shfl_sync(0xffffffffU, through, 31);
    }
    if (lane == 0) offsets[experts] = min(row, bound);
  }
  __syncthreads();
  for (int32_t e = warp; e < experts; e += warps) {
    for (int32_t row = offsets[e] + counts[e] + lane; row < offsets[e + 1]; row += 32) {
      row_slot[row] = -1;
    }
  }
}

__global__ void place_slots_kernel(const int32_t* indices, int64_t slots, int32_t experts,
                                   const int32_t* histograms, const int32_t* counts,
                                   const int32_t* offsets, int32_t* row_slot, int32_t* slot_row) {
  extern __shared__ int32_t next[];  // [experts], the row of an expert's next slot
  int32_t* ends = next + experts;    // [experts]
  for_row(experts, [=](int64_t e) {
    next[e] = offsets[e] + histograms[e * gridDim.x + blockIdx.x];
    ends[e] = offsets[e] + counts[e];
  });
  __syncwarp();
  walk_chunk(indices, slots, experts, next, [=](int64_t slot, int32_t expert, int32_t row) {
    const bool has_row = expert >= 0 && row < ends[expert];
    if (has_row) row_slot[row] = static_cast<int32_t>(slot);
    slot_row[slot] = has_row ? row : -1;
  });
}

void run_route(const CudaKernelArguments& args) {
  const auto& attributes = args.attributes->as<RouteAttributes>();
  const int64_t slots = args.input(0).shape.elements();
  const int64_t chunks = warp_chunks(slots);
  auto* histograms = reinterpret_cast<int32_t*>(args.scratch);
  const size_t table = static_cast<size_t>(attributes.experts) * sizeof(int32_t);
  const Launch by_chunk{static_cast<unsigned>(chunks), 32, table};
  launch(args, by_chunk, count_slots_kernel, args.in<int32_t>(0), slots, attributes.experts,
         histograms);
  launch(args, {1, 1024}, lay_out_rows_kernel, histograms, chunks, args.out<int32_t>(0),
         args.out<int32_t>(1), args.out<int32_t>(2), static_cast<int32_t>(args.output(2).shape[0]),
         attributes);
  launch(args, {by_chunk.grid, by_chunk.block, 2 * table}, place_slots_kernel, args.in<int32_t>(0),
         slots, attributes.experts, histograms, args.out<int32_t>(0), args.out<int32_t>(1),
         args.out<int32_t>(2), args.out<int32_t>(3));
}

}  // namespace

CudaKernel route_cuda_kernel(const OpView&) {
  return &run_route;
}

}  // namespace troupe
