#include "parallel/layout.h"

#include <algorithm>
#include <fmt/format.h>
#include <utility>

#include "base/error.h"
#include "base/text.h"

namespace troupe {
namespace {

constexpr int32_t kLargestWorld = 1 << 20;

std::optional<Refusal> refuse_unless_positive(int32_t value, Setting setting) {
  if (value >= 1 && value <= kLargestWorld) return std::nullopt;
  return Refusal{.setting = setting,
                 .message = {setting, fmt::format(" takes a number from 1 to {}, not {}.",
                                                  kLargestWorld, value)}};
}

// `replica`: ranks of one replica of the model, a product of the sizes that `product` spells out.
std::optional<Refusal> refuse_part_of_replica(int32_t world, int64_t replica,
                                              const std::string& product) {
  if (world % replica == 0) return std::nullopt;
  const std::vector<int64_t> nearest = nearest_multiples(replica, world);
  const std::string smaller = world > 1
                                  ? fmt::format("; or a replica of {} ranks",
                                                text_of_values(nearest_divisors(world, replica)))
                                  : "";
  return Refusal{
      .setting = Setting::ranks,
      .message = {Setting::ranks,
                  fmt::format(" {}: one replica of the model takes {} = {} ranks, and "
                              "{} is not a multiple of it. Nearest: ",
                              world, product, replica, world),
                  Setting::ranks, fmt::format(" {}{}.", text_of_values(nearest), smaller)},
      .nearest = nearest};
}

}  // namespace

OrRefusal<Layout> try_layout(LayoutOptions options) {
  std::optional<Refusal> refusal;
  Layout layout(std::move(options), refusal);
  if (refusal) return *std::move(refusal);
  return layout;
}

Layout::Layout(LayoutOptions options, std::optional<Refusal>& refusal)
    : options_(std::move(options)) {
  refusal = arrange();
}

Layout::Layout(LayoutOptions options) : Layout(std::move(try_layout(std::move(options)).value())) {}

std::optional<Refusal> Layout::arrange() {
  if (auto refusal = set_sizes()) return refusal;
  if (auto refusal = parse_order()) return refusal;
  set_strides();
  if (auto refusal = check_pipelines()) return refusal;
  if (auto refusal = check_instances()) return refusal;
  if (auto refusal = check_nodes()) return refusal;
  if (options_.embedding_places.empty()) options_.embedding_places = {0, pp() - 1};
  std::vector<int32_t>& places = options_.embedding_places;
  std::sort(places.begin(), places.end());
  places.erase(std::unique(places.begin(), places.end()), places.end());
  TROUPE_CHECK(places.front() >= 0 && places.back() < pp(), "places in the pipeline");
  return std::nullopt;
}

std::optional<Refusal> Layout::set_sizes() {
  const LayoutOptions& o = options_;
  const int32_t etp = o.expert_tensor_parallel.value_or(o.tensor_parallel);
  for (const auto& [size, setting] : {std::pair(o.world_size, Setting::ranks),
                                      std::pair(o.tensor_parallel, Setting::tensor_parallel),
                                      std::pair(o.context_parallel, Setting::context_parallel),
                                      std::pair(o.pipeline_parallel, Setting::pipeline_parallel),
                                      std::pair(o.expert_parallel, Setting::expert_parallel),
                                      std::pair(etp, Setting::expert_tensor_parallel)}) {
    if (auto refusal = refuse_unless_positive(size, setting)) return refusal;
  }
  const int64_t dense = int64_t{o.tensor_parallel} * o.context_parallel;
  const int64_t expert = int64_t{etp} * o.expert_parallel;
  // The product of two stays below 2^40, so a third factor cannot overflow.
  if (auto refusal = refuse_part_of_replica(o.world_size, dense * o.pipeline_parallel,
                                            fmt::format("TP {} x CP {} x PP {}", o.tensor_parallel,
                                                        o.context_parallel, o.pipeline_parallel))) {
    return refusal;
  }
  if (auto refusal = refuse_part_of_replica(
          o.world_size, expert * o.pipeline_parallel,
          fmt::format("ETP {} x EP {} x PP {}", etp, o.expert_parallel, o.pipeline_parallel))) {
    return refusal;
  }
  const int32_t stage = o.world_size / o.pipeline_parallel;
  dense_.sizes = {o.tensor_parallel, o.context_parallel, 1, static_cast<int32_t>(stage / dense),
                  o.pipeline_parallel};
  expert_.sizes = {etp, 1, o.expert_parallel, static_cast<int32_t>(stage / expert),
                   o.pipeline_parallel};
  return std::nullopt;
}

std::optional<Refusal> Layout::parse_order() {
  constexpr std::array<std::string_view, kAxisCount> kNames = {"tp", "cp", "ep", "dp", "pp"};
  const auto refuse = [&](const std::string& problem) {
    return Refusal{.setting = Setting::rank_order,
                   .message = {Setting::rank_order,
                               fmt::format(" {}: {}", printable(options_.order), problem)}};
  };
  std::vector<Axis>& order = order_;
  std::string_view rest = options_.order;
  while (true) {
    const size_t end = rest.find('-');
    const std::string_view name = rest.substr(0, end);
    const auto* const found = std::find(kNames.begin(), kNames.end(), name);
    if (found == kNames.end()) {
      return refuse(
          fmt::format("'{}' is no dimension; they are tp, cp, ep, dp and pp, joined by '-', the "
                      "fastest first, as in {}.",
                      printable(name), kDefaultRankOrder));
    }
    const auto axis = static_cast<Axis>(found - kNames.begin());
    if (std::find(order.begin(), order.end(), axis) != order.end()) {
      return refuse(fmt::format("{} stands there twice.", name));
    }
    order.push_back(axis);
    if (end == std::string_view::npos) break;
    rest.remove_prefix(end + 1);
  }
  for (int i = 0; i < kAxisCount; ++i) {
    const auto axis = static_cast<Axis>(i);
    if (std::find(order.begin(), order.end(), axis) != order.end()) continue;
    const int32_t size = std::max(dense_.sizes[axis], expert_.sizes[axis]);
    if (size > 1) {
      return refuse(fmt::format("{} is missing although its size is {}.", kNames[axis], size));
    }
    order.push_back(axis);
  }
  return std::nullopt;
}

void Layout::set_strides() {
  for (Mesh* mesh : {&dense_, &expert_}) {
    int32_t stride = 1;
    for (const Axis axis : order_) {
      mesh->strides[axis] = stride;
      stride *= mesh->sizes[axis];
    }
  }
}

// Both meshes must have the same pipelines, and, unless pp comes last, the same number of replicas
// (Megatron's rule).
std::optional<Refusal> Layout::check_pipelines() const {
  if (pp() == 1 || order_.back() == kPp) return std::nullopt;
  if (dp() == edp() && dense_.strides[kPp] == expert_.strides[kPp]) return std::nullopt;
  return Refusal{
      .setting = Setting::rank_order,
      .message = {
          Setting::rank_order,
          fmt::format(" {}: unless pp comes last, DP and EDP must be equal, and the dimensions "
                      "before pp must take as many ranks in the dense mesh as in the experts'; DP "
                      "is {} and EDP is {}, and neighbours in a pipeline are {} and {} ranks "
                      "apart. Use ",
                      options_.order, dp(), edp(), dense_.strides[kPp], expert_.strides[kPp]),
          Setting::rank_order,
          fmt::format(" {}, or ETP x EP equal to TP x CP = {}.", kDefaultRankOrder, tp() * cp())}};
}

// Which axes a kind of group spans, and in which mesh.
struct Layout::Axes {
  bool expert = false;
  AxisMask mask = 0;

  static constexpr AxisMask bit(Axis axis) { return AxisMask{1} << axis; }
  static Axes of(RankGroup kind) {
    switch (kind) {
      case RankGroup::world:
        return {false, bit(kTp) | bit(kDp) | bit(kCp) | bit(kPp)};
      case RankGroup::tp:
      case RankGroup::kv_replicas:
        return {false, bit(kTp)};
      case RankGroup::cp:
        return {false, bit(kCp)};
      case RankGroup::dp:
        return {false, bit(kDp)};
      case RankGroup::pp:
      case RankGroup::embedding:
        return {false, bit(kPp)};
      case RankGroup::dp_cp:
      case RankGroup::dp_cp_within_instance:
      case RankGroup::dp_cp_across_instances:
        return {false, bit(kDp) | bit(kCp)};
      case RankGroup::tp_cp:
        return {false, bit(kTp) | bit(kCp)};
      case RankGroup::tp_dp_cp:
        return {false, bit(kTp) | bit(kDp) | bit(kCp)};
      case RankGroup::tp_pp:
        return {false, bit(kTp) | bit(kPp)};
      case RankGroup::ep:
        return {true, bit(kEp)};
      case RankGroup::etp:
        return {true, bit(kTp)};
      case RankGroup::edp:
      case RankGroup::edp_within_instance:
      case RankGroup::edp_across_instances:
        return {true, bit(kDp)};
      case RankGroup::etp_ep:
      case RankGroup::etp_ep_across_nodes:
      case RankGroup::etp_ep_within_node:
        return {true, bit(kTp) | bit(kEp)};
      case RankGroup::etp_ep_pp:
        return {true, bit(kTp) | bit(kEp) | bit(kPp)};
      case RankGroup::optimizer_instance:
        return {true, bit(kTp) | bit(kEp) | bit(kPp) | bit(kDp)};
    }
    TROUPE_CHECK(false, "a kind of group");
  }
};

std::optional<Refusal> Layout::check_instances() const {
  constexpr Setting kSetting = Setting::optimizer_instances;
  const int32_t instances = options_.optimizer_instances;
  if (instances == 1) return std::nullopt;
  if (auto refusal = refuse_unless_positive(instances, kSetting)) return refusal;
  const int32_t replicas = dp() * cp();
  if (replicas % instances != 0 || edp() % instances != 0) {
    const std::vector<int64_t> nearest =
        nearest_values(instances, std::min(replicas, edp()),
                       [&](int64_t n) { return replicas % n == 0 && edp() % n == 0; });
    return Refusal{
        .setting = kSetting,
        .message = {kSetting, fmt::format(" {}: it must divide both DP x CP = {} and EDP = {}; "
                                          "nearest: {}.",
                                          instances, replicas, edp(), text_of_values(nearest))},
        .nearest = nearest};
  }
  const AxisMask dense = Axes::of(RankGroup::dp_cp).mask;
  const AxisMask expert = Axes::of(RankGroup::edp).mask;
  for (int32_t rank = 0; rank < world_size(); ++rank) {
    if (instance_of(dense_, dense, rank) == instance_of(expert_, expert, rank)) continue;
    return Refusal{.setting = kSetting,
                   .message = {kSetting, fmt::format(" {}: with ", instances), Setting::rank_order,
                               fmt::format(" {} rank {} would belong to different instances in the "
                                           "dense and in the expert mesh. Use ",
                                           options_.order, rank),
                               Setting::rank_order, fmt::format(" {}.", kDefaultRankOrder)}};
  }
  return std::nullopt;
}

// Whether each group of experts has equally many ranks on each node that it touches, as many as all
// other groups, and on a node whole experts or slices of one.
bool Layout::are_nodes_alike(int32_t node_ranks) const {
  const auto fast = static_cast<size_t>(
      expert_.strides[kTp] < expert_.strides[kEp] ? expert_.sizes[kTp] : expert_.sizes[kEp]);
  size_t alike = 0;
  return !any_group(RankGroup::etp_ep, [&](const std::vector<int32_t>& ranks) {
    size_t begin = 0;
    for (size_t i = 1; i <= ranks.size(); ++i) {
      if (i < ranks.size() && ranks[i] / node_ranks == ranks[begin] / node_ranks) continue;
      if (alike == 0) alike = i - begin;
      if (i - begin != alike) return true;
      begin = i;
    }
    return alike % fast != 0 && fast % alike != 0;
  });
}

std::optional<Refusal> Layout::check_nodes() const {
  constexpr Setting kSetting = Setting::dispatch_node_ranks;
  const int32_t node_ranks = options_.dispatch_node_ranks;
  if (node_ranks == 0) return std::nullopt;
  if (auto refusal = refuse_unless_positive(node_ranks, kSetting)) return refusal;
  if (are_nodes_alike(node_ranks)) return std::nullopt;
  const std::vector<int64_t> nearest = nearest_values(node_ranks, world_size(), [&](int64_t ranks) {
    return are_nodes_alike(static_cast<int32_t>(ranks));
  });
  return Refusal{
      .setting = kSetting,
      .message = {kSetting,
                  fmt::format(" {}: the {} ranks that share the experts (ETP {} x EP {}) "
                              "must lie on nodes in equal parts, each with whole experts "
                              "or with slices of the same; nearest: {}.",
                              node_ranks, etp() * ep(), etp(), ep(), text_of_values(nearest))},
      .nearest = nearest};
}

DensePlace Layout::dense_place(int32_t rank) const {
  return {dense_.at(rank, kTp), dense_.at(rank, kCp), dense_.at(rank, kDp), dense_.at(rank, kPp)};
}

ExpertPlace Layout::expert_place(int32_t rank) const {
  return {expert_.at(rank, kTp), expert_.at(rank, kEp), expert_.at(rank, kDp),
          expert_.at(rank, kPp)};
}

int32_t Layout::rank_of(const DensePlace& place) const {
  return place.tp * dense_.strides[kTp] + place.cp * dense_.strides[kCp] +
         place.dp * dense_.strides[kDp] + place.pp * dense_.strides[kPp];
}

int32_t Layout::rank_of(const ExpertPlace& place) const {
  return place.etp * expert_.strides[kTp] + place.ep * expert_.strides[kEp] +
         place.edp * expert_.strides[kDp] + place.pp * expert_.strides[kPp];
}

std::vector<int32_t> Layout::neighbours(const Mesh& mesh, AxisMask mask, int32_t rank) const {
  std::vector<int32_t> ranks = {rank};
  for (const Axis axis : order_) {
    if ((mask & Axes::bit(axis)) == 0) continue;
    ranks.front() -= mesh.at(rank, axis) * mesh.strides[axis];
  }
  for (const Axis axis : order_) {
    if ((mask & Axes::bit(axis)) == 0) continue;
    const size_t count = ranks.size();
    ranks.reserve(count * static_cast<size_t>(mesh.sizes[axis]));
    for (int32_t i = 1; i < mesh.sizes[axis]; ++i) {
      for (size_t j = 0; j < count; ++j) ranks.push_back(ranks[j] + i * mesh.strides[axis]);
    }
  }
  return ranks;
}

GroupPlace Layout::place_along(const Mesh& mesh, AxisMask mask, int32_t rank) const {
  GroupPlace all{.place = 0, .ranks = 1};
  for (const Axis axis : order_) {
    if ((mask & Axes::bit(axis)) == 0) continue;
    all.place += mesh.at(rank, axis) * all.ranks;
    all.ranks *= mesh.sizes[axis];
  }
  return all;
}

int32_t Layout::instance_of(const Mesh& mesh, AxisMask mask, int32_t rank) const {
  const GroupPlace all = place_along(mesh, mask, rank);
  return all.place / (all.ranks / options_.optimizer_instances);
}

std::vector<int32_t> Layout::instance_part(const Mesh& mesh, AxisMask mask, int32_t rank,
                                           bool within) const {
  // Many ranks ask; most layouts have one instance.
  if (options_.optimizer_instances == 1 && !within) return {rank};
  std::vector<int32_t> all = neighbours(mesh, mask, rank);
  if (options_.optimizer_instances == 1) return all;
  const size_t block = all.size() / static_cast<size_t>(options_.optimizer_instances);
  const auto place = static_cast<size_t>(place_along(mesh, mask, rank).place);
  std::vector<int32_t> part;
  for (size_t i = 0; i < all.size(); ++i) {
    if (within ? i / block == place / block : i % block == place % block) part.push_back(all[i]);
  }
  return part;
}

// Of the ranks that share the experts with this one: those of its node, or one of each node.
std::vector<int32_t> Layout::node_part(int32_t rank, bool within) const {
  const int32_t node_ranks = options_.dispatch_node_ranks;
  if (node_ranks == 0 && !within) return {rank};
  std::vector<int32_t> all = neighbours(expert_, Axes::of(RankGroup::etp_ep).mask, rank);
  if (node_ranks == 0) return all;
  std::vector<int32_t> node;
  for (const int32_t other : all) {
    if (other / node_ranks == rank / node_ranks) node.push_back(other);
  }
  if (within) return node;
  const auto place = static_cast<size_t>(std::find(node.begin(), node.end(), rank) - node.begin());
  std::vector<int32_t> across;
  for (size_t i = place; i < all.size(); i += node.size()) across.push_back(all[i]);
  return across;
}

std::vector<int32_t> Layout::members(RankGroup kind, int32_t rank) const {
  TROUPE_CHECK(rank >= 0 && rank < world_size(), "a rank of this layout");
  const Axes axes = Axes::of(kind);
  const Mesh& mesh = axes.expert ? expert_ : dense_;
  switch (kind) {
    case RankGroup::dp_cp_within_instance:
    case RankGroup::edp_within_instance:
      return instance_part(mesh, axes.mask, rank, /*within=*/true);
    case RankGroup::dp_cp_across_instances:
    case RankGroup::edp_across_instances:
      return instance_part(mesh, axes.mask, rank, /*within=*/false);
    case RankGroup::etp_ep_within_node:
      return node_part(rank, /*within=*/true);
    case RankGroup::etp_ep_across_nodes:
      return node_part(rank, /*within=*/false);
    default:
      break;
  }
  std::vector<int32_t> ranks = neighbours(mesh, axes.mask, rank);
  if (kind == RankGroup::kv_replicas) {
    const int32_t heads = options_.key_value_heads;
    const int32_t copies = heads > 0 ? std::max(1, tp() / heads) : 1;
    const int32_t own = dense_.at(rank, kTp) / copies;
    std::erase_if(ranks, [&](int32_t other) { return dense_.at(other, kTp) / copies != own; });
  } else if (kind == RankGroup::optimizer_instance) {
    const AxisMask edp = Axes::of(RankGroup::edp).mask;
    const int32_t own = instance_of(mesh, edp, rank);
    std::erase_if(ranks, [&](int32_t other) { return instance_of(mesh, edp, other) != own; });
  } else if (kind == RankGroup::embedding) {
    const std::vector<int32_t>& places = options_.embedding_places;
    const auto holds = [&](int32_t other) {
      return std::binary_search(places.begin(), places.end(), dense_.at(other, kPp));
    };
    if (!holds(rank)) return {};
    std::erase_if(ranks, [&](int32_t other) { return !holds(other); });
  }
  return ranks;
}

GroupPlace Layout::place_in(RankGroup kind, int32_t rank) const {
  const Axes axes = Axes::of(kind);
  const GroupPlace all = place_along(axes.expert ? expert_ : dense_, axes.mask, rank);
  const int32_t instances = options_.optimizer_instances;
  const int32_t block = all.ranks / instances;
  switch (kind) {
    case RankGroup::dp_cp_within_instance:
    case RankGroup::edp_within_instance:
      return {.place = all.place % block, .ranks = block};
    case RankGroup::dp_cp_across_instances:
    case RankGroup::edp_across_instances:
      return {.place = all.place / block, .ranks = instances};
    case RankGroup::etp_ep_within_node:
    case RankGroup::etp_ep_across_nodes:
      if (options_.dispatch_node_ranks == 0) {
        return kind == RankGroup::etp_ep_within_node ? all : GroupPlace{.place = 0, .ranks = 1};
      }
      [[fallthrough]];
    case RankGroup::kv_replicas:
    case RankGroup::optimizer_instance:
    case RankGroup::embedding: {
      const std::vector<int32_t> ranks = members(kind, rank);
      const auto found = std::find(ranks.begin(), ranks.end(), rank);
      return {.place = static_cast<int32_t>(found - ranks.begin()),
              .ranks = static_cast<int32_t>(ranks.size())};
    }
    default:
      return all;
  }
}

std::vector<std::vector<int32_t>> Layout::groups(RankGroup kind) const {
  std::vector<std::vector<int32_t>> groups;
  any_group(kind, [&](const std::vector<int32_t>& ranks) {
    groups.push_back(ranks);
    return false;
  });
  return groups;
}

bool Layout::any_group(RankGroup kind,
                       const std::function<bool(const std::vector<int32_t>&)>& is_true) const {
  std::vector<bool> seen(static_cast<size_t>(world_size()));
  for (int32_t rank = 0; rank < world_size(); ++rank) {
    if (seen[static_cast<size_t>(rank)]) continue;
    const std::vector<int32_t> ranks = members(kind, rank);
    for (const int32_t member : ranks) seen[static_cast<size_t>(member)] = true;
    if (!ranks.empty() && is_true(ranks)) return true;
  }
  return false;
}

GradientReduction Layout::reduction_of(GradientClass kind) const {
  GradientReduction reduction;
  switch (kind) {
    case GradientClass::sliced:
      break;
    case GradientClass::replicated:
      if (tp() > 1 && options_.sequence_parallel) reduction.partial = RankGroup::tp;
      break;
    case GradientClass::head_norm:
      if (tp() > 1) reduction.partial = RankGroup::tp;
      break;
    case GradientClass::embedding:
      if (options_.embedding_places.size() > 1) reduction.copies = RankGroup::embedding;
      break;
    case GradientClass::expert:
      reduction.replicas = RankGroup::edp;
      break;
  }
  return reduction;
}

}  // namespace troupe
