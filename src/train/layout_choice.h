// One way to spread a run over GPUs, as the flags that say it: what `troupe plan --search` chooses
// among.
//
// Plain values and pure functions; any thread. Errors are UserErrors (bad request).
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "model/dispatcher.h"
#include "model/model_config.h"
#include "options/options.h"
#include "parallel/pipeline_schedule.h"

namespace troupe {

enum class RecomputeChoice : uint8_t {
  none,
  cheap,  // what takes least time for its bytes: activations of experts, norms, latents
  full,   // every layer
};
enum class ShardingChoice : uint8_t { none, optimizer, all };

// What a user has said of something stays, whatever stands here.
struct LayoutChoice {
  int32_t tp = 1;
  int32_t cp = 1;
  int32_t pp = 1;
  int32_t vpp = 1;  // stages of a rank
  int32_t ep = 1;
  int32_t etp = 1;
  int32_t micro_batch = 1;
  RecomputeChoice recompute = RecomputeChoice::none;
  ShardingChoice sharding = ShardingChoice::none;
  TokenDispatcher dispatcher = TokenDispatcher::allgather;
  PipelineSchedule schedule = PipelineSchedule::one_f_one_b;
  bool overlap_gradients = false;  // and gathers of parameters
  bool overlap_experts = false;    // merged forwards and backwards
  bool delay_weights = false;
  bool overlap_shared_expert = false;
  std::string stages;  // of the pipeline (parse_partition); empty: equally many layers

  bool operator==(const LayoutChoice&) const = default;
};

// What is left open by a user's options, and the choice that they make of the rest.
class LayoutSpace {
 public:
  LayoutSpace(const Options& options, const ModelConfig& config, int32_t gpus_per_nvlink);

  // All choices whose sizes divide GPUs, batch and experts, with the dispatcher that sends least,
  // with 1f1b and without overlap. Whether the model allows them is found out where they are
  // planned.
  std::vector<LayoutChoice> enumerate() const;

  // Names and values of the flags, without those that the user has given.
  std::vector<std::pair<std::string, std::string>> flags_of(const LayoutChoice& choice) const;
  // The user's options with these.
  Options apply(const LayoutChoice& choice) const;
  // What `--config FILE` reads in train and plan: the user's flags and those of the choice.
  std::string to_file(const LayoutChoice& choice, double expert_room) const;

  // Is that for the search to choose? By the name of the flag.
  bool is_free(std::string_view flag) const;
  bool recompute_is_free() const;
  bool sharding_is_free() const;
  bool stages_are_free() const;

  const Options& options() const { return options_; }

 private:
  std::vector<std::string> cheap_modules() const;
  // Whether the ranks that share the experts fill several nodes.
  bool spans_full_nodes(const LayoutChoice& choice) const;

  Options options_;
  const ModelConfig& config_;
  int32_t gpus_per_nvlink_;
};

// "TP2 PP8x4 EP64", "1 GPU": sizes above one.
std::string text_of_sizes(const LayoutChoice& choice);

}  // namespace troupe
