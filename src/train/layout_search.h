// The fastest ways to spread a run over GPUs: `troupe plan --gpus ... --search`.
//
// All choices are ranked by an estimate (layout_estimate.h). From the fastest on, those whose state
// and activations may fit are planned (layout_trial.h), until none that is left can come among the
// best. Of the best one the overlaps and schedules are tried, and then what one would have thought
// of instead, so that it can be said what that costs; where one of these is faster, it is the best,
// and its own overlaps and alternatives follow.
//
// The result depends on the arguments alone, however many threads there are, unless a signal ends
// the search early (train/interrupt.h). Any thread; starts others.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/work_report.h"
#include "model/model_config.h"
#include "options/options.h"
#include "plan/gpu_cluster.h"
#include "train/layout_choice.h"
#include "train/layout_trial.h"

namespace troupe {

struct FoundLayout {
  LayoutChoice choice;
  LayoutTrial trial;
};

// What one would have thought of, and what comes of it.
struct Alternative {
  std::string name;
  LayoutChoice choice;
  std::optional<LayoutTrial> trial;  // unset: it cannot be
  std::string refusal;               // why not
};

struct LayoutSearch {
  std::vector<FoundLayout> best;          // that fit, the fastest first
  std::optional<FoundLayout> nearest;     // where nothing fits: what takes fewest bytes
  std::vector<Alternative> alternatives;  // to the first
  int64_t choices = 0;                    // in all
  int64_t refused = 0;                    // that the model or other flags do not allow
  int64_t too_large = 0;                  // by their state or their activations
  int64_t planned = 0;
  bool interrupted = false;
};

struct SearchReports {
  WorkReport estimating;  // counts ways to spread a layer
  WorkReport planning;    // counts layouts; the total is the most that may be planned
};

// Options with --gpus and --global-batch-size. At most `top` layouts.
LayoutSearch search_layouts(const LayoutSpace& space, const ModelConfig& config,
                            const GpuCluster& cluster, int32_t top, int workers,
                            const SearchReports& reports);

}  // namespace troupe
