// From the flags of the tokenizer to the tokenizer, and to its vocabulary where a look at a run has
// to do without its files.
//
// Reads the tokenizer's files; otherwise pure functions. Any thread. Errors are UserErrors that
// name the flag or the file.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "data/tokenizer.h"
#include "options/options.h"

namespace troupe {

// What --tokenizer-type, --tokenizer-model and the flags beside them name. `path`: in place of
// --tokenizer-model.
TokenizerModel read_tokenizer_of(const Options& options);
TokenizerModel read_tokenizer_of(const Options& options, const std::string& path);

// Whether --vocab-size is that of the tokenizer, which the model's is made from, and not the
// model's.
bool sizes_the_tokenizer(const Options& options);

// The vocabulary that plan, inspect, bench and --fake-process-group take where the tokenizer's
// files are not there, and the name of the tokenizer that has it.
struct AssumedVocabulary {
  int32_t size = 0;
  std::string name;
};

// Of a model that flags alone describe. Nothing where the files are there, where no tokenizer is
// needed, or where it is unknown.
std::optional<AssumedVocabulary> assumed_vocabulary(const Options& options);

}  // namespace troupe
