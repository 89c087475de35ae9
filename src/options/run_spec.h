// What a training run is asked to do: the options of each part of training as one value, resolved
// once for all ranks of a process, which that part takes.
//
// Reads the files of the model's shape, the tokenizer and lists of data sets; otherwise plain
// values and pure functions. Any thread. What cannot be is a UserError (bad request) that names the
// flag or the file.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "comm/process_group.h"
#include "data/tokenizer.h"
#include "options/data_options.h"
#include "options/device_options.h"
#include "options/loss_scaling.h"
#include "options/options.h"
#include "options/schedules.h"
#include "options/step_spec.h"

namespace troupe {

// How far a run goes: either `steps` or `samples` is set.
struct LengthSpec {
  std::optional<int64_t> steps;
  std::optional<int64_t> samples;
  std::set<int64_t> left_out;     // steps whose samples are consumed, and that do nothing else
  int64_t max_skipped_steps = 0;  // updates skipped in a row that end the run; 0: no limit
  // Ends this start of the run earlier.
  std::optional<int64_t> exit_after_step;
  std::optional<int64_t> exit_interval;  // steps
  std::optional<double> exit_minutes;
};
LengthSpec length_spec_of(const Options& options);

// Where a run comes from.
struct LoadSpec {
  std::string folder;           // of checkpoints; empty: none
  std::optional<int64_t> step;  // of which one; unset: of the newest
  bool is_required = false;     // also where the run would save into the same folder
  bool finetune = false;        // its weights alone, for a new run
  std::string pretrained;       // a folder of weights for a new run; empty: none
  // The weights for a new run are those of a dense model, each of whose feed-forward networks is
  // cut into this many parts for the experts (train/upcycling.h); 0: they are used as they are.
  int32_t upcycling_granularity = 0;
  // Of a run that goes on:
  bool optimizer = true;
  bool any_seed = false;
  bool any_data = false;
  bool takes_model = false;      // from the checkpoint, where no flag says otherwise
  bool keeps_schedules = false;  // the saved ones
  bool any_schedules = false;
};
LoadSpec load_spec_of(const Options& options);

// What a run saves of itself, and when.
struct SaveSpec {
  std::string folder;  // empty: nothing
  bool optimizer = true;
  bool seed = true;
  std::optional<int64_t> interval;         // steps
  double minutes = 15;                     // between those; 0: not by the clock
  int32_t newest = 0;                      // N that are kept; 0: all
  std::optional<int64_t> retain_interval;  // steps whose checkpoints are kept besides
  bool best = false;                       // also when the validation loss was never lower
};

struct EvaluationSpec {
  std::optional<int64_t> interval;  // steps between evaluations
  int64_t iterations = 0;           // batches of each
  int32_t micro_batch_size = 1;
  int32_t loss_chunk_tokens = 0;
  bool has_own_batch = false;                // or the batch is that of a training step
  std::optional<int32_t> global_batch_size;  // samples of a batch
  int32_t replicas = 1;                      // that share it

  bool evaluates() const { return interval && iterations > 0; }
  // Of each set, when a training step has `trained` samples.
  int64_t samples(int32_t trained) const;
};
EvaluationSpec evaluation_spec_of(const Options& options);

// Which steps are profiled, and which ranks write their timelines.
struct ProfileSpec {
  bool enabled = false;
  int64_t after_step = 0;
  int64_t last_step = 0;
  std::vector<int32_t> ranks;  // ascending; none: as the command has it
  std::string folder;

  bool covers(int64_t step) const { return enabled && step > after_step && step <= last_step; }
  std::vector<int32_t> ranks_or(const std::vector<int32_t>& otherwise) const {
    return ranks.empty() ? otherwise : ranks;
  }
};
ProfileSpec profile_spec_of(const Options& options);

// When to warn of a layer's routing; 0: never.
struct RoutingThresholds {
  double load_imbalance = 0;  // above this largest load / mean load
  double dead_experts = 0;    // above this share of experts without any row
  double router_entropy = 0;  // below this share of the largest possible entropy
};

// What a run prints, and writes to TensorBoard.
struct ReportSpec {
  bool quiet = false;
  bool verbose = false;
  bool json = false;
  int64_t log_interval = 1;        // steps
  std::string tensorboard_folder;  // empty: none
  bool memory_curve = false;
  bool timer_curves = false;
  bool watch_gradients = false;
  RoutingThresholds routing;
};
ReportSpec report_spec_of(const Options& options);

// What a checkpoint says of its run where no flag says otherwise (--use-checkpoint-args).
struct SavedArgs {
  ModelConfig model;
  int32_t sequence = 0;
  DType compute_dtype = DType::f32;
  TokenizerModel tokenizer;
};

struct RunSpec {
  // All of them, with what the checkpoint says: for what is printed, saved and compared, and for
  // remedies, which vary them. What a run does is decided by the others alone.
  Options options;
  DeviceSpec device;
  std::string model_name;   // as --model says it
  std::string config_path;  // of the config.json that it means; empty: there is none
  DataSpec data;
  ValidationSpec validation;  // of a run that evaluates
  TokenizerModel tokenizer;
  Schedules schedules;  // but those of the checkpoint where they are kept (LoadSpec)
  StepSpec step;        // of the largest batch
  BatchSizeSchedule batch_sizes;
  LengthSpec length;
  LoadSpec load;
  SaveSpec save;
  EvaluationSpec evaluation;
  ProfileSpec profile;
  ReportSpec report;
  LossScaling loss_scaling = {};
  bool oracle = false;   // no memory is reused
  std::string hardware;  // of the planned time; empty: that of the GPU
};

// `saved`: with --use-checkpoint-args. `group` as in step_spec_of().
RunSpec run_spec_of(const Options& options, const std::optional<SavedArgs>& saved,
                    const ProcessGroup* group);

}  // namespace troupe
