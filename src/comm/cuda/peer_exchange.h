// What operations between ranks do with the operands of all members, whether or not GPUs reach each
// other's memory (peers.h): gather, sum, read. Only in builds with CUDA.
//
// Operands are numbered as in CudaPeers::operand(). All members must call the same, with equal
// shapes. Everything is launched on the operation's stream.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "comm/cuda/peers.h"
#include "comm/staging.h"

namespace troupe {

// A block that every member has in an operand, and where it goes on this rank.
struct PeerGather {
  int operand = 0;
  ShareOf block;  // its bytes in the operand
  std::function<std::byte*(int place)> to;
};
// Barriers before and after. Where a block lies already is left as it is.
void gather_from_peers(const CudaKernelArguments& args, std::span<const PeerGather> blocks);

// Between two barriers: addresses of the first `bytes` of an operand of all members. Few bytes, in
// operations that ask for staging memory for them (staged_section_bytes()).
std::vector<const std::byte*> read_from_peers(const CudaKernelArguments& args, int operand,
                                              int64_t bytes);

// Terms that each member has in an operand, of which every member sums a share.
struct PeerSum {
  int operand = 0;
  ShareOf share;  // elements
  // Where this rank's sums go; or the operand, of all members, in which every element's sum goes to
  // its place.
  std::byte* result = nullptr;
  int handed_to = -1;
};
// Between two barriers. All are handed to all members, or none is. See PeerSums for the rest.
void sum_over_peers(const CudaKernelArguments& args, DType dtype, std::span<const PeerSum> tensors,
                    bool accumulate = false, std::optional<DType> result_dtype = {});

// Of staged groups: from `sends` a section of `bytes` to each other member, by place, and theirs to
// `receives`. This rank's own section stays where it is.
void exchange_sections(const CudaKernelArguments& args, std::byte* sends, std::byte* receives,
                       int64_t bytes);

}  // namespace troupe
