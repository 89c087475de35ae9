// From data options to samples: opens the data sets that a run names, checks their ids, and cuts
// their splits. What a sample is, data/sampler.h says.
//
// Errors are UserErrors that name the flag or the file. One thread.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "data/sampler.h"
#include "options/options.h"

namespace troupe {

// Opened data sets with their weights (none: by their sizes).
struct DataSets {
  std::vector<std::shared_ptr<const IndexedDataset>> sets;
  std::vector<double> weights;
};

// Whether each split has data sets of its own (--train-data-path and its like, as in Megatron), and
// not a share of one.
bool has_data_per_split(const Options& options);

// The shares of the training data's documents: --split, or all for training where each split has
// data of its own.
std::string split_of(const Options& options);

// The data sets of --data-path and all that may stand for it: what training samples come from, and
// the other splits unless has_data_per_split(). `eod` is the tokenizer's, for --mock-data. An id
// outside the vocabulary of `tokenizer` (its name) is a bad request.
DataSets open_run_data(const Options& options, int64_t vocab_size, int32_t eod,
                       std::string_view tokenizer);

// The words that say what validation reads where each split has data of its own, as --data-path
// would have them. A bad request when there are none.
std::vector<std::string> validation_words(const Options& options);

// Opens them all. An id outside the vocabulary of `tokenizer` (its name) is a bad request.
DataSets open_data_sets(const DataPath& path, int64_t vocab_size, std::string_view tokenizer);

// What tells data sets from others without regard to where they lie: weights and sizes, as in
// "0.7 x 1200 sequences, 345678 tokens; 0.3 x ...".
std::string fingerprint(const DataSets& data);

// The samples of one split. `split_weights` is --split's value.
std::unique_ptr<SampleSource> make_source(const DataSets& data, std::string_view split_weights,
                                          const SampleOptions& options);

// What `samples` samples take from each data set, one line each, indented: documents, tokens,
// share of the samples where there are other sets, epochs.
std::string describe_use(const SampleSource& source, int64_t samples);

}  // namespace troupe
