// `troupe eval`: validation loss of a model on a data set.
//
// Of several ranks each loads its part of the model; all evaluate together, as in a training run.
#include <cmath>
#include <cstdio>
#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <string>

#include "base/error.h"
#include "base/units.h"
#include "cli/command.h"
#include "data/json_text.h"
#include "data/make_tokenizer.h"
#include "options/device_options.h"
#include "options/layout_options.h"
#include "options/model_options.h"
#include "options/precision_options.h"
#include "train/data_sets.h"
#include "train/evaluation.h"
#include "train/interrupt.h"
#include "train/loaded_model.h"
#include "train/progress.h"
#include "train/rank_run.h"
#include "train/rank_session.h"
#include "train/terminal.h"
#include "train/work_progress.h"

namespace troupe {
namespace {

// What all ranks share.
struct EvaluatedModel {
  SavedModel model;
  std::vector<EvaluationSet> sets = {};
  int64_t samples = 0;  // of each set
  std::shared_ptr<const RunLayout> layout = {};
  bool byte_tokens = false;
};

// One rank. Construction allocates nothing that is large.
class EvalRank {
 public:
  EvalRank(const Options& options, const EvaluatedModel& evaluated, int32_t rank,
           ProcessGroup* group)
      : options_(options), evaluated_(evaluated), session_(device_spec_of(options), rank, group) {
    const SavedModel& model = evaluated.model;
    session_.declare(model.config, model.compute_dtype, /*trained=*/false, evaluated.layout);
    plan_ = plan_evaluation(model.config, session_, evaluated.sets, options.micro_batch_size,
                            evaluated.samples, options.loss_chunk_tokens,
                            precision_options_of(options, model.config));
  }

  // On all ranks at once. Rank 0 prints.
  void run() {
    session_.check({{plan_.step.program.get(), &plan_.memory}}, remedy_of_inference);
    session_.allocate();
    const bool quiet = options_.quiet || !session_.leads();
    {
      WorkProgress progress(quiet, "loading");
      load_saved_model(evaluated_.model, session_.state(), session_.storage(), progress.report());
    }
    Evaluation evaluation(std::move(plan_), session_, evaluated_.sets);
    std::vector<EvaluationResult> results;
    {
      WorkProgress progress(quiet, "evaluating", "batches");
      results = evaluation.run(progress.report());
    }
    require_finite(results);
    if (session_.leads()) print(results);
  }

 private:
  void require_finite(const std::vector<EvaluationResult>& results) const;
  void print(const std::vector<EvaluationResult>& results) const;

  const Options& options_;
  const EvaluatedModel& evaluated_;
  RankSession session_;
  EvaluationPlan plan_;
};

// The weights are finite: load_saved_model has looked.
void EvalRank::require_finite(const std::vector<EvaluationResult>& results) const {
  for (const EvaluationResult& result : results) {
    if (std::isfinite(result.loss)) continue;
    throw_failed(fmt::format(
        "The validation loss{} of {} (step {}) is {}: its weights are finite, and what it computes "
        "from them is not. The run has diverged; take an earlier checkpoint (--ckpt-step).",
        result.name.empty() ? "" : " on " + result.name, evaluated_.model.path,
        evaluated_.model.position.step, std::abs(result.loss)));  // NaN may carry a sign
  }
}

void EvalRank::print(const std::vector<EvaluationResult>& results) const {
  if (options_.json) {
    nlohmann::ordered_json document = {{"step", evaluated_.model.position.step},
                                       {"val_loss", results.front().loss},
                                       {"tokens", results.front().tokens}};
    for (const EvaluationResult& result : results) {
      if (result.name.empty()) continue;
      document["val_loss/" + result.name] = result.loss;
      document["tokens/" + result.name] = result.tokens;
    }
    fmt::print("{}", printed_json(document));
    return;
  }
  for (const EvaluationResult& result : results) {
    fmt::print("validation loss {:.4f} nats/token | {} | {} tokens{} | step {}\n", result.loss,
               loss_for_comparison(result.loss, evaluated_.byte_tokens),
               format_count(static_cast<double>(result.tokens)),
               result.name.empty() ? "" : fmt::format(" of {}", result.name),
               evaluated_.model.position.step);
  }
}

}  // namespace

ExitStatus run_eval(const Options& said, ProcessGroup* processes) {
  end_at_once_when_interrupted(/*quiet=*/!leads(processes));
  EvaluatedModel evaluated{.model = find_model(said.load, said.compute_dtype, said.ckpt_step)};
  const SavedModel& model = evaluated.model;
  if (leads(processes) && !model.passed_over.empty()) {
    print_note("Warning: " + model.passed_over);
  }
  const Options options = evaluation_options(model, said);
  std::string note;  // texts are not read here
  const TokenizerModel tokenizer_model = tokenizer_of(model, options, note);
  evaluated.byte_tokens = tokenizer_model.type == "byte";
  const auto tokenizer = make_tokenizer(tokenizer_model);
  const ValidationSpec validation = validation_spec_of(options);
  DataSpec training;
  DataSets data;
  if (validation.is_share()) {
    training = data_spec_of(options);
    // Made-up tokens are those of the tokenizer's vocabulary, as in training.
    data =
        training.mock
            ? open_run_data(training, tokenizer->vocab_size(), tokenizer->eod(), tokenizer->name())
            : open_run_data(training, model.config.vocab_size, tokenizer->eod(), "model");
  }
  evaluated.sets = open_evaluation_sets(
      validation,
      {.sequence_length = *options.seq_length,
       .seed = model.from_checkpoint ? model.identity.seed : static_cast<uint64_t>(options.seed),
       .vocab_size = model.config.vocab_size,
       .eod = tokenizer->eod(),
       .pad = tokenizer->pad(),
       .eod_mask_loss = options.eod_mask_loss,
       .reset_attention_mask = options.reset_attention_mask},
      data, training.split);
  evaluated.samples = evaluation_samples(model, options);
  evaluated.layout =
      std::make_shared<const RunLayout>(run_layout_of(options, model.config, processes));
  run_all_ranks(
      device_spec_of(options), processes,
      [&](int32_t rank, ProcessGroup* group) {
        return std::make_unique<EvalRank>(options, evaluated, rank, group);
      },
      [](EvalRank& rank) { rank.run(); });
  return ExitStatus::done;
}

}  // namespace troupe
