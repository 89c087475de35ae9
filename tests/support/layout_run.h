// Runs training steps of a model in any layout, every rank a thread, and gathers what they
// leave into tensors of the whole model: what the tests of layouts compare with one rank.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/device.h"
#include "base/dtype.h"
#include "model/context_parallel.h"
#include "model/dispatcher.h"
#include "model/model.h"
#include "model/model_part.h"
#include "ops/precision/amax_history/amax_history.h"
#include "parallel/layout.h"
#include "parallel/pipeline_schedule.h"
#include "passes/offload.h"
#include "passes/overlap.h"
#include "passes/pass_pipeline.h"
#include "passes/precision.h"
#include "passes/recompute.h"
#include "passes/stash.h"
#include "program/program.h"

namespace troupe::testing {

// f64, and sums of some thousand terms: rounding is about 1e-13 of the largest term. The promise of
// the project is 1e-10, in units of a tensor's largest element.
inline constexpr double kLayoutTolerance = 1e-10;

struct LayoutCase {
  std::string name;
  ModelConfig model;
  BlockMakers blocks = blocks_of_config();
  LayoutOptions layout;
  std::string stages;  // as --pipeline-model-parallel-layout; empty: equal ones
  int32_t chunks = 1;
  PipelineSchedule schedule = PipelineSchedule::one_f_one_b;
  int32_t micro_batch_size = 1;
  int32_t micro_batches = 1;  // of one pipeline in one step
  int32_t sequence = 12;
  TokenDispatcher dispatcher = TokenDispatcher::allgather;
  ContextExchange context_exchange = ContextExchange::p2p;
  StateSharding sharding = StateSharding::none;
  bool per_token_loss = false;
  bool ignore_padding = false;        // some tokens of each sample are padding then
  bool reset_attention_mask = false;  // samples hold documents of some tokens then
  int64_t gradient_bucket_elements = 0;
  double expert_room = 0;     // RunLayout::expert_room
  int32_t expert_clones = 0;  // RunLayout::expert_clones
  // Of a model whose routers have biases: those that send all tokens to the same experts, of which
  // each token chooses k: layer L to those from L k on.
  std::vector<int32_t> crowded_layers = {};
  int64_t* fallbacks = nullptr;  // gets the number of steps that needed their fallback
  // Gets the counts of codes of each step and operand, where the precision counts them
  // (model/code_metric.h).
  std::vector<std::array<std::vector<double>, kHistoryKinds>>* code_counts = nullptr;
  bool early_collectives = false;  // of gradient sums and parameter gathers
  bool merged = false;             // forwards with backwards
  OverlapOptions overlap = {};
  PrecisionOptions precision = {};
  RecomputeOptions recompute = {};
  int32_t loss_chunk_tokens = 0;
  OffloadOptions offload = {};
  StashOptions stash = {};
  std::vector<PassId> skipped_passes = {};
  std::vector<AddedPass> added_passes = {};
  double optimizer_offload = 0;                  // RunLayout::optimizer_offload
  int32_t amax_history = 0;                      // RunLayout::amax_history
  std::optional<WeightCodes> weight_codes = {};  // RunLayout::weight_codes
  DType dtype = DType::f64;
  // See RunLayout.
  DType main_gradients = DType::f32;
  std::shared_ptr<const Optimizer> optimizer = nullptr;  // null: AdamW with moments of
  DType exp_avg = DType::f32;
  DType exp_avg_sq = DType::f32;
};

// What some steps leave behind, by name: losses, counts and norms of each step, gradients of each
// step, and parameters and moments after the last one. Whole tensors. Moments in 8 bits are what
// their codes and scales stand for: of the second the root.
using Outcome = std::map<std::string, std::vector<double>>;

// What the ranks run on. On GPUs they are spread over those that there are; several share one where
// these are too few, and they run as if they did. `capture`: the second step is captured as a
// graph, the third one replays it. `nccl`: GPUs exchange through NCCL, and each rank has one.
// `streams`: each rank has a GPU, on which queues run side by side. `oracle`: every value has
// memory of its own. `interleaving`, on CPUs: every rank and step runs its operations in another
// order that the queues and their events allow, drawn from this seed (support/interleaving.h).
struct RunOn {
  Device device = Device::cpu;
  bool capture = false;
  bool nccl = false;
  bool streams = false;
  bool oracle = false;
  std::optional<uint32_t> interleaving = {};
};

// An element of a parameter before the first step: the initial value, with norms and biases away
// from their starts, where mistakes would not show.
double start_value(const Parameter& parameter, int64_t element);

// Runs three steps, and where the experts' room does not suffice for one its fallback. Replicas of
// a slice that differ by a bit are a test failure.
Outcome run_layout(const LayoutCase& layout, const RunOn& on = {});

// The program of a rank of such a run. `watch`: of its passes.
std::unique_ptr<const Program> program_of(
    const LayoutCase& layout, int32_t rank,
    const std::function<void(const PassRecord&, const Program&)>& watch = {});

// The run of such a case, as its ranks know it.
std::shared_ptr<const RunLayout> run_layout_of(const LayoutCase& wanted);

// The same model and samples on one rank.
Outcome run_one_rank(const LayoutCase& layout);

// Test failures name the first value that differs by more than the tolerance.
void expect_same_outcome(const Outcome& one, const Outcome& ranks);

// The same for the first one that differs at all.
void expect_same_bits(const Outcome& expected, const Outcome& found);

}  // namespace troupe::testing
