// A model on disk, for use without training: of a Troupe run (the newest checkpoint below a --save
// folder, or one checkpoint) or of a Hugging Face folder. Ranks find it and load their parts.
//
// It takes Options where a checkpoint has saved some: what was not given is taken from them, and
// resolved with the rest.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "base/work_report.h"
#include "io/hf_weights.h"
#include "model/parameters.h"
#include "options/options.h"
#include "runtime/state_storage.h"
#include "train/training_checkpoint.h"

namespace troupe {

struct SavedModel {
  ModelConfig config;
  DType compute_dtype = DType::f32;
  std::string path;  // of the checkpoint, or the Hugging Face folder
  // From Troupe checkpoints; a Hugging Face folder leaves the defaults.
  bool from_checkpoint = false;
  RunIdentity identity;
  TrainingPosition position;
  // Not empty: a later checkpoint of the run is damaged, and this one was taken instead (one
  // sentence). The command that uses the model says so, or refuses.
  std::string passed_over = {};

  // Tokens of the sequences that it was trained on, or all that it has positions for.
  int32_t sequence() const {
    return from_checkpoint ? identity.sequence : config.max_position_embeddings;
  }
};

// `hf_dtype` is the compute dtype for Hugging Face folders; checkpoints keep their own. `step`
// chooses one of a run's checkpoints; otherwise it is the newest. A path that is neither is a bad
// request that says what was looked for. Reads no weights.
SavedModel find_model(const std::string& path, DType hf_dtype,
                      std::optional<int64_t> step = std::nullopt);

// A rank's part of a model's weights, without gradients and optimizer state: what `state` declares,
// from whatever layout saved it, converted to its dtype. On the storage's device, and on the host.
// Weights that are not finite are refused (exit status 1) with the tensor's name. `report` is in
// bytes.
void load_saved_model(const SavedModel& model, const ModelState& state, const StateStorage& storage,
                      const WorkReport& report = {});

// The same for the state of a whole model that has no memory: loads the elements that it is asked
// for. What the model needs is looked for at once. `state` must outlive the reader.
ElementReader element_reader(const SavedModel& model, const ModelState& state);

// The tokenizer of a model from options.load: a checkpoint's own; for a Hugging Face folder as the
// options say, the file being the folder's when they name none, or else the folder's
// (tokenizer.json if Troupe reads it, or tokenizer.model). A folder that holds neither has the byte
// tokenizer, and `note` then says so in a sentence. A bad request when the options name a file and
// the checkpoint has its own.
TokenizerModel tokenizer_of(const SavedModel& model, const Options& options, std::string& note);

// The options of `troupe eval` with what it was not told as the run had it that saved the model:
// micro-batch size, batches, split and masks. Of a Hugging Face folder, as they are.
Options evaluation_options(const SavedModel& model, const Options& options);

// Samples of one evaluation under these options: as in the run that saved the model.
int64_t evaluation_samples(const SavedModel& model, const Options& options);

}  // namespace troupe
