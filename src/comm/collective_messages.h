// What process groups say of collectives in which ranks fail each other, and how they compare what
// the ranks call. Pure functions; any thread.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "program/communicator.h"

namespace troupe {

// The operation that calls, as far as messages name it.
struct CallSite {
  std::string_view operation = {};  // empty: none
  int32_t index = -1;               // in its program
  int32_t layer = -1;
  int32_t micro_batch = -1;
};
CallSite site_of(const CollectiveCall& call);

// A rank in a call, with what it shows to the others. Tensors are not read.
struct RankCall {
  int32_t rank = 0;
  CallSite site;
  std::span<const TensorView> tensors;
  std::string_view process = {};  // where it runs; empty: as a thread
};

// A rank that others wait for, directly or because others wait for it in turn. It may be known to
// wait itself, for yet other ones, or not to answer when it is asked.
struct AbsentRank {
  enum class State : uint8_t { is_missing, has_ended, waits, is_silent };
  int32_t rank = 0;
  State state = State::is_missing;
  std::optional<CallSite> last_seen = {};  // nullopt: not known, as where only GPUs wait
  std::vector<int32_t> waits_for = {};
  std::string_view process = {};
};

// "rank 1", or "rank 1 [node2, process 4711]" with where its process runs.
std::string rank_name(int32_t rank, std::string_view process);

bool same_type(const TensorView& a, const TensorView& b);
// Do both ranks call the same?
bool same_call(const RankCall& a, const RankCall& b);

std::string mismatch_message(const RankCall& a, const RankCall& b);
// The sender's tensor is of another type than the receiver's; one each.
std::string wrong_type_message(const RankCall& sender, const RankCall& receiver);
// `process` is where the rank that waited runs.
std::string missing_message(int32_t rank, std::string_view process, const CallSite& site,
                            std::chrono::milliseconds limit, std::span<const AbsentRank> absent);
// The rank's process is gone and has not said why.
std::string lost_message(int32_t rank, std::string_view process, const CallSite& last_seen);

}  // namespace troupe
