// Layout: which rank computes which part of the model. Two meshes are folded over the same ranks:
// attention and dense layers use TP x CP x DP x PP, expert layers ETP x EP x EDP x PP. Only PP is
// shared; EP is not bound by DP.
//
// What depends on the layout is decided here: the coordinates of a rank in both meshes, the members
// of every group, and which groups sum which gradient. (Which slice of a parameter a rank holds:
// model/parameter_layout.h, which builds on this.) The rules are Megatron Core's;
// docs/layouts.md states them.
//
// A Layout is a constant value; everything may be called from any thread. A layout that contradicts
// itself is refused by try_layout() with the rule and the nearest values that keep it.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "parallel/refusal.h"
#include "program/rank_group.h"

namespace troupe {

inline constexpr std::string_view kDefaultRankOrder = "tp-cp-ep-dp-pp";

struct LayoutOptions {
  int32_t world_size = 1;                              // --ranks
  int32_t tensor_parallel = 1;                         // --tensor-model-parallel-size
  int32_t context_parallel = 1;                        // --context-parallel-size
  int32_t pipeline_parallel = 1;                       // --pipeline-model-parallel-size
  int32_t expert_parallel = 1;                         // --expert-model-parallel-size
  std::optional<int32_t> expert_tensor_parallel = {};  // unset: as tensor_parallel
  int32_t optimizer_instances = 1;                     // --num-distributed-optimizer-instances
  // Where tokens reach their experts in two steps: rank r is on node r / this many, and the ranks
  // of a node exchange among each other what has come from other nodes. 0: in one step.
  int32_t dispatch_node_ranks = 0;  // --moe-dispatch-ranks-per-node
  bool sequence_parallel = false;   // --sequence-parallel
  // --rank-order: the leftmost dimension varies fastest. The dense mesh leaves ep out; the expert
  // mesh leaves cp out and reads tp as ETP and dp as EDP. A dimension that is not named must be 1.
  std::string order = std::string(kDefaultRankOrder);
  // Of the model. Where there are fewer than TP, several ranks hold the same ones, and their
  // gradients are partial sums (RankGroup::kv_replicas). 0: no heads are shared.
  int32_t key_value_heads = 0;
  // The places in the pipeline that hold the word embedding or its copies; empty: first and last.
  std::vector<int32_t> embedding_places = {};
};

// Where a rank stands in the dense mesh, and in the expert mesh.
struct DensePlace {
  int32_t tp = 0;
  int32_t cp = 0;
  int32_t dp = 0;
  int32_t pp = 0;
  bool operator==(const DensePlace&) const = default;
};
struct ExpertPlace {
  int32_t etp = 0;
  int32_t ep = 0;
  int32_t edp = 0;
  int32_t pp = 0;
  bool operator==(const ExpertPlace&) const = default;
};

// What decides how a gradient is reduced. Router, norms, biases after a product whose columns are
// sliced, and the gate of a shared expert are `replicated`; a shared expert's products are
// `sliced`, as dense ones are.
enum class GradientClass : uint8_t {
  sliced,      // a different slice on each rank of tp
  replicated,  // the same on all ranks of tp, which see different tokens if the sequence is sharded
  head_norm,   // the same on all ranks of tp, which always see different heads
  embedding,   // sliced over tp; copies at several places of the pipeline
  expert,      // sliced over ep and etp
};

// A gradient is summed over `replicas`; before that over `partial`, where that is set: there each
// rank has only a part of the sum. After that over `copies`. These are plain sums: the one factor
// is the gradient of the loss (loss_gradient() in passes/step_programs.h).
struct GradientReduction {
  std::optional<RankGroup> partial;
  RankGroup replicas = RankGroup::dp_cp;
  std::optional<RankGroup> copies;
};

// A rank's place in a group, counted from 0, and the group's size.
struct GroupPlace {
  int32_t place = 0;
  int32_t ranks = 0;
};

class Layout {
 public:
  // Of options that try_layout() does not refuse.
  explicit Layout(LayoutOptions options);

  const LayoutOptions& options() const { return options_; }
  int32_t world_size() const { return options_.world_size; }
  int32_t tp() const { return options_.tensor_parallel; }
  int32_t cp() const { return options_.context_parallel; }
  int32_t dp() const { return dense_.sizes[kDp]; }
  int32_t pp() const { return options_.pipeline_parallel; }
  int32_t etp() const { return expert_.sizes[kTp]; }
  int32_t ep() const { return options_.expert_parallel; }
  int32_t edp() const { return expert_.sizes[kDp]; }

  DensePlace dense_place(int32_t rank) const;
  ExpertPlace expert_place(int32_t rank) const;
  int32_t rank_of(const DensePlace& place) const;
  int32_t rank_of(const ExpertPlace& place) const;

  // The group of that kind to which `rank` belongs, in ascending order. Empty when it belongs to
  // none, which only happens for `embedding`.
  std::vector<int32_t> members(RankGroup kind, int32_t rank) const;
  // The same group's size and the rank's place in it, where plans ask for every rank.
  GroupPlace place_in(RankGroup kind, int32_t rank) const;
  // All groups of that kind, by their first member.
  std::vector<std::vector<int32_t>> groups(RankGroup kind) const;
  // Is it true of one of them? Looks at no more than it takes.
  bool any_group(RankGroup kind,
                 const std::function<bool(const std::vector<int32_t>&)>& is_true) const;

  // Experts are summed over edp, which may be smaller than dp x cp: the tokens of all ranks of an
  // expert's replica have come to it already.
  GradientReduction reduction_of(GradientClass kind) const;

 private:
  enum Axis : uint8_t { kTp, kCp, kEp, kDp, kPp, kAxisCount };
  using AxisMask = uint32_t;
  struct Mesh {
    std::array<int32_t, kAxisCount> sizes = {1, 1, 1, 1, 1};
    std::array<int32_t, kAxisCount> strides = {1, 1, 1, 1, 1};
    int32_t at(int32_t rank, Axis axis) const { return rank / strides[axis] % sizes[axis]; }
  };
  struct Axes;

  friend OrRefusal<Layout> try_layout(LayoutOptions options);
  Layout(LayoutOptions options, std::optional<Refusal>& refusal);

  std::optional<Refusal> arrange();
  std::optional<Refusal> set_sizes();
  std::optional<Refusal> parse_order();
  void set_strides();
  std::optional<Refusal> check_pipelines() const;
  std::optional<Refusal> check_instances() const;
  std::optional<Refusal> check_nodes() const;
  bool are_nodes_alike(int32_t node_ranks) const;
  std::vector<int32_t> neighbours(const Mesh& mesh, AxisMask mask, int32_t rank) const;
  std::vector<int32_t> instance_part(const Mesh& mesh, AxisMask mask, int32_t rank,
                                     bool within) const;
  std::vector<int32_t> node_part(int32_t rank, bool within) const;
  GroupPlace place_along(const Mesh& mesh, AxisMask mask, int32_t rank) const;
  int32_t instance_of(const Mesh& mesh, AxisMask mask, int32_t rank) const;

  LayoutOptions options_;
  std::vector<Axis> order_;  // all axes, the fastest first
  Mesh dense_;
  Mesh expert_;
};

// The layout, or which size or order contradicts which other.
OrRefusal<Layout> try_layout(LayoutOptions options);

}  // namespace troupe
