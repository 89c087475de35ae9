#include "options/run_spec.h"

#include <fmt/format.h>
#include <utility>

#include "base/error.h"
#include "base/text.h"
#include "options/model_options.h"
#include "options/read_number.h"
#include "options/schedule_options.h"
#include "options/tokenizer_options.h"

namespace troupe {
namespace {

// The steps of --iterations-to-skip, counted from 1.
std::set<int64_t> steps_to_skip(const Options& options) {
  std::set<int64_t> steps;
  for (const std::string& text : options.iterations_to_skip) {
    const int64_t step = read_number<int64_t>(text).value_or(-1);
    if (step < 1) {
      throw_bad_request(fmt::format("--iterations-to-skip {}: steps are whole numbers from 1.",
                                    quote_name(text)));
    }
    steps.insert(step);
  }
  return steps;
}

std::vector<int32_t> profiled_ranks(const Options& options) {
  std::set<int32_t> ranks;
  for (const std::string& text : options.profile_ranks) {
    const int64_t rank = read_number<int64_t>(text).value_or(-1);
    if (rank < 0 || rank >= options.ranks) {
      throw_bad_request(fmt::format("--profile-ranks {}: there are the ranks 0 to {} (--ranks).",
                                    printable(text), options.ranks - 1));
    }
    ranks.insert(static_cast<int32_t>(rank));
  }
  return {ranks.begin(), ranks.end()};
}

// Sets what no flag says. The tokenizer is the checkpoint's, or empty where flags name one.
TokenizerModel take_saved_args(const SavedArgs& saved, Options& options) {
  const Options defaults;
  if (!options.seq_length) options.seq_length = saved.sequence;
  if (options.compute_dtype == defaults.compute_dtype) options.compute_dtype = saved.compute_dtype;
  if (options.tokenizer_type != defaults.tokenizer_type || !options.tokenizer_model.empty()) {
    return {};
  }
  options.tokenizer_type = saved.tokenizer.type;
  return saved.tokenizer;
}

}  // namespace

int64_t EvaluationSpec::samples(int32_t trained) const {
  const int64_t size = global_batch_size.value_or(trained);
  if (has_own_batch && size % (int64_t{micro_batch_size} * replicas) != 0) {
    throw_bad_request(fmt::format(
        "--eval-global-batch-size {}: it must be a multiple of --eval-micro-batch-size {} x DP {}.",
        size, micro_batch_size, replicas));
  }
  return iterations * size;
}

ProfileSpec profile_spec_of(const Options& options) {
  return {.enabled = options.profile,
          .after_step = options.profile_step_start,
          .last_step = options.profile_step_end,
          .ranks = profiled_ranks(options),
          .folder = options.profile_dir};
}

LengthSpec length_spec_of(const Options& options) {
  return {.steps = options.train_iters,
          .samples = options.train_samples,
          .left_out = steps_to_skip(options),
          .max_skipped_steps = options.max_skipped_steps,
          .exit_after_step = options.exit_after_step,
          .exit_interval = options.exit_interval,
          .exit_minutes = options.exit_duration_in_mins};
}

LoadSpec load_spec_of(const Options& options) {
  return {
      .folder = options.load,
      .step = options.ckpt_step,
      .is_required = options.exit_on_missing_checkpoint,
      .finetune = options.finetune,
      .pretrained = options.pretrained_checkpoint,
      .upcycling_granularity = options.moe_use_upcycling ? options.moe_upcycling_granularity : 0,
      .optimizer = !options.no_load_optim,
      .any_seed = options.no_load_rng,
      .any_data = options.allow_changed_data,
      .takes_model = options.use_checkpoint_args,
      .keeps_schedules = options.use_checkpoint_opt_param_scheduler,
      .any_schedules = options.override_opt_param_scheduler};
}

EvaluationSpec evaluation_spec_of(const Options& options) {
  return {.interval = options.eval_interval,
          .iterations = options.eval_iters,
          .micro_batch_size = options.eval_micro_batch_size.value_or(options.micro_batch_size),
          .loss_chunk_tokens = options.loss_chunk_tokens,
          .has_own_batch = options.eval_global_batch_size || options.eval_micro_batch_size,
          .global_batch_size = options.eval_global_batch_size,
          .replicas = data_parallel_size_of(options)};
}

ReportSpec report_spec_of(const Options& options) {
  return {.quiet = options.quiet,
          .verbose = options.verbose,
          .json = options.json,
          .log_interval = options.log_interval,
          .tensorboard_folder = options.tensorboard_dir,
          .memory_curve = options.log_memory_to_tensorboard,
          .timer_curves = options.log_timers_to_tensorboard,
          .watch_gradients = options.check_for_large_grads,
          .routing = {.load_imbalance = options.warn_load_imbalance,
                      .dead_experts = options.warn_dead_experts,
                      .router_entropy = options.warn_router_entropy}};
}

RunSpec run_spec_of(const Options& asked, const std::optional<SavedArgs>& saved,
                    const ProcessGroup* group) {
  Options options = asked;
  TokenizerModel tokenizer;
  if (saved) tokenizer = take_saved_args(*saved, options);
  ModelConfig model = load_model_config(options, saved ? &saved->model : nullptr);
  DataSpec data = data_spec_of(options);
  if (tokenizer.contents.empty()) tokenizer = read_tokenizer_of(options);
  Schedules schedules = make_schedules(options);
  StepSpec step = step_spec_of(options, std::move(model), group);
  BatchSizeSchedule batch_sizes = make_batch_sizes(options, step.options.sequence);
  const EvaluationSpec evaluation = evaluation_spec_of(options);
  const bool is_of_checkpoint = saved && options.model.empty();
  return {.options = options,
          .device = device_spec_of(options),
          .model_name = options.model,
          .config_path = is_of_checkpoint ? "" : config_path_of(options),
          .data = std::move(data),
          .validation = evaluation.evaluates() ? validation_spec_of(options) : ValidationSpec{},
          .tokenizer = std::move(tokenizer),
          .schedules = schedules,
          .step = std::move(step),
          .batch_sizes = std::move(batch_sizes),
          .length = length_spec_of(options),
          .load = load_spec_of(options),
          .save = {.folder = options.save,
                   .optimizer = !options.no_save_optim,
                   .seed = !options.no_save_rng,
                   .interval = options.save_interval,
                   .minutes = options.save_interval_minutes,
                   .newest = options.keep_checkpoints,
                   .retain_interval = options.save_retain_interval,
                   .best = options.save_best},
          .evaluation = evaluation,
          .profile = options.profile ? profile_spec_of(options) : ProfileSpec{},
          .report = report_spec_of(options),
          .loss_scaling = loss_scaling_of(options),
          .oracle = options.oracle,
          .hardware = options.hardware};
}

}  // namespace troupe
