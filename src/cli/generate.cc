// `troupe generate`: continues a text.
//
// Of several ranks each loads its part of the model, and all work on each new token.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "cli/command.h"
#include "data/make_tokenizer.h"
#include "options/device_options.h"
#include "options/layout_options.h"
#include "options/model_options.h"
#include "parallel/group_schedule.h"
#include "runtime/device_memory.h"
#include "train/generation.h"
#include "train/interrupt.h"
#include "train/loaded_model.h"
#include "train/planned_step.h"
#include "train/rank_hardware.h"
#include "train/rank_run.h"
#include "train/work_progress.h"

namespace troupe {
namespace {

// What all ranks share.
struct Task {
  SavedModel model;
  std::unique_ptr<Tokenizer> tokenizer = {};
  std::vector<int32_t> prompt = {};
  GenerationOptions generation = {};
  std::shared_ptr<const RunLayout> layout = {};
};

// The tokens that the model may see at a time: no more than the text will have, and a multiple of
// `tp`, among whose ranks they are shared.
int32_t context_of(const Task& task, const Options& options) {
  const int64_t text = static_cast<int64_t>(task.prompt.size()) + options.max_new_tokens;
  const int64_t tp = options.tensor_model_parallel_size;
  const int64_t most = std::max(tp, task.model.sequence() / tp * tp);
  return static_cast<int32_t>(std::min(most, (text + tp - 1) / tp * tp));
}

Task make_task(const Options& options, const ProcessGroup* processes) {
  Task task{.model = find_model(options.load, options.compute_dtype, options.ckpt_step)};
  if (leads(processes) && !task.model.passed_over.empty()) {
    std::fprintf(stderr, "Warning: %s\n", task.model.passed_over.c_str());
  }
  std::string note;
  task.tokenizer = make_tokenizer(tokenizer_of(task.model, options, note));
  if (leads(processes) && !note.empty()) std::fprintf(stderr, "%s\n", note.c_str());
  const int32_t ids = task.tokenizer->vocab_size();
  if (ids > task.model.config.vocab_size) {
    throw_bad_request(fmt::format("The {} tokenizer has {} ids, the model only {}.",
                                  task.tokenizer->name(), ids, task.model.config.vocab_size));
  }
  task.tokenizer->encode(options.prompt, task.prompt);
  if (task.prompt.empty()) {
    task.prompt.push_back(task.tokenizer->eod());  // the start of a document
  }
  GenerationOptions& generation = task.generation;
  generation.context = context_of(task, options);
  generation.new_tokens = options.max_new_tokens;
  generation.temperature = options.temperature;
  generation.top_k = options.top_k;
  generation.top_p = options.top_p;
  generation.seed = static_cast<uint64_t>(options.seed);
  generation.vocabulary = ids;
  generation.eod = task.tokenizer->eod();

  Options of_sequences = options;
  of_sequences.seq_length = generation.context;
  task.layout =
      std::make_shared<const RunLayout>(run_layout_of(of_sequences, task.model.config, processes));
  check_generation_layout(task.model.config, task.layout->layout);
  return task;
}

// One rank. Construction allocates nothing that is large.
class GenerateRank {
 public:
  GenerateRank(const Options& options, const Task& task, int32_t rank, ProcessGroup* group)
      : options_(options),
        task_(task),
        rank_(rank),
        group_(group),
        gpu_(options.device == Device::cuda ? gpu_of_rank(group, rank, options.ranks_per_gpu) : 0),
        pool_(threads_of_rank(device_spec_of(options), group)),
        state_(declare_model_state(task.model.config, task.model.compute_dtype, /*trained=*/false,
                                   {.run = task.layout, .rank = rank})),
        plan_(plan_generation(task.model.config, state_, task.generation.context, pool_.threads(),
                              options.device, traits_of(options.device, gpu_))) {}

  // On all ranks at once. Rank 0 prints, and looks for signals.
  ExitStatus run() {
    require_memory(options_, group_, rank_, plan_.memory.total_bytes(), gpu_,
                   describe_memory(plan_.memory, 0));
    if (group_ != nullptr) {
      verify_collectives(*group_, rank_, *plan_.step.program, state_.part.layout());
    }
    const StateStorage storage(state_.table, options_.device, gpu_);
    {
      WorkProgress progress(options_.quiet || rank_ != 0, "loading");
      load_saved_model(task_.model, state_, storage, progress.report());
    }
    // A rank may have read from a slow disk; collectives wait within a limit.
    barrier(group_, rank_);
    const bool writes = rank_ == 0 && !options_.json;
    if (writes) std::fwrite(options_.prompt.data(), 1, options_.prompt.size(), stdout);
    std::string text;
    uint64_t count = 0;
    WorkProgress progress(options_.quiet || rank_ != 0 || !options_.json, "generating", "tokens");
    const auto emit = [&](int32_t token) {
      const std::string_view piece = task_.tokenizer->piece(token);
      text += piece;
      if (writes) {
        std::fwrite(piece.data(), 1, piece.size(), stdout);
        std::fflush(stdout);
      }
      if (interrupt_requested()) return false;
      progress.show(++count, static_cast<uint64_t>(options_.max_new_tokens));
      return true;
    };
    const std::vector<int32_t> tokens =
        generate(std::move(plan_), storage, pool_, task_.prompt, task_.generation, emit,
                 state_.part, group_, {.one_stream = options_.ranks_per_gpu > 1});
    if (writes) std::fputs("\n", stdout);
    if (rank_ == 0 && options_.json) {
      const nlohmann::ordered_json document = {
          {"prompt", options_.prompt}, {"text", text}, {"tokens", tokens}};
      fmt::print("{}\n", document.dump(2, ' ', false, nlohmann::json::error_handler_t::replace));
    }
    uint64_t interrupted = interrupt_requested() ? 1 : 0;
    if (group_ != nullptr) interrupted = group_->exchange(rank_, interrupted).front();
    return interrupted != 0 ? ExitStatus::interrupted : ExitStatus::done;
  }

 private:
  const Options& options_;
  const Task& task_;
  const int32_t rank_;
  ProcessGroup* const group_;
  const int gpu_;
  ThreadPool pool_;
  const ModelState state_;
  GenerationPlan plan_;
};

}  // namespace

ExitStatus run_generate(const Options& options, ProcessGroup* processes) {
  install_interrupt_handlers(/*quiet=*/!leads(processes));
  const Task task = make_task(options, processes);
  std::atomic<ExitStatus> status = ExitStatus::done;  // the same for all ranks
  run_all_ranks(
      device_spec_of(options), processes,
      [&](int32_t rank, ProcessGroup* group) {
        return std::make_unique<GenerateRank>(options, task, rank, group);
      },
      [&](GenerateRank& rank) { status = rank.run(); });
  return status;
}

}  // namespace troupe
