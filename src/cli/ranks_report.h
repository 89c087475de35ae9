// What `troupe plan` says of the programs of a layout's ranks: that they are sound and fit
// together, and what each kind of rank needs.
//
// Built on this machine alone, without data, weights or state (plan/rank_plans.h).
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "base/device.h"
#include "options/options.h"
#include "options/step_spec.h"
#include "plan/rank_plans.h"

namespace troupe {

// What a run needs of a place where it may run, and what there is.
struct MemoryOffer {
  Device device = Device::cpu;
  std::string gpus;        // --gpus, where that says what there is
  uint64_t needed = 0;     // of this machine for all ranks, or of the GPU that takes most
  uint64_t available = 0;  // of this machine, of its first GPU, or of one of --gpus; 0: not known
  bool fits() const { return available == 0 || needed <= available; }
};
// Of a GPU: what --gpus has, if it is given.
MemoryOffer offer_memory(const Options& options, uint64_t needed);

struct RanksReport {
  std::vector<RankPlan> classes;
  double seconds = 0;       // building and checking took so long
  uint64_t peak_bytes = 0;  // and the process has needed at most so much memory
  MemoryOffer memory;
  // Of the fullest rank's step, with room for an even load of its experts and for the most that may
  // come; 0 where ranks share no experts.
  uint64_t bytes_of_even_load = 0;
  uint64_t bytes_of_most_load = 0;
  double stash_factor = 0;                     // StashOptions::factor
  std::optional<GpuCluster> cluster;           // of --gpus
  StepTime time;                               // on it
  uint64_t total_bytes() const;                // of all ranks
  const RankPlan& fullest() const;             // the class whose ranks need most
  ExpertRows least_room() const;               // of the experts that have the least
  std::vector<KernelVariant> kernels() const;  // of one rank of each class, together
};

// Builds and checks the training step of every rank. What is wrong is a UserError, or aborts.
RanksReport check_ranks(const Options& options, const StepSpec& step);

// "\nKernels (operations of a step)\n" and a line for each kind; empty without kernels.
std::string kernels_text(const std::vector<KernelVariant>& kernels);
nlohmann::ordered_json kernels_json(const std::vector<KernelVariant>& kernels);

// A table for people: a line for each class.
std::string make_ranks_text(const RanksReport& report, const Layout& layout);

// `rank_classes`, `fits`, `available_bytes`, `check`: members of the document.
void add_ranks_json(nlohmann::ordered_json& document, const RanksReport& report,
                    const Layout& layout);

}  // namespace troupe
