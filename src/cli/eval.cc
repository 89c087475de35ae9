// `troupe eval`: validation loss of a model on a data set.
#include <cstdio>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "cli/command.h"
#include "data/tokenizer.h"
#include "train/data_sets.h"
#include "train/evaluation.h"
#include "train/loaded_model.h"
#include "train/model_options.h"

namespace troupe {

ExitStatus run_eval(const Options& options) {
  ThreadPool pool(thread_count(options));
  const LoadedModel model =
      load_model(options.load, compute_dtype_of(options), options.ckpt_step, device_of(options));
  const auto tokenizer = make_tokenizer(tokenizer_of(model, options));
  const int32_t sequence = options.seq_length.value_or(
      model.from_checkpoint ? model.identity.sequence : model.config.max_position_embeddings);
  const std::vector<EvaluationSet> sets = open_evaluation_sets(
      options,
      {.sequence_length = sequence,
       .seed = model.from_checkpoint ? model.identity.seed : static_cast<uint64_t>(options.seed),
       .vocab_size = model.config.vocab_size,
       .eod = tokenizer->eod(),
       .eod_mask_loss = options.eod_mask_loss},
      /*data=*/nullptr);
  Evaluation evaluation(
      plan_evaluation(model.config, model.state, sets, options.micro_batch_size,
                      options.eval_iters * options.micro_batch_size, options.loss_chunk_tokens,
                      pool.threads(), device_of(options)),
      *model.storage, pool, sets, model.state.part);
  const std::vector<EvaluationResult> results = evaluation.run();
  if (options.json) {
    nlohmann::ordered_json document = {{"step", model.position.step},
                                       {"val_loss", results.front().loss},
                                       {"tokens", results.front().tokens}};
    for (const EvaluationResult& result : results) {
      if (result.name.empty()) continue;
      document["val_loss/" + result.name] = result.loss;
      document["tokens/" + result.name] = result.tokens;
    }
    fmt::print("{}\n", document.dump(2, ' ', false, nlohmann::json::error_handler_t::replace));
    return ExitStatus::done;
  }
  for (const EvaluationResult& result : results) {
    fmt::print("validation loss {:.4f} nats per token over {} tokens{} (step {})\n", result.loss,
               result.tokens, result.name.empty() ? "" : fmt::format(" of {}", result.name),
               model.position.step);
  }
  return ExitStatus::done;
}

}  // namespace troupe
