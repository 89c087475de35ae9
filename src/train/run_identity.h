// What a run is, and how far it has come: the facts that a checkpoint keeps beside its tensors.
//
// Plain values.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "data/tokenizer.h"
#include "io/hf_files.h"
#include "model/model_config.h"
#include "options/loss_scaling.h"
#include "options/schedules.h"
#include "train/data_hash.h"

namespace troupe {

// How far a run has come.
struct TrainingPosition {
  int64_t step = 0;               // steps done
  int64_t updates = 0;            // steps that changed the weights (not skipped)
  int64_t consumed_samples = 0;   // where the data goes on
  int64_t scheduled_samples = 0;  // where the schedules go on: skipped steps do not count
  // Steps skipped since the last update, without those that a lower loss scale may end.
  int64_t skipped_in_row = 0;
  LossScale loss_scale = {};  // of --fp16
  int64_t best_step = 0;      // where the validation loss was lowest; 0: not evaluated yet
  double best_loss = 0;
};

// Where a model comes from, as far as readers of Hugging Face folders care (model_source.h).
struct ModelSource {
  std::string config_json = {};  // its text; empty: flags alone describe the model
  bool has_weights = false;      // the weights came with it
  bool keeps_token_ids = false;  // its bos and eos are those of the run's tokenizer
  // Without config.json, and without the file that TokenizerModel::contents is.
  std::vector<HfFile> files = {};

  bool is_empty() const { return config_json.empty() && files.empty(); }
};

// What must stay the same for a run to go on; the schedules may change on request.
struct RunIdentity {
  ModelConfig model;
  DType compute_dtype = DType::f32;
  uint64_t seed = 0;
  int32_t sequence = 0;
  std::string split;
  TokenizerModel tokenizer;
  Schedules schedules;
  // Samples that the order of the training data is made for (SampleOptions::num_samples). A run
  // that goes on keeps it while that order lasts, so it is not compared.
  int64_t ordered_samples = 0;
  std::string data = {};  // fingerprint() of the data sets; another one is only warned of
  std::vector<DataHash> data_hashes = {};  // of their contents; empty in older checkpoints
  std::string options_json;                // all options, for the reader of the file; not compared
  ModelSource source = {};                 // for `troupe convert`; not compared
};

}  // namespace troupe
