#include "train/loaded_model.h"

#include <fmt/format.h>
#include <vector>

#include "base/error.h"
#include "io/hf_config.h"
#include "io/hf_weights.h"

namespace troupe {
namespace {

SavedModel describe_checkpoint(const std::string& path) {
  const StoredRun stored = read_stored_run(Checkpoint::open(path));
  return {.config = stored.identity.model,
          .compute_dtype = stored.identity.compute_dtype,
          .path = path,
          .from_checkpoint = true,
          .identity = stored.identity,
          .position = stored.position};
}

}  // namespace

SavedModel find_model(const std::string& path, DType hf_dtype, std::optional<int64_t> step) {
  if (path_exists(join_path(path, "config.json"))) {
    SavedModel model;
    model.config = read_hf_config(join_path(path, "config.json"));
    model.compute_dtype = hf_dtype;
    model.path = path;
    return model;
  }
  std::vector<std::string> incomplete;
  if (const auto checkpoint = find_checkpoint(path, step, &incomplete)) {
    return describe_checkpoint(*checkpoint);
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

void load_saved_model(const SavedModel& model, const ModelState& state,
                      const StateStorage& storage) {
  if (model.from_checkpoint) {
    load_training_state(Checkpoint::open(model.path), model.config, state, storage);
  } else {
    load_hf_weights(model.path, model.config, state, storage);
  }
  storage.to_device();
}

TokenizerModel tokenizer_of(const SavedModel& model, const Options& options) {
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
