// Pipeline schedules: in which order each rank of a pipeline works on its micro-batches, and what
// the ranks send each other.
//
//   1f1b   one forward, one backward (Narayanan et al., "Efficient large-scale language model
//          training on GPU clusters using Megatron-LM", SC 2021). With several chunks per rank it
//          is interleaved: micro-batches go through chunk after chunk in groups.
//   zb-h1  1f1b with weight gradients of their own, put off until they fill the pipeline's idle
//          time, with no more live micro-batches (Qi et al., "Zero bubble pipeline parallelism",
//          ICLR 2024).
//   zb-v   two chunks per rank placed in a V, so that the last stage is on the first rank (Qi et
//          al., "Pipeline parallelism with controllable memory", NeurIPS 2024; the placement of
//          DualPipeV). The order is found greedily: data gradients first, then forwards, and weight
//          gradients where nothing else can run or memory is full.
//
// A schedule is a pure function of its shape: plain data, any thread. A shape that cannot be is
// refused by check_shape().
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "parallel/pipeline_partition.h"
#include "parallel/refusal.h"

namespace troupe {

enum class PipelineSchedule : uint8_t { one_f_one_b, zb_h1, zb_v };

// "1f1b", "zb-h1", "zb-v"; "?" for what is no enumerator.
std::string_view name_of(PipelineSchedule schedule);

struct PipelineShape {
  PipelineSchedule schedule = PipelineSchedule::one_f_one_b;
  int32_t ranks = 1;
  int32_t chunks = 1;         // stages of each rank; zb-v: 2
  int32_t micro_batches = 1;  // of one step
  // Interleaved: micro-batches that pass one chunk before the next chunk's turn; 0: as many as
  // ranks.
  int32_t group_size = 0;
  // 1f1b: between warm-up and the end, a forward and a backward that do not depend on each other
  // are one piece of work, so that each can go on while the other one waits for the experts'
  // exchange. For that one forward more (without chunks: pp - r more) is in flight.
  bool merged = false;

  StagePlacement placement() const {
    return schedule == PipelineSchedule::zb_v ? StagePlacement::v : StagePlacement::loop;
  }
  int32_t stages() const { return ranks * chunks; }
  // The group size in effect.
  int32_t group() const { return group_size > 0 ? group_size : ranks; }
};

// Refuses numbers of stages per rank that a schedule does not have.
[[nodiscard]] std::optional<Refusal> check_stages(PipelineSchedule schedule, int32_t ranks,
                                                  int32_t chunks);

// Refuses shapes without a schedule, with the rule and the nearest valid values.
[[nodiscard]] std::optional<Refusal> check_shape(const PipelineShape& shape);

enum class PipelineAction : uint8_t {
  forward,
  backward,         // both gradients at once
  data_gradient,    // of the stage's input
  weight_gradient,  // of its weights; some time after the data gradient
  receive_activation,
  send_activation,
  receive_gradient,
  send_gradient,
};

constexpr bool is_compute(PipelineAction action) {
  return action <= PipelineAction::weight_gradient;
}

struct PipelineStep {
  PipelineAction action = PipelineAction::forward;
  int32_t micro_batch = 0;
  int32_t chunk = 0;    // the rank's own, which computes it, needs it, or made it
  int32_t peer = -1;    // of messages: the other rank of the pipeline
  bool merged = false;  // of a backward: it is one piece of work with the forward right before it
  bool operator==(const PipelineStep&) const = default;
};

// The steps of each rank, in order. A send does not wait for its receiver. The messages from one
// rank to another are received in the order in which they were sent, so they need no tags.
struct PipelineTable {
  PipelineShape shape;
  std::vector<std::vector<PipelineStep>> ranks;
};

// Of a shape that check_shape() does not refuse.
PipelineTable build_pipeline_table(const PipelineShape& shape);

// What keeps the table from being carried out, empty when nothing does: a stage computed twice, too
// early or not at all for some micro-batch, a message that no rank sends or receives or that
// arrives out of order, ranks that wait for each other.
std::string find_fault(const PipelineTable& table);

// How long a stage works on one micro-batch, in any unit.
struct StageCost {
  double forward = 1;
  double data_gradient = 1;
  double weight_gradient = 1;
};

struct TimedStep {
  PipelineStep step;
  double begin = 0;
  double end = 0;
};

struct PipelineTimeline {
  std::vector<std::vector<TimedStep>> ranks;  // computing steps only
  double makespan = 0;
  double bubble = 0;  // idle share of all ranks' time
};

// Carries out a table without a fault. `costs`: by stage, or one for all stages. `message` is what
// a message takes from its send to its receive.
PipelineTimeline simulate(const PipelineTable& table, const std::vector<StageCost>& costs,
                          double message = 0);

// By rank: the largest number of (micro-batch, chunk) whose activations are held at once, from the
// forward to the end of the backward or of the weight gradient.
std::vector<int32_t> peak_live(const PipelineTable& table);

// The timeline as text, a line per rank; a column is as long as a forward with costs of 1.
std::string draw(const PipelineTable& table, const PipelineTimeline& timeline);

}  // namespace troupe
