// Rows of tokens that go to other ranks' GPUs and come back: what exchange_rows and push_rows have
// in common. A row is written straight into its place on the receiver's GPU, and read from there
// when it comes back: nothing is packed.
//
// In a staged group (peers.h) a rank's rows for a member are packed into a section with room for
// all of its tokens, so that sizes do not depend on what the router chooses, and sections travel.
#pragma once

#include "comm/cuda/peers.h"
#include "program/cuda/raw_step.cuh"

namespace troupe {
namespace {

// Where this rank's rows lie among those of a member: slot i of its section is row i, counted from
// the section's beginning, which is offsets[member][rank] or, without offsets, rank times `tokens`.
struct PeerSections {
  int rank = 0;
  int ranks = 0;
  int64_t tokens = 0;
  std::array<const int32_t*, kMostPeers> offsets{};

  __device__ int64_t begin(int member) const {
    const int32_t* table = offsets[static_cast<size_t>(member)];
    return table == nullptr ? rank * tokens : table[rank];
  }
};

template <class T>
struct PeerRows {
  std::array<T*, kMostPeers> data{};  // of each member
};

constexpr int kRowWarps = 8;

// Where a token's row lies on each member, -1: nowhere; spread over the lanes of its warp.
class RowsOfToken {
 public:
  __device__ RowsOfToken(const PeerSections& sections, const int32_t* slots, int64_t token,
                         const int64_t* begins, int lane) {
#pragma unroll
    for (int i = 0; i < kMostPeers / 32; ++i) {
      const int member = i * 32 + lane;
      if (member >= sections.ranks) continue;
      const int32_t slot = slots[token * sections.ranks + member];
      if (slot >= 0) rows_[i] = begins[member] + slot;
    }
  }
  // All lanes ask for the same member.
  __device__ int64_t on(int member) const {
    return __shfl_sync(kAllLanes, member < 32 ? rows_[0] : rows_[1], member % 32);
  }
  // A bit for each member that has a row.
  __device__ uint64_t members() const {
    return __ballot_sync(kAllLanes, rows_[0] >= 0) |
           uint64_t{__ballot_sync(kAllLanes, rows_[1] >= 0)} << 32;
  }

 private:
  static_assert(kMostPeers == 64);
  static constexpr unsigned kAllLanes = 0xffffffffU;
  int64_t rows_[kMostPeers / 32] = {-1, -1};
};

// The beginnings of this rank's sections, which may be far away: once for each block.
__device__ __forceinline__ void load_begins(const PeerSections& sections, int64_t* begins) {
  const auto thread = static_cast<int>(threadIdx.x);
  if (thread < sections.ranks) begins[thread] = sections.begin(thread);
  __syncthreads();
}

// A warp for each token. Every rank begins with itself and goes on with the one after it, so that
// no two write to the same rank at first.
template <class Unit>
__global__ void send_rows_kernel(const Unit* x, const int32_t* slots, PeerSections sections,
                                 PeerRows<Unit> targets, int64_t units) {
  __shared__ int64_t begins[kMostPeers];
  load_begins(sections, begins);
  constexpr int kUnits = 8;  // of a row, that a lane holds at once
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t warps = int64_t{gridDim.x} * kRowWarps;
  for (int64_t token = int64_t{blockIdx.x} * kRowWarps + threadIdx.x / 32; token < sections.tokens;
       token += warps) {
    const RowsOfToken own(sections, slots, token, begins, lane);
    for (int64_t begin = 0; begin < units; begin += 32 * kUnits) {
      Unit held[kUnits];
#pragma unroll
      for (int i = 0; i < kUnits; ++i) {
        const int64_t at = begin + i * 32 + lane;
        if (at < units) held[i] = x[token * units + at];
      }
      for (int step = 0; step < sections.ranks; ++step) {
        const int member = (sections.rank + step) % sections.ranks;
        const int64_t row = own.on(member);
        if (row < 0) continue;
        Unit* to = targets.data[static_cast<size_t>(member)] + row * units;
#pragma unroll
        for (int i = 0; i < kUnits; ++i) {
          const int64_t at = begin + i * 32 + lane;
          if (at < units) to[at] = held[i];
        }
      }
    }
  }
}

// Sends the rows of x, [tokens, ...], to their places in `data` of the members.
template <class Unit>
void send_rows_in_units(const CudaKernelArguments& args, const CudaTensor& x, const int32_t* slots,
                        const PeerSections& sections, std::byte* const* data, int64_t row_bytes) {
  PeerRows<Unit> targets;
  for (int r = 0; r < sections.ranks; ++r) {
    targets.data[static_cast<size_t>(r)] = reinterpret_cast<Unit*>(data[r]);
  }
  launch(args, {blocks_for(args, sections.tokens, kRowWarps), 32 * kRowWarps},
         send_rows_kernel<Unit>, static_cast<const Unit*>(x.data), slots, sections, targets,
         row_bytes / static_cast<int64_t>(sizeof(Unit)));
}

inline void send_rows_to_peers(const CudaKernelArguments& args, const CudaTensor& x,
                               const int32_t* slots, const PeerSections& sections,
                               std::byte* const* data) {
  const int64_t row_bytes = x.shape[1] * static_cast<int64_t>(size_of(x.dtype));
  if (row_bytes % 16 == 0) {
    send_rows_in_units<uint4>(args, x, slots, sections, data, row_bytes);
  } else if (row_bytes % 4 == 0) {
    send_rows_in_units<uint32_t>(args, x, slots, sections, data, row_bytes);
  } else {
    send_rows_in_units<uint16_t>(args, x, slots, sections, data, row_bytes);
  }
}

// Sections of `bytes` in one block of memory, by member.
struct SectionPieces {
  std::array<std::byte*, kMostPeers> data{};
};
inline SectionPieces pieces_of(std::byte* memory, int64_t bytes, int ranks) {
  SectionPieces pieces;
  for (int r = 0; r < ranks; ++r) pieces.data[static_cast<size_t>(r)] = memory + r * bytes;
  return pieces;
}

// What makes the kernels here find this rank's rows for member r at the beginning of section r:
// they look for them `rank` sections further on.
inline std::array<std::byte*, kMostPeers> section_starts(std::byte* memory, int64_t bytes, int rank,
                                                         int ranks) {
  std::array<std::byte*, kMostPeers> starts{};
  for (int r = 0; r < ranks; ++r) {
    starts[static_cast<size_t>(r)] = memory + (r - rank) * bytes;
  }
  return starts;
}

// Rows `offsets[r]` to `offsets[r + 1]` of `rows` to the beginning of section r, or from there.
template <class Unit, bool kPack>
__global__ void move_sections_kernel(SectionPieces sections, Unit* rows, const int32_t* offsets,
                                     int64_t units) {
  const auto member = static_cast<int>(blockIdx.y);
  Unit* const section = reinterpret_cast<Unit*>(sections.data[static_cast<size_t>(member)]);
  Unit* const own = rows + offsets[member] * units;
  const int64_t count = (offsets[member + 1] - offsets[member]) * units;
  const int64_t threads = int64_t{gridDim.x} * blockDim.x;
#pragma unroll 4
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += threads) {
    if constexpr (kPack) {
      section[i] = own[i];
    } else {
      own[i] = section[i];
    }
  }
}

template <bool kPack, class Unit>
void move_sections_in_units(const CudaKernelArguments& args, const SectionPieces& sections,
                            int ranks, std::byte* rows, const int32_t* offsets, int64_t row_bytes,
                            int64_t section_bytes) {
  const auto unit = static_cast<int64_t>(sizeof(Unit));
  const auto blocks = static_cast<unsigned>(std::clamp<int64_t>(
      ceil_divide(section_bytes / unit, 1024), 1, most_blocks_of_piece(args, ranks)));
  launch(args, {dim3(blocks, static_cast<unsigned>(ranks)), 256}, move_sections_kernel<Unit, kPack>,
         sections, reinterpret_cast<Unit*>(rows), offsets, row_bytes / unit);
}

// `tokens`: rows that a section of `section_bytes` has room for.
template <bool kPack>
void move_sections(const CudaKernelArguments& args, const SectionPieces& sections, int ranks,
                   int64_t tokens, std::byte* rows, const int32_t* offsets, int64_t section_bytes) {
  if (section_bytes == 0) return;
  const int64_t row_bytes = section_bytes / tokens;
  if (row_bytes % 16 == 0) {
    move_sections_in_units<kPack, uint4>(args, sections, ranks, rows, offsets, row_bytes,
                                         section_bytes);
  } else if (row_bytes % 4 == 0) {
    move_sections_in_units<kPack, uint32_t>(args, sections, ranks, rows, offsets, row_bytes,
                                            section_bytes);
  } else {
    move_sections_in_units<kPack, uint16_t>(args, sections, ranks, rows, offsets, row_bytes,
                                            section_bytes);
  }
}

// out[t] = the sum over members of the token's row there, in ascending order. A member without a
// row adds +0, as on the CPU (ops/cpu/partial_rows.h). A warp for each token, with so much of
// several rows on its way at once that the distance to other GPUs does not show.
template <class T, int kStep>
__global__ void sum_rows_kernel(PeerRows<const T> rows, const int32_t* slots, PeerSections sections,
                                T* out, int64_t width) {
  using A = accumulation_t<T>;
  constexpr int kRows = 4;   // of a token, at once
  constexpr int kSteps = 2;  // of each of them
  __shared__ int64_t begins[kMostPeers];
  load_begins(sections, begins);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t warps = int64_t{gridDim.x} * kRowWarps;
  for (int64_t token = int64_t{blockIdx.x} * kRowWarps + threadIdx.x / 32; token < sections.tokens;
       token += warps) {
    const RowsOfToken own(sections, slots, token, begins, lane);
    const uint64_t members = own.members();
    const bool lacks = __popcll(members) < sections.ranks;
    // All lanes take part in the exchange of rows; those beyond the row have nothing to do.
    for (int64_t begin = 0; begin < width; begin += kSteps * 32 * kStep) {
      const auto at = [&](int step) { return begin + (step * 32 + lane) * kStep; };
      A total[kSteps][kStep] = {};
      for (uint64_t left = members; left != 0;) {
        const bool first = left == members;
        const int count = min(__popcll(left), kRows);
        RawStep<T, kStep> rows_here[kRows][kSteps];
#pragma unroll
        for (int k = 0; k < kRows; ++k) {
          if (k >= count) continue;
          const int member = __ffsll(static_cast<long long>(left)) - 1;
          left &= left - 1;
          const int64_t row = own.on(member);
          const T* from = rows.data[static_cast<size_t>(member)] + row * width;
#pragma unroll
          for (int step = 0; step < kSteps; ++step) {
            if (at(step) < width) rows_here[k][step] = load_raw<T, kStep>(from + at(step));
          }
        }
#pragma unroll
        for (int k = 0; k < kRows; ++k) {
          if (k >= count) continue;
#pragma unroll
          for (int step = 0; step < kSteps; ++step) {
            if (at(step) >= width) continue;
            const Pack<T> pack = unpack(rows_here[k][step]);
#pragma unroll
            for (int i = 0; i < kStep; ++i) {
              const A value = widen(pack.values[i]);
              total[step][i] = first && k == 0 ? value : total[step][i] + value;
            }
          }
        }
      }
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        if (at(step) >= width) continue;
        Pack<T> rounded;
#pragma unroll
        for (int i = 0; i < kStep; ++i) {
          rounded.values[i] = round_to<T>(lacks ? total[step][i] + A(0) : total[step][i]);
        }
        store_step<T, kStep>(out + token * width + at(step), rounded);
      }
    }
  }
}

// x = the sums of the rows that lie in `data` of the members, where send_rows_to_peers would put
// those of x.
template <class T>
void sum_rows_of_peers(const CudaKernelArguments& args, const int32_t* slots,
                       const PeerSections& sections, std::byte* const* data, const CudaTensor& x) {
  PeerRows<const T> rows;
  for (int r = 0; r < sections.ranks; ++r) {
    rows.data[static_cast<size_t>(r)] = reinterpret_cast<const T*>(data[r]);
  }
  const int64_t width = x.shape[1];
  const Launch shape{blocks_for(args, sections.tokens, kRowWarps), 32 * kRowWarps};
  if (is_made_of_packs<T>(width)) {
    launch(args, shape, sum_rows_kernel<T, Pack<T>::kElements>, rows, slots, sections, x.as<T>(),
           width);
  } else {
    launch(args, shape, sum_rows_kernel<T, 1>, rows, slots, sections, x.as<T>(), width);
  }
}

}  // namespace
}  // namespace troupe
