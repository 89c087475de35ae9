// `troupe generate`: continues a text.
#include <algorithm>
#include <cstdio>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "cli/command.h"
#include "data/tokenizer.h"
#include "train/generation.h"
#include "train/interrupt.h"
#include "train/loaded_model.h"
#include "train/model_options.h"

namespace troupe {

ExitStatus run_generate(const Options& options) {
  install_interrupt_handlers();
  ThreadPool pool(thread_count(options));
  const LoadedModel model =
      load_model(options.load, compute_dtype_of(options), options.ckpt_step, device_of(options));
  const auto tokenizer = make_tokenizer(tokenizer_of(model, options));
  if (tokenizer->vocab_size() > model.config.vocab_size) {
    throw_bad_request(fmt::format("The {} tokenizer has {} ids, the model only {}.",
                                  tokenizer->name(), tokenizer->vocab_size(),
                                  model.config.vocab_size));
  }
  std::vector<int32_t> prompt;
  tokenizer->encode(options.prompt, prompt);
  if (prompt.empty()) prompt.push_back(tokenizer->eod());  // the start of a document

  GenerationOptions generation;
  generation.context =
      model.from_checkpoint ? model.identity.sequence : model.config.max_position_embeddings;
  generation.context = static_cast<int32_t>(std::min<int64_t>(
      generation.context, static_cast<int64_t>(prompt.size()) + options.max_new_tokens));
  generation.new_tokens = options.max_new_tokens;
  generation.temperature = options.temperature;
  generation.top_k = options.top_k;
  generation.top_p = options.top_p;
  generation.seed = static_cast<uint64_t>(options.seed);
  generation.vocabulary = tokenizer->vocab_size();
  generation.eod = tokenizer->eod();

  std::string text;
  const auto emit = [&](int32_t token) {
    const std::string_view piece = tokenizer->piece(token);
    text += piece;
    if (!options.json) {
      std::fwrite(piece.data(), 1, piece.size(), stdout);
      std::fflush(stdout);
    }
    return !interrupt_requested();
  };
  if (!options.json) std::fwrite(options.prompt.data(), 1, options.prompt.size(), stdout);
  const std::vector<int32_t> tokens =
      generate(model.config, model.state, *model.storage, pool, prompt, generation, emit);
  if (options.json) {
    const nlohmann::ordered_json document = {
        {"prompt", options.prompt}, {"text", text}, {"tokens", tokens}};
    fmt::print("{}\n", document.dump(2, ' ', false, nlohmann::json::error_handler_t::replace));
  } else {
    std::fputs("\n", stdout);
  }
  return interrupt_requested() ? ExitStatus::interrupted : ExitStatus::done;
}

}  // namespace troupe
