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
  const LoadedModel model = load_model(options.load, compute_dtype_of(options));
  const auto tokenizer = make_tokenizer(tokenizer_of(model, options));
  const DataSets data = open_data_sets(data_path_of(options), model.config.vocab_size, "model");
  const int32_t sequence = options.seq_length.value_or(
      model.from_checkpoint ? model.identity.sequence : model.config.max_position_embeddings);
  const auto source = make_source(
      data, options.split,
      {.split = Split::validation,
       .sequence_length = sequence,
       .seed = model.from_checkpoint ? model.identity.seed : static_cast<uint64_t>(options.seed),
       .vocab_size = model.config.vocab_size,
       .eod = tokenizer->eod(),
       .eod_mask_loss = options.eod_mask_loss,
       .keep_partial = options.keep_partial_validation_sample});
  Evaluation evaluation(
      plan_evaluation(model.config, model.state, *source, options.micro_batch_size,
                      options.eval_iters * options.micro_batch_size, pool.threads()),
      *model.storage, pool, *source);
  const EvaluationResult result = evaluation.run();
  if (options.json) {
    const nlohmann::ordered_json document = {
        {"step", model.position.step}, {"val_loss", result.loss}, {"tokens", result.tokens}};
    fmt::print("{}\n", document.dump(2));
  } else {
    fmt::print("validation loss {:.4f} nats per token over {} tokens (step {})\n", result.loss,
               result.tokens, model.position.step);
  }
  return ExitStatus::done;
}

}  // namespace troupe
