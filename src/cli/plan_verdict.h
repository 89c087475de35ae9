// What `troupe plan --gpus` says first: whether the run fits these GPUs and what is left, how fast
// it will be, and what limits it.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

#include "cli/ranks_report.h"

namespace troupe {

struct Verdict {
  MemoryOffer memory;
  int32_t fullest_rank = 0;
  ExpertRows expert_rows;  // of the experts with the least room
  // Of --expert-load, on the fullest of the ranks that share the experts: 1 is even.
  struct Load {
    int32_t ranks = 1;        // that share them
    double mean = 1;          // of the layers
    double largest = 1;       // of the worst layer
    bool has_copies = false;  // of hot experts, after which it is counted
  };
  std::optional<Load> load;  // unset: it is even
  int32_t gpus = 1;
  double tokens_per_s = 0;  // of each GPU
  double flops_per_s = 0;   // of the model, of each GPU
  double error = 0;         // speeds may be off by this part, either way
  double steps = 0;         // of the run, where its length is given; otherwise 0
  uint64_t checkpoint_bytes = 0;
  double save_seconds = 0;  // of it; 0: how fast the cluster writes is not known
  StepTime time;
  std::string
      limit;  // "memory", "compute", "memory bandwidth", "communication", "pipeline", "host"
};

// Of a report with a cluster.
Verdict verdict_of(const Options& options, const StepSpec& step, const RanksReport& report);

// Three lines, one of the load if it is not even and one of the whole run, and a table of where a
// step's time goes; under 80 columns.
std::string verdict_text(const Verdict& verdict);

// `verdict` and `time`: members of the document.
void add_verdict_json(nlohmann::ordered_json& document, const Verdict& verdict);

}  // namespace troupe
