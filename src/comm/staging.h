// Staging: where a rank's GPU receives what it needs of members of its group whose memory it cannot
// reach (comm/cuda/peers.h), and where it packs what it sends. This is arithmetic of sizes, which
// the memory plan and the kernels share; KernelNeeds::staging of the collectives comes from here.
//
// Pure functions; any thread.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "base/dtype.h"
#include "base/shape.h"
#include "program/program.h"
#include "program/shard.h"

namespace troupe {

// What a sum over ranks takes at most for the members' terms: it goes through larger tensors in
// rounds.
inline constexpr int64_t kMostStagedTerms = int64_t{64} << 20;

// Blocks of staging memory begin at multiples of it.
inline constexpr int64_t kStagingAlignment = 64;
inline int64_t align_staging(int64_t bytes) {
  return (bytes + kStagingAlignment - 1) / kStagingAlignment * kStagingAlignment;
}

// A tensor of which every member of a group sums a share: elements of the tensor.
using ShareOf = std::function<IndexRange(int place)>;

// Elements `first` to `first + elements` of every member's share, as far as it has these. The terms
// of member 0 lie at `offset` of the staging memory, those of each next one `stride` bytes later.
struct StagedTerms {
  size_t tensor = 0;
  int64_t first = 0;
  int64_t elements = 0;
  int64_t offset = 0;
  int64_t stride = 0;
};
// The part of a member's share that these are; may be empty.
IndexRange part_of(const StagedTerms& terms, const IndexRange& share);

// Rounds in which `ranks` members sum these tensors, all of one dtype. Every element of every share
// is in one of them. All members get the same.
std::vector<std::vector<StagedTerms>> staged_rounds(std::span<const ShareOf> tensors, DType dtype,
                                                    int ranks);
// What the largest of the rounds takes: all terms at once, but no more than kMostStagedTerms.
uint64_t staged_sum_bytes(std::span<const ShareOf> tensors, DType dtype, int ranks);

// Of an operation that sums each of its outputs in place, those of one dtype after the others.
inline constexpr std::array kSummedDtypes = {DType::f64, DType::f32, DType::bf16, DType::i32};
uint64_t staged_sum_bytes(const OpView& op, int ranks,
                          const std::function<ShareOf(int output)>& share_of_output);

// The ways from one member to another on which messages travel, as far as `place` has to do with
// them. messages[from][to] counts those of all members. Connecting a way, and ending it,
// synchronises its two members; ranks that go through them in this order cannot deadlock.
struct StagedWay {
  int from = 0;
  int to = 0;
  bool operator==(const StagedWay&) const = default;
};
std::vector<StagedWay> staged_ways(const std::vector<std::vector<int64_t>>& messages, int place);

// Rows, or other blocks of one size, for each member: a section for each of `ranks`.
inline uint64_t staged_section_bytes(int64_t section_bytes, int ranks) {
  return static_cast<uint64_t>(align_staging(section_bytes)) * static_cast<uint64_t>(ranks);
}

}  // namespace troupe
