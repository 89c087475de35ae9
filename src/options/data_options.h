// From data options to the data sets that a run reads: which are for training, and which for
// validation.
//
// Reads the files that list data sets (--data-args-path, --per-split-data-args-path), not the sets.
// Any thread. Errors are UserErrors that name the flag or the file.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "data/sampler.h"
#include "options/options.h"

namespace troupe {

// What training samples come from.
struct DataSpec {
  bool mock = false;
  DataPath path = {};  // unless they are made up
  // Shares of the documents. All are for training where each split has data of its own
  // (--train-data-path and its like, as in Megatron).
  std::string split = {};
  bool eod_mask_loss = false;
  bool reset_attention_mask = false;
  bool needs_padding = false;  // a token that stands for it
};
DataSpec data_spec_of(const Options& options);

// What evaluations read: with neither of these the validation share of the training data.
struct ValidationSpec {
  struct Set {
    std::string name;
    std::string prefix;
  };
  std::optional<DataPath> mixture = {};  // one set of several, each whole
  std::vector<Set> sets = {};            // each whole
  bool keep_partial = false;             // the last sample, though it is shorter
  // Read once, when the run is over: these data, or the third share of the training data where it
  // holds this many samples or more (0: never). Fewer would make the batches of validation smaller.
  std::optional<DataPath> test = {};
  int64_t test_share = 0;

  bool is_share() const { return !mixture && sets.empty(); }
};
ValidationSpec validation_spec_of(const Options& options);

}  // namespace troupe
