// `troupe eval`: validation loss of a model on a data set.
//
// Of several ranks each loads its part of the model; all evaluate together, as in a training run.
#include <cstdio>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "cli/command.h"
#include "data/tokenizer.h"
#include "parallel/group_schedule.h"
#include "train/data_sets.h"
#include "train/evaluation.h"
#include "train/layout_options.h"
#include "train/loaded_model.h"
#include "train/model_options.h"
#include "train/rank_run.h"

namespace troupe {
namespace {

// What all ranks share.
struct EvaluatedModel {
  SavedModel model;
  std::vector<EvaluationSet> sets = {};
  std::shared_ptr<const RunLayout> layout = {};
};

// One rank. Construction allocates nothing that is large.
class EvalRank {
 public:
  EvalRank(const Options& options, const EvaluatedModel& evaluated, int32_t rank,
           ProcessGroup* group)
      : options_(options),
        evaluated_(evaluated),
        rank_(rank),
        group_(group),
        gpu_(device_of(options) == Device::cuda ? gpu_of_rank(group, rank, options.ranks_per_gpu)
                                                : 0),
        pool_(threads_of_rank(options, group)),
        state_(declare_model_state(evaluated.model.config, evaluated.model.compute_dtype,
                                   /*trained=*/false, {.run = evaluated.layout, .rank = rank})),
        plan_(plan_evaluation(evaluated.model.config, state_, evaluated.sets,
                              options.micro_batch_size,
                              options.eval_iters * options.micro_batch_size,
                              options.loss_chunk_tokens, pool_.threads(), device_of(options))) {}

  // On all ranks at once. Rank 0 prints.
  void run() {
    require_memory(options_, group_, rank_, plan_.memory.total_bytes(), gpu_,
                   describe_memory(plan_.memory, 0));
    if (group_ != nullptr) {
      verify_collectives(*group_, rank_, *plan_.step.program, state_.part.layout());
    }
    const StateStorage storage(state_.table, device_of(options_), gpu_);
    load_saved_model(evaluated_.model, state_, storage);
    Evaluation evaluation(std::move(plan_), storage, pool_, evaluated_.sets, state_.part, group_,
                          {.one_stream = options_.ranks_per_gpu > 1});
    const std::vector<EvaluationResult> results = evaluation.run();
    if (rank_ == 0) print(results);
  }

 private:
  void print(const std::vector<EvaluationResult>& results) const;

  const Options& options_;
  const EvaluatedModel& evaluated_;
  const int32_t rank_;
  ProcessGroup* const group_;
  const int gpu_;
  ThreadPool pool_;
  const ModelState state_;
  EvaluationPlan plan_;
};

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
    fmt::print("{}\n", document.dump(2, ' ', false, nlohmann::json::error_handler_t::replace));
    return;
  }
  for (const EvaluationResult& result : results) {
    fmt::print("validation loss {:.4f} nats per token over {} tokens{} (step {})\n", result.loss,
               result.tokens, result.name.empty() ? "" : fmt::format(" of {}", result.name),
               evaluated_.model.position.step);
  }
}

}  // namespace

ExitStatus run_eval(const Options& options, ProcessGroup* processes) {
  EvaluatedModel evaluated{
      .model = find_model(options.load, compute_dtype_of(options), options.ckpt_step)};
  const SavedModel& model = evaluated.model;
  const auto tokenizer = make_tokenizer(tokenizer_of(model, options));
  Options of_sequences = options;
  of_sequences.seq_length = options.seq_length.value_or(model.sequence());
  evaluated.sets = open_evaluation_sets(
      options,
      {.sequence_length = *of_sequences.seq_length,
       .seed = model.from_checkpoint ? model.identity.seed : static_cast<uint64_t>(options.seed),
       .vocab_size = model.config.vocab_size,
       .eod = tokenizer->eod(),
       .eod_mask_loss = options.eod_mask_loss},
      /*data=*/nullptr);
  evaluated.layout = std::make_shared<const RunLayout>(run_layout_of(of_sequences, model.config));
  run_all_ranks(
      options, processes,
      [&](int32_t rank, ProcessGroup* group) {
        return std::make_unique<EvalRank>(options, evaluated, rank, group);
      },
      [](EvalRank& rank) { rank.run(); });
  return ExitStatus::done;
}

}  // namespace troupe
