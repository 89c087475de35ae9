#include <chrono>
#include <string>
#include <thread>
#include <type_traits>

#include "comm/cuda/peers.h"
#include "program/cuda/device.cuh"

namespace troupe {
namespace {

// Flags travel between GPUs: everything that happened before a release is seen by who has acquired
// it, what kernels did that came earlier on the stream, too.
__device__ __forceinline__ void release(uint32_t* flag, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}
__device__ __forceinline__ uint32_t acquire(const uint32_t* flag) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value;
}
__device__ __forceinline__ uint64_t nanoseconds() {
  uint64_t time;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
  return time;
}

// Waits until the flag, which only grows, has come to `value`. Counts wrap around.
__device__ void wait_for(const uint32_t* flag, uint32_t value, const PeerGroup& group, int32_t op,
                         int place) {
  const auto reached = [&] { return static_cast<int32_t>(acquire(flag) - value) >= 0; };
  if (reached()) return;
  const uint64_t start = nanoseconds();
  volatile PeerFault* const fault = group.fault;
  for (uint32_t turn = 1;; ++turn) {
    if (reached()) return;
    // The host's memory is far away: it is asked now and then.
    if (turn % 256 == 0 && fault->happened != 0) return;
    if (nanoseconds() - start > group.limit_ns) break;
    if (turn > 64) __nanosleep(200);
  }
  fault->op = op;
  fault->place = place;
  __threadfence_system();
  fault->happened = 1;
}

// Arrives at the next barrier, or waits in the one at which it has arrived, or both.
__global__ void barrier_kernel(PeerGroup group, int32_t op, bool comes, bool waits) {
  PeerBoard* const own = group.boards[static_cast<size_t>(group.rank)];
  const auto place = static_cast<int>(threadIdx.x);
  const uint32_t number = own->barriers + (comes ? 1 : 0);
  __syncthreads();
  if (place == 0) own->barriers = number;
  if (place >= group.size || place == group.rank) return;
  if (comes) {
    __threadfence_system();
    release(&group.boards[static_cast<size_t>(place)]->arrived[static_cast<size_t>(group.rank)],
            number);
  }
  if (waits) wait_for(&own->arrived[static_cast<size_t>(place)], number, group, op, place);
}

__global__ void post_kernel(PeerGroup group, int to) {
  PeerBoard* const own = group.boards[static_cast<size_t>(group.rank)];
  const uint32_t number = ++own->sends[static_cast<size_t>(to)];
  __threadfence_system();
  release(&group.boards[static_cast<size_t>(to)]->posted[static_cast<size_t>(group.rank)], number);
}

__global__ void await_kernel(PeerGroup group, int32_t op, int from) {
  PeerBoard* const own = group.boards[static_cast<size_t>(group.rank)];
  const uint32_t number = ++own->receives[static_cast<size_t>(from)];
  wait_for(&own->posted[static_cast<size_t>(from)], number, group, op, from);
}

__global__ void fetched_kernel(PeerGroup group, int from) {
  PeerBoard* const own = group.boards[static_cast<size_t>(group.rank)];
  __threadfence_system();
  release(&group.boards[static_cast<size_t>(from)]->fetched[static_cast<size_t>(group.rank)],
          own->receives[static_cast<size_t>(from)]);
}

__global__ void finish_kernel(PeerGroup group, int32_t op, int to) {
  PeerBoard* const own = group.boards[static_cast<size_t>(group.rank)];
  const uint32_t number = ++own->ends[static_cast<size_t>(to)];
  wait_for(&own->fetched[static_cast<size_t>(to)], number, group, op, to);
}

__global__ void mark_kernel(int32_t* place, int32_t value) {
  *static_cast<volatile int32_t*>(place) = value;
  __threadfence_system();
}

// `bytes` in units of one type.
template <class Unit>
__device__ __forceinline__ void copy_as(const std::byte* from, std::byte* to, int64_t bytes) {
  copy_units(reinterpret_cast<const Unit*>(from), reinterpret_cast<Unit*>(to),
             bytes / static_cast<int64_t>(sizeof(Unit)));
}

__global__ void copy_kernel(PeerCopies::Parameters copies) {
  const auto piece = static_cast<size_t>(blockIdx.y);
  const std::byte* from = copies.from[piece];
  std::byte* to = copies.to[piece];
  const int64_t bytes = copies.bytes[piece];
  const auto bits = reinterpret_cast<uintptr_t>(from) | reinterpret_cast<uintptr_t>(to) |
                    static_cast<uintptr_t>(bytes);
  if (bits % 16 == 0) {
    copy_as<uint4>(from, to, bytes);
  } else if (bits % 4 == 0) {
    copy_as<uint32_t>(from, to, bytes);
  } else if (bits % 2 == 0) {
    copy_as<uint16_t>(from, to, bytes);
  } else {
    copy_as<uint8_t>(from, to, bytes);
  }
}

// What a term is in a sum, and back.
template <class Sum, class T>
__device__ __forceinline__ Sum term_of(T value) {
  return widen(value);
}
template <>
__device__ __forceinline__ int32_t term_of<int32_t, int32_t>(int32_t value) {
  return value;
}
template <class T>
__device__ __forceinline__ T round_sum(int32_t value) {
  return value;
}
template <class T>
__device__ __forceinline__ T round_sum(float value) {
  return round_to<T>(value);
}
template <class T>
__device__ __forceinline__ T round_sum(double value) {
  return round_to<T>(value);
}

// kStep elements from `at` on of one sum.
template <class T, class Sum, class Result, int kStep>
__device__ __forceinline__ void sum_step(const PeerSums::Parameters& sums, void* const* pointers,
                                         int64_t at) {
  constexpr int kFlight = 4;
  const auto term = [&](int k) {
    return load_step<T, kStep>(static_cast<const T*>(pointers[k]) + at);
  };
  Sum total[kStep];
  const Pack<T> first = term(0);
#pragma unroll
  for (int i = 0; i < kStep; ++i) total[i] = term_of<Sum>(first.values[i]);
  for (int k = 1; k < sums.terms; k += kFlight) {
    Pack<T> next[kFlight];
#pragma unroll
    for (int j = 0; j < kFlight; ++j) {
      if (k + j < sums.terms) next[j] = term(k + j);
    }
#pragma unroll
    for (int j = 0; j < kFlight; ++j) {
      if (k + j >= sums.terms) continue;
#pragma unroll
      for (int i = 0; i < kStep; ++i) total[i] += term_of<Sum>(next[j].values[i]);
    }
  }
  for (int k = 0; k < sums.results; ++k) {
    Result* const result = static_cast<Result*>(pointers[sums.terms + k]) + at;
    if constexpr (std::is_same_v<Result, T>) {
      Pack<T> rounded;
#pragma unroll
      for (int i = 0; i < kStep; ++i) rounded.values[i] = round_sum<T>(total[i]);
      if (sums.accumulate) {
        const Pack<T> before = load_step<T, kStep>(result);
#pragma unroll
        for (int i = 0; i < kStep; ++i) {
          rounded.values[i] = before.values[i] + rounded.values[i];
        }
      }
      store_step<T, kStep>(result, rounded);
    } else {
#pragma unroll
      for (int i = 0; i < kStep; ++i) {
        const Sum sum = sums.accumulate ? term_of<Sum>(result[i]) + total[i] : total[i];
        result[i] = round_sum<Result>(sum);
      }
    }
  }
}

template <class T, class Sum, class Result>
__global__ void sum_kernel(const __grid_constant__ PeerSums::Parameters sums) {
  constexpr int kElements = Pack<T>::kElements;
  const int of_piece = sums.terms + sums.results;
  void* const* pointers = sums.pointers.data() + static_cast<int>(blockIdx.y) * of_piece;
  const int64_t elements = sums.elements[static_cast<size_t>(blockIdx.y)];
  uintptr_t bits = 0;
  for (int k = 0; k < of_piece; ++k) bits |= reinterpret_cast<uintptr_t>(pointers[k]);
  const int64_t threads = int64_t{gridDim.x} * blockDim.x;
  const int64_t thread = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const int64_t packed = bits % 16 == 0 ? elements / kElements * kElements : 0;
  for (int64_t i = thread * kElements; i < packed; i += threads * kElements) {
    sum_step<T, Sum, Result, kElements>(sums, pointers, i);
  }
  for (int64_t i = packed + thread; i < elements; i += threads) {
    sum_step<T, Sum, Result, 1>(sums, pointers, i);
  }
}

constexpr int kThreads = 256;

Launch launch_for(const CudaKernelArguments& args, int pieces, int64_t units_of_largest) {
  const int64_t most = most_blocks_of_piece(args, pieces);
  const int64_t wanted = ceil_divide(units_of_largest, 4 * kThreads);
  return {dim3(static_cast<unsigned>(std::clamp<int64_t>(wanted, 1, most)),
               static_cast<unsigned>(pieces)),
          kThreads, 0};
}

template <class T, class Sum, class Result = T>
void launch_sums(const CudaKernelArguments& args, const PeerSums::Parameters& sums) {
  int64_t largest = 0;
  for (int i = 0; i < sums.count; ++i) {
    largest = std::max(largest, sums.elements[static_cast<size_t>(i)]);
  }
  launch(args, launch_for(args, sums.count, largest / Pack<T>::kElements),
         sum_kernel<T, Sum, Result>, sums);
}

}  // namespace

// The waits of a first run: kernels are loaded then, and a library may allocate, for which CUDA
// waits until the GPU is idle. It never would be while a kernel waits for another rank that is not
// so far yet. So the host looks at the rank's board until the wait is over.
void CudaPeers::wait_on_host(const CudaKernelArguments& args,
                             const std::function<int(const PeerBoard&)>& missing) const {
  const auto start = std::chrono::steady_clock::now();
  const std::chrono::nanoseconds limit(group_.limit_ns);
  PeerBoard board;
  while (group_.fault->happened == 0) {
    check_cuda(cudaMemcpyAsync(&board, group_.boards[static_cast<size_t>(group_.rank)],
                               sizeof(board), cudaMemcpyDeviceToHost, args.stream),
               "reading flags");
    check_cuda(cudaStreamSynchronize(args.stream), "reading flags");
    const int place = missing(board);
    if (place < 0) return;
    if (std::chrono::steady_clock::now() - start > limit) {
      *group_.fault = {.happened = 1, .op = op_, .place = place};
    }
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}

void require_peers(int64_t ranks, const char* what) {
  if (ranks <= kMostPeers) return;
  throw_bad_request("On GPUs, " + std::string(what) + " between " + std::to_string(ranks) +
                    " ranks; at most " + std::to_string(kMostPeers) + " are possible yet.");
}

void CudaPeers::barrier(const CudaKernelArguments& args) const {
  if (is_staged()) return;
  const bool by_host = *group_.waits_on_host;
  launch(args, {1, kMostPeers}, barrier_kernel, group_, op_, true, !by_host);
  if (!by_host) return;
  wait_on_host(args, [this](const PeerBoard& own) {
    for (int place = 0; place < group_.size; ++place) {
      const uint32_t arrived = own.arrived[static_cast<size_t>(place)];
      if (place != group_.rank && static_cast<int32_t>(arrived - own.barriers) < 0) return place;
    }
    return -1;
  });
  launch(args, {1, kMostPeers}, barrier_kernel, group_, op_, false, true);
}

void CudaPeers::post_message(const CudaKernelArguments& args, int to) const {
  launch(args, {1, 1}, post_kernel, group_, to);
}

void CudaPeers::await_message(const CudaKernelArguments& args, int from) const {
  if (*group_.waits_on_host) {
    wait_on_host(args, [from](const PeerBoard& own) {
      const auto i = static_cast<size_t>(from);
      return static_cast<int32_t>(own.posted[i] - own.receives[i] - 1) < 0 ? from : -1;
    });
  }
  launch(args, {1, 1}, await_kernel, group_, op_, from);
}

void CudaPeers::message_fetched(const CudaKernelArguments& args, int from) const {
  launch(args, {1, 1}, fetched_kernel, group_, from);
}

void CudaPeers::finish_message(const CudaKernelArguments& args, int to) const {
  if (*group_.waits_on_host) {
    wait_on_host(args, [to](const PeerBoard& own) {
      const auto i = static_cast<size_t>(to);
      return static_cast<int32_t>(own.fetched[i] - own.ends[i] - 1) < 0 ? to : -1;
    });
  }
  launch(args, {1, 1}, finish_kernel, group_, op_, to);
}

void launch_mark(const CudaKernelArguments& args, int32_t* place, int32_t value) {
  launch(args, {1, 1}, mark_kernel, place, value);
}

void PeerCopies::add(const void* from, void* to, int64_t bytes) {
  if (bytes == 0) return;
  if (parameters_.count == kMost) launch();
  const auto i = static_cast<size_t>(parameters_.count++);
  parameters_.from[i] = static_cast<const std::byte*>(from);
  parameters_.to[i] = static_cast<std::byte*>(to);
  parameters_.bytes[i] = bytes;
}

void PeerCopies::launch() {
  if (parameters_.count == 0) return;
  int64_t largest = 0;
  for (int i = 0; i < parameters_.count; ++i) {
    largest = std::max(largest, parameters_.bytes[static_cast<size_t>(i)]);
  }
  troupe::launch(args_, launch_for(args_, parameters_.count, largest / 16), copy_kernel,
                 parameters_);
  parameters_.count = 0;
}

PeerSums::PeerSums(const CudaKernelArguments& args, DType dtype, int terms, int results,
                   bool accumulate, std::optional<DType> result_dtype)
    : args_(args),
      dtype_(dtype),
      result_dtype_(result_dtype.value_or(dtype)),
      terms_(terms),
      results_(results),
      room_(std::min(kMost, kMostPointers / (terms + results))) {
  parameters_.terms = terms;
  parameters_.results = results;
  parameters_.accumulate = accumulate;
}

void PeerSums::launch() {
  if (parameters_.count == 0) return;
  if (result_dtype_ != dtype_) {
    TROUPE_CHECK(dtype_ == DType::f32 && result_dtype_ == DType::bf16,
                 "no sum over ranks into this dtype");
    launch_sums<float, float, Bf16>(args_, parameters_);
    parameters_.count = 0;
    return;
  }
  switch (dtype_) {
    case DType::f64:
      launch_sums<double, double>(args_, parameters_);
      break;
    case DType::f32:
      launch_sums<float, float>(args_, parameters_);
      break;
    case DType::bf16:
      launch_sums<Bf16, float>(args_, parameters_);
      break;
    case DType::f16:
      launch_sums<F16, float>(args_, parameters_);
      break;
    case DType::i32:
      launch_sums<int32_t, int32_t>(args_, parameters_);
      break;
    default:
      TROUPE_CHECK(false, "no sum over ranks of this dtype");
  }
  parameters_.count = 0;
}

}  // namespace troupe
