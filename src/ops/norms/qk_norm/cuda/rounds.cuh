// Launching the kernels of both directions of qk_norm: those that stage rounds of a row in shared
// memory where the heads allow it (qk_norm_cuda.h), and those for any heads. Private to this
// folder.
#pragma once

#include "ops/norms/qk_norm/cuda/heads.cuh"

namespace troupe {

// What blocks go through whose threads have one step of a row at a time, and have it in shared
// memory before they need it: rows, or rounds of a row. It takes heads that turn as a whole, in
// steps of packs, one for each lane.
struct QkRounds {
  int64_t row;
  int head;
  bool has_step;

  __device__ QkRounds(const DeviceQkHeads& heads, int end, int rounds, int64_t number) {
    row = number;
    head = heads.group();
    if (rounds > 1) {
      row = number / rounds;
      head += static_cast<int>(number % rounds) * heads.groups();
    }
    has_step = heads.lane() < heads.steps && head < end;
  }
};

inline constexpr int kQkStages = 2;

__device__ __forceinline__ void copy_async(uint4* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
               :
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(to))), "l"(from)
               : "memory");
}
__device__ __forceinline__ void end_async_copies() {
  asm volatile("cp.async.commit_group;" : : : "memory");
}
// For all but the last kQkStages - 1 groups of this thread.
__device__ __forceinline__ void wait_for_async_copies() {
  asm volatile("cp.async.wait_group %0;" : : "n"(kQkStages - 1) : "memory");
}

// What such a block does: the steps of kTensors tensors, of two packs each, are copied to shared
// memory kQkStages rounds ahead. `copy(own, to)` begins those of a round that has a step, of which
// pack i belongs at to[i * threads]; `body(number, own, from)` does the work of a round, and must
// wait_for_async_copies() before it reads them, at from[i * threads].
template <int kTensors, class Copy, class Body>
__device__ __forceinline__ void for_each_round(const DeviceQkHeads& heads, int end, int rounds,
                                               int64_t count, uint4* staged, const Copy& copy,
                                               const Body& body) {
  const auto threads = static_cast<int>(blockDim.x);
  const auto at = [&](int stage) { return staged + stage * 2 * kTensors * threads + threadIdx.x; };
  const auto fetch = [&](int64_t number, int stage) {
    const QkRounds own(heads, end, rounds, number);
    if (number < count && own.has_step) copy(own, at(stage));
    end_async_copies();
  };
#pragma unroll
  for (int stage = 0; stage < kQkStages; ++stage) {
    fetch(blockIdx.x + int64_t{stage} * gridDim.x, stage);
  }
  int stage = 0;
  for (int64_t number = blockIdx.x; number < count; number += gridDim.x) {
    body(number, QkRounds(heads, end, rounds, number), at(stage));
    fetch(number + int64_t{kQkStages} * gridDim.x, stage);
    stage = stage + 1 == kQkStages ? 0 : stage + 1;
  }
}

// Launches Kernels::rounds<T, kPerHead>(), which stages steps of kTensors tensors, where the heads
// allow it, and else Kernels::any<T, kStep, kPerHead>().
template <class T, class Kernels, class... Values>
void launch_for_rows(const CudaKernelArguments& args, bool in_place, const Values&... values) {
  const auto& attributes = args.attributes->as<QkNormAttributes>();
  const bool packs = heads_are_made_of_packs(attributes, dtype_of<T>);
  constexpr int kPack = Pack<T>::kElements;
  const DeviceQkHeads heads(attributes, packs ? kPack : 1);
  const int64_t rows = args.input(0).shape[0];
  const bool per_head = attributes.scope == QkNormScope::head;
  const int end = in_place ? heads.normalized : heads.all;
  const unsigned threads = heads.threads(end);
  const int64_t rounds = heads.rounds(end);
  if (takes_rounds(attributes, QkSteps(attributes, packs ? kPack : 1), packs, end)) {
    const auto kernel =
        per_head ? Kernels::template rounds<T, true>() : Kernels::template rounds<T, false>();
    const size_t bytes = size_t{kQkStages} * Kernels::kTensors * 2 * threads * sizeof(uint4);
    allow_shared_bytes(kernel, bytes);
    launch(args, {blocks_for(args, rows * rounds, 1), threads, bytes}, kernel, values...,
           LiveRows(args.input(0)), heads, attributes, end, static_cast<int>(rounds));
    return;
  }
  const auto run = [&](auto kernel) {
    launch(args, {static_cast<unsigned>(rows), threads}, kernel, values..., LiveRows(args.input(0)),
           heads, attributes, end);
  };
  if (per_head) {
    run(packs ? Kernels::template any<T, kPack, true>() : Kernels::template any<T, 1, true>());
  } else {
    run(packs ? Kernels::template any<T, kPack, false>() : Kernels::template any<T, 1, false>());
  }
}

}  // namespace troupe
