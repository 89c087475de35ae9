// A model read from disk for use without training: from a Troupe run (the newest checkpoint below a
// --save folder, or one checkpoint) or from a Hugging Face folder.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "model/parameters.h"
#include "runtime/state_storage.h"
#include "train/options.h"
#include "train/training_checkpoint.h"

namespace troupe {

struct LoadedModel {
  ModelConfig config;
  DType compute_dtype = DType::f32;
  ModelState state;  // without gradients and optimizer state
  std::unique_ptr<StateStorage> storage;
  // From Troupe checkpoints; a Hugging Face folder leaves the defaults.
  bool from_checkpoint = false;
  RunIdentity identity;
  TrainingPosition position;
};

// `hf_dtype` is the compute dtype for Hugging Face folders; checkpoints keep their own. `step`
// chooses one of a run's checkpoints; otherwise it is the newest. A path that is neither is a bad
// request that says what was looked for.
// The state is on `device`, and on the host.
LoadedModel load_model(const std::string& path, DType hf_dtype,
                       std::optional<int64_t> step = std::nullopt, Device device = Device::cpu);

// The tokenizer of a model from options.load: a checkpoint's own; for a Hugging Face folder as the
// options say, the file being the folder's when they name none. A bad request when the options name
// a file and the checkpoint has its own.
TokenizerModel tokenizer_of(const LoadedModel& model, const Options& options);

}  // namespace troupe
