#include <algorithm>

#include "comm/cuda/peer_exchange.h"
#include "ops/exchange/clone_experts/clone_experts.h"
#include "program/cuda/device.cuh"

namespace troupe {
namespace {

// Each rank reads what it needs in the memory of the others, where `experts` says: the host does
// not know it. In a staged group each rank packs a section for every other one, with room for all
// copies of a rank, and reads in the sections that have come.

constexpr int kCloneThreads = 256;

// Where experts and their copies are.
struct CloneMap {
  const int32_t* experts = nullptr;  // by place
  int32_t rank = 0;
  int32_t ranks = 1;
  int32_t own = 1;     // experts of a rank
  int32_t clones = 1;  // places of a rank
  bool staged = false;
};

template <class T>
struct OfRanks {
  std::array<T*, kMostPeers> data{};
};

// blockIdx.y: a place of this rank. `weights`: of each rank; its section in a staged group.
template <class Unit>
__global__ void bring_experts_kernel(CloneMap map, OfRanks<const Unit> weights, Unit* copies,
                                     int64_t units) {
  const auto clone = static_cast<int32_t>(blockIdx.y);
  Unit* const to = copies + clone * units;
  const int32_t expert = map.experts[map.rank * map.clones + clone];
  if (expert < 0) {
    const int64_t threads = int64_t{gridDim.x} * blockDim.x;
    for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < units; i += threads) {
      to[i] = Unit();
    }
    return;
  }
  const int32_t at = map.staged ? clone : expert % map.own;
  copy_units(weights.data[static_cast<size_t>(expert / map.own)] + at * units, to, units);
}

// blockIdx.y: a place. Its copy of an expert of this rank to the section of the rank that has it.
template <class Unit>
__global__ void pack_weights_kernel(CloneMap map, const Unit* weight, Unit* sections,
                                    int64_t units) {
  const auto place = static_cast<int32_t>(blockIdx.y);
  const int32_t expert = map.experts[place];
  if (expert < 0 || expert / map.own != map.rank) return;
  copy_units(weight + expert % map.own * units, sections + place * units, units);
}

// blockIdx.y: a place of this rank. The copy's gradient to the section of the expert's own rank.
template <class Unit>
__global__ void pack_gradients_kernel(CloneMap map, const Unit* copies, Unit* sections,
                                      int64_t units) {
  const auto clone = static_cast<int32_t>(blockIdx.y);
  const int32_t expert = map.experts[map.rank * map.clones + clone];
  if (expert < 0) return;
  copy_units(copies + clone * units, sections + (expert / map.own * map.clones + clone) * units,
             units);
}

// blockIdx.y: an expert of this rank. `copies`: of each rank, the gradients of its copies; its
// section in a staged group. No rank has two copies of one expert, so their order is that of ranks.
template <class T, class Out, int kStep>
__global__ void sum_copies_kernel(CloneMap map, OfRanks<const T> copies, Out* sums,
                                  int64_t elements, bool accumulate) {
  __shared__ const T* found[kMostPeers];
  __shared__ const T* terms[kMostPeers];
  __shared__ int shared_count;
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const auto slot = static_cast<int32_t>(blockIdx.y);
  if (thread < map.ranks) {
    const T* term = nullptr;
    for (int32_t clone = 0; clone < map.clones; ++clone) {
      if (map.experts[thread * map.clones + clone] != map.rank * map.own + slot) continue;
      term = copies.data[static_cast<size_t>(thread)] + clone * elements;
    }
    found[thread] = term;
  }
  __syncthreads();
  if (thread == 0) {
    int count = 0;
    for (int32_t rank = 0; rank < map.ranks; ++rank) {
      if (found[rank] != nullptr) terms[count++] = found[rank];
    }
    shared_count = count;
  }
  __syncthreads();
  const int count = shared_count;
  if (count == 0 && accumulate) return;
  Out* const to = sums + slot * elements;
  const int64_t step = int64_t{gridDim.x} * blockDim.x * kStep;
  for (int64_t i = (int64_t{blockIdx.x} * blockDim.x + thread) * kStep; i < elements; i += step) {
    Pack<T> total{};
    for (int k = 0; k < count; ++k) {
      const Pack<T> more = load_step<T, kStep>(terms[k] + i);
#pragma unroll
      for (int j = 0; j < kStep; ++j) {
        total.values[j] = k == 0 ? more.values[j] : total.values[j] + more.values[j];
      }
    }
#pragma unroll
    for (int j = 0; j < kStep; ++j) {
      const T before = accumulate ? static_cast<T>(widen(to[i + j])) : T(0);
      to[i + j] = round_to<Out>(accumulate ? before + total.values[j] : total.values[j]);
    }
  }
}

CloneMap map_of(const CudaKernelArguments& args) {
  const CudaPeers& peers = *args.peers;
  return {.experts = args.in<int32_t>(1),
          .rank = peers.rank(),
          .ranks = peers.size(),
          .own = args.attributes->as<CloneExpertsAttributes>().own,
          .clones = static_cast<int32_t>(args.input(1).shape[0] / peers.size()),
          .staged = peers.is_staged()};
}

int64_t expert_bytes(const CudaTensor& tensor) {
  return tensor.shape.row_elements() * static_cast<int64_t>(size_of(tensor.dtype));
}

// Blocks for each of `pieces` experts.
Launch launch_of(const CudaKernelArguments& args, int64_t units, int64_t pieces) {
  const auto blocks = static_cast<unsigned>(std::clamp<int64_t>(
      ceil_divide(units, 4 * kCloneThreads), 1, most_blocks_of_piece(args, pieces)));
  return {dim3(blocks, static_cast<unsigned>(pieces)), kCloneThreads};
}

// Calls move(Unit()) with a unit as wide as all experts of `bytes` allow.
template <class Move>
void in_units(int64_t bytes, const Move& move) {
  if (bytes % 16 == 0) {
    move(uint4());
  } else if (bytes % 4 == 0) {
    move(uint32_t());
  } else {
    move(uint16_t());
  }
}

// Sections to send, and after them those received.
std::byte* received_sections(const CudaKernelArguments& args, int64_t section_bytes) {
  return args.staging + staged_section_bytes(section_bytes, args.peers->size());
}

template <class Unit>
void clone_in_units(const CudaKernelArguments& args, int64_t bytes) {
  const CudaPeers& peers = *args.peers;
  const CloneMap map = map_of(args);
  const int64_t units = bytes / static_cast<int64_t>(sizeof(Unit));
  const auto* weight = static_cast<const Unit*>(args.input(0).data);
  const int64_t section = map.clones * bytes;
  OfRanks<const Unit> weights;
  for (int r = 0; r < map.ranks; ++r) {
    const std::byte* from = peers.in<std::byte>(r, 0);
    if (map.staged && r != map.rank) from = received_sections(args, section) + r * section;
    weights.data[static_cast<size_t>(r)] = reinterpret_cast<const Unit*>(from);
  }
  peers.barrier(args);
  if (map.staged) {
    const int64_t places = int64_t{map.ranks} * map.clones;
    launch(args, launch_of(args, units, places), pack_weights_kernel<Unit>, map, weight,
           reinterpret_cast<Unit*>(args.staging), units);
    exchange_sections(args, args.staging, received_sections(args, section), section);
  }
  launch(args, launch_of(args, units, map.clones), bring_experts_kernel<Unit>, map, weights,
         static_cast<Unit*>(args.output(0).data), units);
  peers.barrier(args);
}

void clone(const CudaKernelArguments& args) {
  const int64_t bytes = expert_bytes(args.input(0));
  in_units(bytes, [&]<class Unit>(Unit) { clone_in_units<Unit>(args, bytes); });
}

void stage_gradients(const CudaKernelArguments& args, const CloneMap& map) {
  const int64_t bytes = expert_bytes(args.input(0));
  const int64_t section = map.clones * bytes;
  const void* const copies = args.input(0).data;
  in_units(bytes, [&]<class Unit>(Unit) {
    const int64_t units = bytes / static_cast<int64_t>(sizeof(Unit));
    launch(args, launch_of(args, units, map.clones), pack_gradients_kernel<Unit>, map,
           static_cast<const Unit*>(copies), reinterpret_cast<Unit*>(args.staging), units);
  });
  exchange_sections(args, args.staging, received_sections(args, section), section);
}

// T and Out are the types of the terms and of the weights' gradient.
template <class T, class Out>
void return_clones(const CudaKernelArguments& args) {
  const CudaPeers& peers = *args.peers;
  const CloneMap map = map_of(args);
  const int64_t elements = args.input(0).shape.row_elements();
  const int64_t section = map.clones * expert_bytes(args.input(0));
  OfRanks<const T> copies;
  for (int r = 0; r < map.ranks; ++r) {
    copies.data[static_cast<size_t>(r)] =
        map.staged && r != map.rank
            ? reinterpret_cast<const T*>(received_sections(args, section) + r * section)
            : peers.in<T>(r, 0);
  }
  peers.barrier(args);
  if (map.staged) stage_gradients(args, map);
  const bool accumulate = args.attributes->as<CloneExpertsAttributes>().accumulate;
  const auto sum = [&](auto* kernel, int64_t step) {
    launch(args, launch_of(args, ceil_divide(elements, step), map.own), kernel, map, copies,
           static_cast<Out*>(args.output(0).data), elements, accumulate);
  };
  if (is_made_of_packs<T>(elements)) {
    sum(sum_copies_kernel<T, Out, Pack<T>::kElements>, Pack<T>::kElements);
  } else {
    sum(sum_copies_kernel<T, Out, 1>, 1);
  }
  peers.barrier(args);
}

}  // namespace

// Refuses groups that are too large for both.
CudaKernel clone_experts_cuda_kernel(const OpView& op) {
  require_peers(op.attributes<CloneExpertsAttributes>().ranks, "copies of experts travel");
  return &clone;
}

CudaKernel return_clones_cuda_kernel(const OpView& op) {
  switch (op.output(0).dtype) {
    case DType::f64:
      return &return_clones<double, double>;
    case DType::f32:
      return &return_clones<float, float>;
    default:
      return &return_clones<float, Bf16>;
  }
}

}  // namespace troupe
