#include <algorithm>

#include "ops/attention/rope/rope.h"
#include "program/cuda/device.cuh"

namespace troupe {
namespace {

// Frequencies of consecutive pairs, made on the host: the same as the CPU's.
constexpr int kPairsOfLaunch = 256;
struct Frequencies {
  double of[kPairsOfLaunch];
};

// `count` pairs of every position, of which pair `first` has the first frequency.
template <class A>
__global__ void rope_table_kernel(A* table, RopeTableAttributes attributes, Frequencies frequencies,
                                  int64_t first, int64_t count) {
  const int64_t entry = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (entry >= attributes.positions * count) return;
  const int64_t row = entry / count;
  const int64_t pair = entry % count;
  int64_t position = row;
  if (attributes.chunks.ranks != 1) {  // SequenceChunks::position()
    const int64_t chunk = attributes.positions / 2;
    position = row < chunk
                   ? attributes.chunks.rank * chunk + row
                   : (2 * attributes.chunks.ranks - 2 - attributes.chunks.rank) * chunk + row;
  }
  const double angle = static_cast<double>(position) * frequencies.of[pair];
  A* out = table + (row * (attributes.rotary_dim / 2) + first + pair) * 2;
  out[0] = static_cast<A>(attributes.scaling.concentration * cos(angle));
  out[1] = static_cast<A>(attributes.scaling.concentration * sin(angle));
}

template <class A>
void run_rope_table(const CudaKernelArguments& args) {
  const auto& attributes = args.attributes->as<RopeTableAttributes>();
  const int64_t pairs = attributes.rotary_dim / 2;
  for (int64_t first = 0; first < pairs; first += kPairsOfLaunch) {
    const int64_t count = std::min<int64_t>(kPairsOfLaunch, pairs - first);
    Frequencies some;
    for (int64_t i = 0; i < count; ++i) {
      some.of[i] =
          rope_frequency(first + i, attributes.rotary_dim, attributes.base, attributes.scaling);
    }
    launch(args, {static_cast<unsigned>(ceil_divide(attributes.positions * count, 128)), 128},
           rope_table_kernel<A>, args.out<A>(0), attributes, some, first, count);
  }
}

// A block for each row. A thread turns kStep neighbouring pairs at a time; y may be qkv.
template <class T, int kStep, bool kInterleaved>
__global__ void rope_kernel(const T* qkv, const accumulation_t<T>* table, T* y, LiveRows rows,
                            int64_t width, RopeAttributes attributes) {
  using A = accumulation_t<T>;
  const int64_t row = blockIdx.x;
  if (row >= rows.count()) return;
  const int d = attributes.head_dim;
  const int rotary = attributes.rotary_dim;
  const int pairs = rotary / 2;
  const int turned = attributes.heads + attributes.groups;
  const T* in = qkv + row * width;
  T* out = y + row * width;
  const A* angles = table + row % attributes.sequence * rotary;
  const A sign = attributes.inverse ? A(-1) : A(1);
  for (int i = static_cast<int>(threadIdx.x) * kStep; i < turned * pairs;
       i += static_cast<int>(blockDim.x) * kStep) {
    const int pair = i % pairs;
    const int at = i / pairs * d + attributes.first + (kInterleaved ? 2 * pair : pair);
    const int next = at + (kInterleaved ? kStep : pairs);
    const A* angle = angles + 2 * pair;
    Pack<T> packs[] = {load_step<T, kStep>(in + at), load_step<T, kStep>(in + next)};
#pragma unroll
    for (int e = 0; e < kStep; ++e) {
      const A cosine = angle[2 * e];
      const A sine = sign * angle[2 * e + 1];
      T& one = kInterleaved ? packs[2 * e / kStep].values[2 * e % kStep] : packs[0].values[e];
      T& other = kInterleaved ? packs[(2 * e + 1) / kStep].values[(2 * e + 1) % kStep]
                              : packs[1].values[e];
      const A x = widen(one);
      const A z = widen(other);
      one = round_to<T>(x * cosine - z * sine);
      other = round_to<T>(z * cosine + x * sine);
    }
    store_step<T, kStep>(out + at, packs[0]);
    store_step<T, kStep>(out + next, packs[1]);
  }
  if (out == in) return;
  const int rest = d - rotary;
  for (int i = static_cast<int>(threadIdx.x) * kStep; i < turned * rest;
       i += static_cast<int>(blockDim.x) * kStep) {
    const int e = i % rest;
    const int at = i / rest * d + (e < attributes.first ? e : e + rotary);
    store_step<T, kStep>(out + at, load_step<T, kStep>(in + at));
  }
  for (int64_t i = int64_t{turned} * d + int64_t{threadIdx.x} * kStep; i < width;
       i += int64_t{blockDim.x} * kStep) {
    store_step<T, kStep>(out + i, load_step<T, kStep>(in + i));
  }
}

template <class T>
struct RopeCuda {
  static void run(const CudaKernelArguments& args) {
    const Shape& shape = args.input(0).shape;
    const auto& attributes = args.attributes->as<RopeAttributes>();
    const bool packs = rotates_packs(attributes, shape[1], dtype_of<T>);
    constexpr int kPack = Pack<T>::kElements;
    const auto kernel = attributes.interleaved
                            ? packs ? rope_kernel<T, kPack, true> : rope_kernel<T, 1, true>
                        : packs ? rope_kernel<T, kPack, false>
                                : rope_kernel<T, 1, false>;
    launch(args, {static_cast<unsigned>(shape[0]), threads_for_row(shape[1], packs ? 16 : 4)},
           kernel, args.in<T>(0), args.in<accumulation_t<T>>(1), args.out<T>(0),
           LiveRows(args.input(0)), shape[1], attributes);
  }
};

}  // namespace

CudaKernel rope_table_cuda_kernel(const OpView& op) {
  return op.output(0).dtype == DType::f64 ? &run_rope_table<double> : &run_rope_table<float>;
}

CudaKernel rope_cuda_kernel(const OpView& op) {
  return select_cuda_kernel<RopeCuda>(op.output(0).dtype);
}

}  // namespace troupe
