// What `troupe plan` says of the programs of a layout's ranks: that they are sound and fit
// together, and what each kind of rank needs.
//
// Built on this machine alone, without data, weights or state (plan/rank_plans.h).
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "model/model_config.h"
#include "plan/rank_plans.h"
#include "train/options.h"

namespace troupe {

struct RanksReport {
  std::vector<RankPlan> classes;
  double seconds = 0;            // building and checking took so long
  uint64_t peak_bytes = 0;       // and the process has needed at most so much memory
  uint64_t available_bytes = 0;  // of this machine; 0: not known
  // Of all ranks, as threads of one process.
  uint64_t total_bytes() const;
  bool fits() const { return available_bytes == 0 || total_bytes() <= available_bytes; }
};

// Builds and checks the training step of every rank. What is wrong is a UserError, or aborts.
RanksReport check_ranks(const Options& options, const ModelConfig& config, const RunLayout& run);

// A table for people: a line for each class.
std::string make_ranks_text(const RanksReport& report, const Layout& layout);

// `rank_classes`, `fits`, `available_bytes`, `check`: members of the document.
void add_ranks_json(nlohmann::ordered_json& document, const RanksReport& report,
                    const Layout& layout);

}  // namespace troupe
