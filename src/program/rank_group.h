// The ranks that a collective joins, named by the dimensions of the layout in which they differ.
// Which ranks these are is decided in parallel/layout.h; the dimensions are those of its two
// meshes.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace troupe {

enum class RankGroup : uint8_t {
  world,     // all ranks
  tp,        // tensor-parallel collectives, vocabulary-parallel loss
  cp,        // attention over the whole sequence
  dp,        // replicas of the dense model that see different samples
  pp,        // one pipeline
  dp_cp,     // reduces dense gradients; shards the dense optimizer state
  tp_cp,     // token counts of auxiliary losses of one sequence
  tp_dp_cp,  // expert bias, global auxiliary loss
  tp_pp,     // one dense replica of the model
  ep,        // dispatch of tokens to experts
  etp,       // slices of one expert
  edp,       // reduces expert gradients; shards the experts' optimizer state
  etp_ep,    // dispatch when experts are sliced, too
  // The same in two steps (LayoutOptions::dispatch_node_ranks).
  etp_ep_across_nodes,  // one rank of each node
  etp_ep_within_node,
  etp_ep_pp,    // one expert replica of the model: statistics of expert gradients
  embedding,    // the ranks of one pipeline that hold copies of the word embedding; may be empty
  kv_replicas,  // the ranks of a tp group that hold the same key and value heads
  // The optimizer state is sharded within an instance and replicated across instances.
  dp_cp_within_instance,
  dp_cp_across_instances,
  edp_within_instance,
  edp_across_instances,
  optimizer_instance,  // all ranks of one instance: statistics of gradients
};
inline constexpr int kRankGroupCount = static_cast<int>(RankGroup::optimizer_instance) + 1;

// Do the experts' ranks send each other tokens in such groups?
constexpr bool exchanges_tokens(RankGroup group) {
  return group >= RankGroup::etp_ep && group <= RankGroup::etp_ep_within_node;
}

// By RankGroup: how many ranks the group has, where its members' GPUs do not reach each other's
// memory and what they exchange is sent and received (comm/cuda/peers.h); 0 where they do.
using StagedGroups = std::array<int32_t, kRankGroupCount>;

// "dp-cp"
std::string_view name_of(RankGroup group);

}  // namespace troupe
