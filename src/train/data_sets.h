// From the data sets that a run names to samples: opens them, checks their ids, and cuts their
// splits. What a sample is, data/sampler.h says.
//
// Errors are UserErrors that name the flag or the file. One thread.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "data/sampler.h"
#include "options/data_options.h"

namespace troupe {

// Opened data sets with their weights (none: by their sizes).
struct DataSets {
  std::vector<std::shared_ptr<const IndexedDataset>> sets;
  std::vector<double> weights;
};

// What training samples come from, and the validation share. `eod` is the tokenizer's, for data
// that are made up. An id outside the vocabulary of `tokenizer` (its name) is a bad request.
DataSets open_run_data(const DataSpec& spec, int64_t vocab_size, int32_t eod,
                       std::string_view tokenizer);

// Opens them all. An id outside the vocabulary of `tokenizer` (its name) is a bad request.
DataSets open_data_sets(const DataPath& path, int64_t vocab_size, std::string_view tokenizer);

// What tells data sets from others without regard to where they lie: weights and sizes, as in
// "0.7 x 1200 sequences, 345678 tokens; 0.3 x ...".
std::string fingerprint(const DataSets& data);

// The samples of one split. `split_weights` is --split's value.
std::unique_ptr<SampleSource> make_source(const DataSets& data, std::string_view split_weights,
                                          const SampleOptions& options);

// Whether that share of each data set holds a sample, so that make_source can read it once.
bool has_samples(const DataSets& data, std::string_view split_weights,
                 const SampleOptions& options);

// What `samples` samples take from each data set, one line each, indented: documents, tokens,
// share of the samples where there are other sets, epochs.
std::string describe_use(const SampleSource& source, int64_t samples);

}  // namespace troupe
