#include "train/loaded_model.h"

#include <fmt/format.h>
#include <vector>

#include "base/error.h"
#include "io/hf_config.h"
#include "io/hf_weights.h"

namespace troupe {
namespace {

void declare(LoadedModel& model, Device device) {
  model.state = declare_model_state(model.config, model.compute_dtype, /*trained=*/false);
  model.storage = std::make_unique<StateStorage>(model.state.table, device);
}

LoadedModel load_checkpoint(const std::string& path, Device device) {
  const Checkpoint checkpoint = Checkpoint::open(path);
  const StoredRun stored = read_stored_run(checkpoint);
  LoadedModel model;
  model.from_checkpoint = true;
  model.identity = stored.identity;
  model.position = stored.position;
  model.config = stored.identity.model;
  model.compute_dtype = stored.identity.compute_dtype;
  declare(model, device);
  load_training_state(checkpoint, model.config, model.state, *model.storage);
  model.storage->to_device();
  return model;
}

}  // namespace

LoadedModel load_model(const std::string& path, DType hf_dtype, std::optional<int64_t> step,
                       Device device) {
  if (path_exists(join_path(path, "config.json"))) {
    LoadedModel model;
    model.config = read_hf_config(join_path(path, "config.json"));
    model.compute_dtype = hf_dtype;
    declare(model, device);
    load_hf_weights(path, model.config, model.state, *model.storage);
    model.storage->to_device();
    return model;
  }
  std::vector<std::string> incomplete;
  if (const auto checkpoint = find_checkpoint(path, step, &incomplete)) {
    return load_checkpoint(*checkpoint, device);
  }
  if (!incomplete.empty()) {
    throw_failed(fmt::format("{}: none of its checkpoints is complete, the last because of: {}",
                             path, incomplete.back()));
  }
  throw_bad_request(fmt::format(
      "{}: no model found. Looked for config.json (a Hugging Face model), index.json (a "
      "checkpoint) and checkpoints/ with a complete checkpoint (a training run).",
      path));
}

TokenizerModel tokenizer_of(const LoadedModel& model, const Options& options) {
  if (model.from_checkpoint) {
    if (!options.tokenizer_model.empty()) {
      throw_bad_request(
          fmt::format("--tokenizer-model {}: the checkpoint in {} has its own tokenizer ({}); "
                      "leave the flag out.",
                      options.tokenizer_model, options.load, model.identity.tokenizer.type));
    }
    return model.identity.tokenizer;
  }
  const bool from_folder = options.tokenizer_type != "byte" && options.tokenizer_model.empty();
  return read_tokenizer_model(options.tokenizer_type,
                              from_folder ? options.load : options.tokenizer_model);
}

}  // namespace troupe
