#include "train/layout_search.h"

#include <algorithm>
#include <atomic>
#include <fmt/format.h>
#include <limits>
#include <map>
#include <mutex>
#include <utility>

#include "base/error.h"
#include "base/units.h"
#include "options/model_options.h"
#include "plan/for_each_item.h"
#include "train/interrupt.h"
#include "train/layout_estimate.h"

namespace troupe {
namespace {

// Planned together, and then compared with what is left. Not the number of threads: the result must
// not depend on that.
constexpr size_t kBatch = 4;
constexpr size_t kMostPlanned = 16;
constexpr size_t kPlannedAfterwards = 12;  // about: changes of the best, and alternatives
// How far off an estimate may be: of the time, and of bytes.
constexpr double kTimeDoubt = 0.10;
constexpr double kBytesDoubt = 0.08;
// Overlap of the experts' exchange must gain more than its prediction may be off
// (docs/benchmarks/plan_time.md), other changes more than nothing.
constexpr double kLeastGain = 0.002;
constexpr double kLeastGainOfOverlap = 0.20;

struct Candidate {
  LayoutChoice choice;
  double seconds = 0;
  const UnitCosts* costs = nullptr;
};

void stop_if_interrupted() {
  if (interrupt_requested()) throw UserError(ExitStatus::interrupted, "Interrupted.");
}

bool is_faster(const FoundLayout& a, const FoundLayout& b) {
  return a.trial.tokens_per_s > b.trial.tokens_per_s;
}

class Search {
 public:
  Search(const LayoutSpace& space, const ModelConfig& config, const GpuCluster& cluster,
         int32_t top, int workers, const SearchReports& reports)
      : space_(space),
        config_(config),
        cluster_(cluster),
        top_(static_cast<size_t>(top)),
        workers_(workers),
        reports_(reports),
        estimator_(space, config, cluster) {}

  LayoutSearch run() {
    try {
      estimate_all();
      report(reports_.planning, 0, most_planned_);
      plan_the_fastest();
      if (!result_.best.empty()) {
        do {
          refine();
          list_alternatives();
          finish();
        } while (adopt_alternative());
      }
    } catch (const UserError& error) {
      if (error.status() != ExitStatus::interrupted) throw;
      result_.interrupted = true;
    }
    if (result_.best.size() > top_) result_.best.resize(top_);
    return std::move(result_);
  }

 private:
  void report(const WorkReport& report, uint64_t done, uint64_t total) {
    const std::lock_guard lock(mutex_);
    if (report) report(done, total);
  }

  void estimate_all() {
    std::vector<LayoutChoice> choices = space_.enumerate();
    result_.choices = static_cast<int64_t>(choices.size());
    find_smallest(choices);
    result_.too_large = std::erase_if(choices, [&](const LayoutChoice& choice) {
      return estimator_.least_state_bytes(choice) >
             static_cast<double>(cluster_.model.memory_bytes);
    });
    std::vector<const LayoutChoice*> first_of_unit;
    std::map<LayoutEstimator::Unit, size_t> number_of_unit;
    for (const LayoutChoice& choice : choices) {
      if (number_of_unit.try_emplace(estimator_.unit_of(choice), first_of_unit.size()).second) {
        first_of_unit.push_back(&choice);
      }
    }
    std::vector<std::optional<UnitCosts>> costs(first_of_unit.size());
    std::atomic<uint64_t> done = 0;
    for_each_item(costs.size(), workers_, [&](size_t i) {
      stop_if_interrupted();
      try {
        costs[i] = estimator_.measure(*first_of_unit[i]);
      } catch (const UserError&) {
        // The model or another flag does not allow it.
      }
      report(reports_.estimating, ++done, costs.size());
    });
    for (const auto& each : costs) costs_.push_back(each.value_or(UnitCosts{}));
    for (LayoutChoice& choice : choices) {
      const size_t unit = number_of_unit.at(estimator_.unit_of(choice));
      if (!costs[unit]) {
        ++result_.refused;
        continue;
      }
      const double seconds = estimator_.seconds(costs_[unit], choice);
      candidates_.push_back({std::move(choice), seconds, &costs_[unit]});
    }
    std::stable_sort(candidates_.begin(), candidates_.end(),
                     [](const Candidate& a, const Candidate& b) { return a.seconds < b.seconds; });
  }

  // By state alone, of those that are possible; of several the one that recomputes most. It is what
  // is said where nothing fits.
  void find_smallest(const std::vector<LayoutChoice>& choices) {
    std::vector<std::pair<double, const LayoutChoice*>> by_state;
    for (const LayoutChoice& choice : choices) {
      by_state.emplace_back(estimator_.least_state_bytes(choice), &choice);
    }
    std::stable_sort(by_state.begin(), by_state.end(), [](const auto& a, const auto& b) {
      return a.first != b.first ? a.first < b.first : a.second->recompute > b.second->recompute;
    });
    constexpr size_t kTried = 50;
    for (size_t i = 0; i < std::min(kTried, by_state.size()); ++i) {
      LayoutChoice choice = *by_state[i].second;
      UnitCosts equal;
      equal.layer = equal.dense_layer = equal.mtp_layer = equal.head = 1;
      estimator_.seconds(equal, choice);
      try {
        estimator_.bytes(UnitCosts{}, choice);
      } catch (const UserError&) {
        continue;
      }
      smallest_ = std::move(choice);
      return;
    }
  }

  // Unless it is refused, or too large by what is known without planning it.
  bool may_fit(const Candidate& candidate) {
    try {
      const LayoutEstimator::Bytes bytes = estimator_.bytes(*candidate.costs, candidate.choice);
      const auto available = static_cast<double>(cluster_.model.memory_bytes);
      if (bytes.all < smallest_bytes_) {
        smallest_ = candidate.choice;
        smallest_bytes_ = bytes.all;
      }
      const bool fits = static_cast<double>(bytes.state) <= available &&
                        static_cast<double>(bytes.all) * (1 - kBytesDoubt) <= available;
      if (!fits) ++result_.too_large;
      return fits;
    } catch (const UserError&) {
      ++result_.refused;
      return false;
    }
  }

  // Of a choice that is planned; nothing where it is refused.
  std::optional<LayoutTrial> plan(const LayoutChoice& choice, std::string* refusal = nullptr) {
    stop_if_interrupted();
    std::optional<LayoutTrial> trial;
    try {
      trial = try_out(space_.apply(choice), config_, cluster_);
    } catch (const UserError& error) {
      if (refusal != nullptr) *refusal = error.what();
    }
    report(reports_.planning, ++planned_, most_planned_);
    return trial;
  }

  // Those that fit, in the order of the choices.
  std::vector<FoundLayout> plan_all(const std::vector<LayoutChoice>& choices) {
    std::vector<std::optional<LayoutTrial>> trials(choices.size());
    for_each_item(choices.size(), workers_, [&](size_t i) { trials[i] = plan(choices[i]); });
    std::vector<FoundLayout> fitting;
    for (size_t i = 0; i < choices.size(); ++i) {
      if (!trials[i]) {
        ++result_.refused;
      } else if (trials[i]->fits) {
        fitting.push_back({choices[i], *trials[i]});
      } else {
        ++result_.too_large;
        note_nearest({choices[i], *trials[i]});
      }
    }
    result_.planned += static_cast<int64_t>(choices.size());
    return fitting;
  }

  void note_nearest(const FoundLayout& found) {
    if (!result_.nearest || found.trial.bytes < result_.nearest->trial.bytes) {
      result_.nearest = found;
    }
  }

  void keep(std::vector<FoundLayout> found) {
    for (FoundLayout& each : found) result_.best.push_back(std::move(each));
    std::stable_sort(result_.best.begin(), result_.best.end(), is_faster);
  }

  // Seconds that a layout must be below to come among the best.
  double limit() const {
    if (result_.best.size() < top_) return std::numeric_limits<double>::infinity();
    return result_.best[top_ - 1].trial.time.seconds;
  }

  void plan_the_fastest() {
    size_t planned = 0;
    size_t next = 0;
    while (planned < kMostPlanned && next < candidates_.size()) {
      std::vector<LayoutChoice> batch;
      for (; next < candidates_.size() && batch.size() < kBatch; ++next) {
        stop_if_interrupted();
        if (candidates_[next].seconds * (1 - kTimeDoubt) > limit()) break;
        if (may_fit(candidates_[next])) batch.push_back(candidates_[next].choice);
      }
      if (batch.empty()) break;
      planned += batch.size();
      keep(plan_all(batch));
    }
    if (!result_.best.empty()) {
      result_.nearest.reset();
    } else if (smallest_) {
      const std::optional<LayoutTrial> trial = plan(*smallest_);
      if (trial) note_nearest({*smallest_, *trial});
    }
  }

  // Overlaps and schedules, one by one, and then all that gain together.
  void refine() {
    const FoundLayout base = result_.best.front();
    struct Change {
      double least_gain;
      void (*apply)(LayoutChoice&);
    };
    std::vector<Change> changes;
    if (space_.is_free("overlap-grad-reduce")) {
      changes.push_back(
          {kLeastGain, [](LayoutChoice& choice) { choice.overlap_gradients = true; }});
    }
    if (space_.is_free("moe-shared-expert-overlap") && config_.has_shared_expert() &&
        base.choice.ep > 1) {
      changes.push_back(
          {kLeastGain, [](LayoutChoice& choice) { choice.overlap_shared_expert = true; }});
    }
    if (space_.is_free("delay-wgrad-compute") && base.choice.ep > 1) {
      changes.push_back({kLeastGain, [](LayoutChoice& choice) { choice.delay_weights = true; }});
    }
    if (space_.is_free("overlap-moe-expert-parallel-comm") && base.choice.ep > 1) {
      changes.push_back(
          {kLeastGainOfOverlap, [](LayoutChoice& choice) { choice.overlap_experts = true; }});
    }
    if (space_.is_free("pipeline-schedule") && base.choice.pp > 1 && base.choice.vpp == 1) {
      changes.push_back(
          {kLeastGain, [](LayoutChoice& choice) { choice.schedule = PipelineSchedule::zb_h1; }});
    }
    if (space_.is_free("moe-token-dispatcher-type") && base.choice.ep * base.choice.etp > 1) {
      changes.push_back({kLeastGain, [](LayoutChoice& choice) {
                           choice.dispatcher = choice.dispatcher == TokenDispatcher::alltoall
                                                   ? TokenDispatcher::flex
                                                   : TokenDispatcher::alltoall;
                         }});
    }
    std::vector<LayoutChoice> single(changes.size(), base.choice);
    for (size_t i = 0; i < changes.size(); ++i) changes[i].apply(single[i]);
    LayoutChoice together = base.choice;
    size_t gaining = 0;
    std::vector<FoundLayout> better;
    for (FoundLayout& found : plan_all(single)) {
      const auto of = std::find(single.begin(), single.end(), found.choice) - single.begin();
      const Change& change = changes[static_cast<size_t>(of)];
      if (found.trial.tokens_per_s < base.trial.tokens_per_s * (1 + change.least_gain)) continue;
      change.apply(together);
      ++gaining;
      better.push_back(std::move(found));
    }
    if (gaining > 1) {
      for (FoundLayout& found : plan_all({together})) better.push_back(std::move(found));
    }
    if (better.empty()) return;
    std::stable_sort(better.begin(), better.end(), is_faster);
    if (is_faster(better.front(), base)) result_.best.insert(result_.best.begin(), better.front());
  }

  void add_alternative(std::string name, LayoutChoice choice) {
    const LayoutChoice& winner = result_.best.front().choice;
    const int32_t of_mesh = cluster_.gpus / choice.pp;
    if (of_mesh % (choice.tp * choice.cp) != 0 || of_mesh % (choice.ep * choice.etp) != 0) return;
    choice.vpp = choice.pp == winner.pp ? winner.vpp : 1;
    choice.stages = choice.pp == winner.pp ? winner.stages : "";
    if (choice == winner) return;
    result_.alternatives.push_back({std::move(name), std::move(choice), std::nullopt, {}});
  }

  // What one would have thought of instead of the best.
  void list_alternatives() {
    const LayoutChoice& winner = result_.best.front().choice;
    const int32_t joined = cluster_.model.gpus_per_nvlink;
    const bool ep_is_free = space_.is_free("expert-model-parallel-size");
    const bool etp_is_free = space_.is_free("expert-tensor-parallel-size");
    const bool tp_is_free = space_.is_free("tensor-model-parallel-size");
    const bool has_experts = config_.num_experts > 0;
    LayoutChoice other = winner;
    if (has_experts && ep_is_free && etp_is_free) {
      other.etp = other.tp;
      const int32_t replicas = cluster_.gpus / (winner.tp * winner.cp * winner.pp);
      while (other.ep > 1 && replicas % other.ep != 0) other.ep /= 2;
      add_alternative("experts on attention's mesh, without folding", other);
    }
    if (has_experts && ep_is_free) {
      other = winner;
      const bool is_inside = winner.ep * winner.etp <= joined;
      other.ep = is_inside ? 2 * joined / winner.etp : joined / winner.etp;
      if (other.ep > 0 && config_.num_experts % other.ep == 0) {
        if (space_.is_free("pipeline-model-parallel-size")) {
          other.pp = std::max(1, std::min(winner.pp, cluster_.gpus / (other.ep * other.etp)));
        }
        add_alternative(is_inside ? "experts across nodes" : "experts inside a node", other);
      }
    }
    if (has_experts && ep_is_free && etp_is_free && tp_is_free) {
      other = winner;
      other.ep = 1;
      other.tp = other.etp = std::min({8, joined, cluster_.gpus / winner.pp});
      add_alternative("TP instead of EP", other);
    }
    if (space_.is_free("pipeline-model-parallel-size") && space_.stages_are_free()) {
      other = winner;
      other.pp = winner.pp > 1 ? 1 : 2;
      add_alternative(winner.pp > 1 ? "no pipeline" : "a pipeline", other);
    }
    if (space_.recompute_is_free()) {
      other = winner;
      const bool recomputes = winner.recompute != RecomputeChoice::none;
      other.recompute = recomputes ? RecomputeChoice::none : RecomputeChoice::full;
      add_alternative(recomputes ? "no recompute" : "full recompute", other);
    }
    if (has_experts && winner.ep > 1 && space_.is_free("moe-token-dispatcher-type")) {
      other = winner;
      other.dispatcher = winner.dispatcher == TokenDispatcher::alltoall ? TokenDispatcher::allgather
                                                                        : TokenDispatcher::alltoall;
      add_alternative(fmt::format("dispatcher {}", name_of(other.dispatcher)), other);
    }
  }

  // The best one's room for experts, and the alternatives to it.
  void finish() {
    FoundLayout& first = result_.best.front();
    for_each_item(1 + result_.alternatives.size(), workers_, [&](size_t i) {
      if (i == 0) {
        choose_room(space_.apply(first.choice), config_, cluster_, first.trial);
      } else {
        judge(result_.alternatives[i - 1]);
      }
    });
  }

  // The fastest alternative becomes the best where it is faster: estimates had it too slow to be
  // planned before. What would change it, and its own alternatives, are then tried anew.
  bool adopt_alternative() {
    const Alternative* fastest = nullptr;
    double most = result_.best.front().trial.tokens_per_s;
    for (const Alternative& each : result_.alternatives) {
      if (!each.trial || !each.trial->fits || each.trial->tokens_per_s <= most) continue;
      fastest = &each;
      most = each.trial->tokens_per_s;
    }
    if (fastest == nullptr) return false;
    result_.best.insert(result_.best.begin(), {fastest->choice, *fastest->trial});
    result_.alternatives.clear();
    most_planned_ += kPlannedAfterwards;
    return true;
  }

  void judge(Alternative& alternative) {
    try {
      // What state alone does not let fit needs no plan.
      const uint64_t state = estimator_.bytes(UnitCosts{}, alternative.choice).state;
      if (state > cluster_.model.memory_bytes) {
        alternative.trial.emplace().bytes = state;
        return;
      }
    } catch (const UserError& error) {
      alternative.refusal = error.what();
      return;
    }
    alternative.trial = plan(alternative.choice, &alternative.refusal);
  }

  const LayoutSpace& space_;
  const ModelConfig& config_;
  const GpuCluster& cluster_;
  const size_t top_;
  const int workers_;
  const SearchReports& reports_;
  const LayoutEstimator estimator_;
  std::vector<UnitCosts> costs_;
  std::vector<Candidate> candidates_;
  std::optional<LayoutChoice> smallest_;
  uint64_t smallest_bytes_ = std::numeric_limits<uint64_t>::max();
  std::mutex mutex_;
  std::atomic<uint64_t> planned_ = 0;
  uint64_t most_planned_ = kMostPlanned + kPlannedAfterwards;
  LayoutSearch result_;
};

}  // namespace

LayoutSearch search_layouts(const LayoutSpace& space, const ModelConfig& config,
                            const GpuCluster& cluster, int32_t top, int workers,
                            const SearchReports& reports) {
  return Search(space, config, cluster, top, workers, reports).run();
}

}  // namespace troupe
