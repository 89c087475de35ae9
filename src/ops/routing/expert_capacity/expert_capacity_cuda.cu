#include "ops/routing/expert_capacity/expert_capacity.h"
#include "program/cuda/device.cuh"

namespace troupe {
namespace {

constexpr int kTile = 256;  // slots that a block looks at, and compares with, at a time

// The sequences of the policy position: see ExpertCapacityAttributes.
struct Places {
  int64_t sequence_tokens;  // 0: all tokens are one sequence
  int64_t first_token;
  int64_t top_k;

  // Of the token of a slot: earlier ones have smaller numbers.
  __device__ int64_t of(int64_t slot, int64_t slots) const {
    const int64_t token = slot / top_k;
    if (sequence_tokens == 0) return token;
    const int64_t number = first_token + token;
    const int64_t most_sequences = (first_token + slots / top_k) / sequence_tokens + 1;
    return number % sequence_tokens * most_sequences + number / sequence_tokens;
  }
};

// A slot is kept when fewer than `capacity` slots of its expert come before it: those that are more
// probable, of equal ones the earlier ones; with the policy position, those with earlier places.
// Counting them needs no sorting, and is the same however the work is spread.
template <class T>
__global__ void expert_capacity_kernel(const T* probabilities, const int32_t* indices,
                                       int32_t* kept, int64_t slots, int32_t experts,
                                       int64_t capacity, Places places) {
  __shared__ int32_t tile_experts[kTile];
  __shared__ T tile_keys[kTile];
  __shared__ int64_t tile_places[kTile];
  const auto key_of = [=](int64_t slot) {
    if (probabilities == nullptr) return T(0);
    const T p = probabilities[slot];
    return p == p ? p : -infinity<T>();
  };
  const int64_t slot = int64_t{blockIdx.x} * kTile + threadIdx.x;
  const int32_t expert = slot < slots ? indices[slot] : -1;
  const bool counts = expert >= 0 && expert < experts;
  const T key = counts ? key_of(slot) : T(0);
  const int64_t place = places.of(slot, slots);
  int64_t before = 0;
  for (int64_t first = 0; first < slots; first += kTile) {
    const int64_t other = first + threadIdx.x;
    __syncthreads();
    tile_experts[threadIdx.x] = other < slots ? indices[other] : -1;
    tile_keys[threadIdx.x] = other < slots ? key_of(other) : T(0);
    tile_places[threadIdx.x] = places.of(other, slots);
    __syncthreads();
    if (!counts) continue;
    for (int i = 0; i < kTile; ++i) {
      if (tile_experts[i] != expert) continue;
      const bool is_earlier =
          tile_places[i] < place || (tile_places[i] == place && first + i < slot);
      if (tile_keys[i] > key || (tile_keys[i] == key && is_earlier)) ++before;
    }
  }
  if (slot < slots) kept[slot] = counts && before < capacity ? expert : -1;
}

template <class T>
void run_expert_capacity(const CudaKernelArguments& args) {
  const auto& attributes = args.attributes->as<ExpertCapacityAttributes>();
  const int64_t slots = args.input(1).shape.elements();
  const T* probabilities = attributes.policy == DropPolicy::probs ? args.in<T>(0) : nullptr;
  launch(args, {static_cast<unsigned>(ceil_divide(slots, kTile)), kTile}, expert_capacity_kernel<T>,
         probabilities, args.in<int32_t>(1), args.out<int32_t>(0), slots, attributes.experts,
         attributes.capacity,
         Places{attributes.sequence_tokens, attributes.first_token, args.input(1).shape[1]});
}

}  // namespace

CudaKernel expert_capacity_cuda_kernel(const OpView& op) {
  const bool looks = op.attributes<ExpertCapacityAttributes>().policy == DropPolicy::probs;
  return looks && op.input(0).dtype == DType::f64 ? &run_expert_capacity<double>
                                                  : &run_expert_capacity<float>;
}

}  // namespace troupe
