// `troupe generate`: continues a text.
//
// Of several ranks each loads its part of the model, and all work on each new token.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <string>

#include "cli/command.h"
#include "data/json_text.h"
#include "data/make_tokenizer.h"
#include "options/device_options.h"
#include "options/layout_options.h"
#include "options/model_options.h"
#include "train/generation.h"
#include "train/interrupt.h"
#include "train/loaded_model.h"
#include "train/rank_run.h"
#include "train/rank_session.h"
#include "train/terminal.h"
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

Task make_task(const Options& options, const ProcessGroup* processes) {
  Task task{.model = find_model(options.load, options.compute_dtype, options.ckpt_step)};
  if (leads(processes) && !task.model.passed_over.empty()) {
    print_note("Warning: " + task.model.passed_over);
  }
  std::string note;
  task.tokenizer = make_tokenizer(tokenizer_of(task.model, options, note));
  if (leads(processes) && !note.empty()) print_note(note);
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
  const int64_t text = static_cast<int64_t>(task.prompt.size()) + options.max_new_tokens;
  generation.context =
      context_of_text(text, task.model.sequence(), options.tensor_model_parallel_size);
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

std::string remedy_of_generation(uint64_t, uint64_t) {
  return "Use a shorter --prompt, fewer --max-new-tokens, or more ranks, each with a part of the "
         "model (docs/layouts.md).";
}

// One rank. Construction allocates nothing that is large.
class GenerateRank {
 public:
  GenerateRank(const Options& options, const Task& task, int32_t rank, ProcessGroup* group)
      : options_(options), task_(task), session_(device_spec_of(options), rank, group) {
    const SavedModel& model = task.model;
    session_.declare(model.config, model.compute_dtype, /*trained=*/false, task.layout);
    plan_ = plan_generation(model.config, session_, task.generation.context);
  }

  // On all ranks at once. Rank 0 prints, and looks for signals.
  ExitStatus run() {
    session_.check({{plan_.step.program.get(), &plan_.memory}}, remedy_of_generation);
    session_.allocate();
    const bool quiet = options_.quiet || !session_.leads();
    {
      WorkProgress progress(quiet, "loading");
      load_saved_model(task_.model, session_.state(), session_.storage(), progress.report());
    }
    // A rank may have read from a slow disk; collectives wait within a limit.
    session_.barrier();
    const bool writes = session_.leads() && !options_.json;
    if (writes) std::fwrite(options_.prompt.data(), 1, options_.prompt.size(), stdout);
    std::string text;
    uint64_t count = 0;
    WorkProgress progress(quiet || !options_.json, "generating", "tokens");
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
        generate(std::move(plan_), session_, task_.prompt, task_.generation, emit);
    if (writes) std::fputs("\n", stdout);
    if (session_.leads() && options_.json) {
      const nlohmann::ordered_json document = {
          {"prompt", options_.prompt}, {"text", text}, {"tokens", tokens}};
      fmt::print("{}", printed_json(document));
    }
    const uint64_t interrupted = session_.exchange(interrupt_requested() ? 1 : 0).front();
    return interrupted != 0 ? ExitStatus::interrupted : ExitStatus::done;
  }

 private:
  const Options& options_;
  const Task& task_;
  RankSession session_;
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
