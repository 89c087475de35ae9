#include "options/check_options.h"

#include <cstdint>
#include <fmt/format.h>
#include <limits>
#include <string_view>

#include "base/error.h"
#include "options/cluster_options.h"
#include "options/expert_load_options.h"
#include "options/layout_options.h"
#include "options/run_spec.h"
#include "options/schedule_options.h"
#include "runtime/device_memory.h"

namespace troupe {

void check_options(const Options& options) {
  if (options.device == Device::cuda) {
    const bool only_plans = options.command == Command::plan || options.command == Command::inspect;
    if (!has_cuda() && !only_plans) {
      throw_bad_request("--device cuda: this build has no CUDA. Use --device cpu.");
    }
    if (options.profile && options.ranks_per_gpu > 1) {
      throw_bad_request(
          "--profile: the kernels of ranks that share a GPU cannot be told apart. Leave "
          "--ranks-per-gpu out.");
    }
  }
  const bool has_ranks = runs_on_ranks(options.command) || options.command == Command::inspect ||
                         options.command == Command::plan;
  if (options.ranks != 1 && !has_ranks) {
    throw_bad_request(fmt::format("--ranks {}: troupe {} works with one rank. Use --ranks 1.",
                                  options.ranks, info_of(options.command).name));
  }
  const bool runs = options.command != Command::plan && !options.fake_process_group;
  if (runs && options.ranks > kMostThreadRanks) {
    throw_bad_request(fmt::format("--ranks {}: at most {} ranks run as threads of one process.",
                                  options.ranks, kMostThreadRanks));
  }
  if (int64_t{options.micro_batch_size} * options.ranks > std::numeric_limits<int32_t>::max()) {
    throw_bad_request(
        fmt::format("--micro-batch-size {} times --ranks {} is more than a step holds.",
                    options.micro_batch_size, options.ranks));
  }
  if (options.rank >= options.ranks) {
    throw_bad_request(fmt::format("--rank {}: there are the ranks 0 to {} (--ranks).", options.rank,
                                  options.ranks - 1));
  }
  if (!has_ranks) check_runnable_layout(options);
  check_schedules(options);
  check_expert_load(options);
  if (!options.hardware.empty() && options.hardware != kNoHardware) hardware_of(options.hardware);
  if (options.finetune && options.load.empty()) {
    throw_bad_request(
        "--finetune takes its weights from --load, which is missing. Give --load DIR, or "
        "--pretrained-checkpoint DIR instead of both.");
  }
  if (options.moe_upcycling_granularity != 1 && !options.moe_use_upcycling) {
    throw_bad_request("--moe-upcycling-granularity needs --moe-use-upcycling.");
  }
  if (options.command == Command::train && options.moe_use_upcycling &&
      options.pretrained_checkpoint.empty() && options.load.empty()) {
    throw_bad_request(
        "--moe-use-upcycling starts from a dense model, which is missing. Give "
        "--pretrained-checkpoint DIR.");
  }
  if (options.override_opt_param_scheduler && options.use_checkpoint_opt_param_scheduler) {
    throw_bad_request(
        "--override-opt_param-scheduler and --use-checkpoint-opt_param-scheduler exclude each "
        "other; give one of them.");
  }
  if (options.no_save && !options.save.empty()) {
    throw_bad_request("--save and --no-save exclude each other; give one of them.");
  }
  const auto needs_load = [&](std::string_view flag, bool given) {
    if (!given || !options.load.empty()) return;
    throw_bad_request(fmt::format("{} needs --load DIR, which is missing.", flag));
  };
  needs_load("--ckpt-step", options.ckpt_step.has_value());
  needs_load("--use-checkpoint-args", options.use_checkpoint_args);
  needs_load("--allow-changed-data", options.allow_changed_data);
  if (options.no_save) {
    const auto needs_save = [](std::string_view flag, bool given) {
      if (!given) return;
      throw_bad_request(fmt::format("{} and --no-save exclude each other.", flag));
    };
    needs_save("--save-interval", options.save_interval.has_value());
    needs_save("--keep-checkpoints", options.keep_checkpoints > 0);
    needs_save("--save-retain-interval", options.save_retain_interval.has_value());
    needs_save("--save-best", options.save_best);
  }
  if (options.save_best && (!options.eval_interval || options.eval_iters == 0)) {
    throw_bad_request("--save-best needs evaluations: --eval-interval N.");
  }
  if (options.command == Command::eval && options.eval_iters == 0) {
    throw_bad_request("--eval-iters 0: troupe eval evaluates at least one batch.");
  }
  if (options.command == Command::train && !options.train_iters && !options.train_samples) {
    throw_bad_request("train needs --train-iters N or --train-samples N.");
  }
  if (options.command == Command::tokenize && options.tokenizer_type == "Llama2Tokenizer") {
    throw_bad_request(
        "--tokenizer-type Llama2Tokenizer: Megatron's begins every document with a BOS token, "
        "which troupe tokenize does not. Use SentencePieceTokenizer to go without, or Megatron's "
        "preprocess_data.py, whose data sets are read as they are.");
  }
  const bool has_data = !options.data_path.empty() || !options.data_args_path.empty() ||
                        !options.valid_data_path.empty() || !options.train_data_path.empty() ||
                        !options.per_split_data_args_path.empty() || options.mock_data;
  if (options.command == Command::eval && !has_data) {
    throw_bad_request("eval needs --data-path PREFIX or --valid-data-path PREFIX.");
  }
  if (options.command == Command::train) {
    length_spec_of(options);
    if (options.profile) profile_spec_of(options);
  }
}

}  // namespace troupe
