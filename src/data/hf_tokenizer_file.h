// What a tokenizer.json says, checked: the parts from which data/hf_tokenizer.cc works.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "data/added_tokens.h"
#include "data/byte_pairs.h"
#include "data/text_pattern.h"

namespace troupe {

// One step of the pre-tokenizer, done to each piece that the steps before it have left.
struct SplitStep {
  bool prefix_space = false;           // puts a space before a piece that does not begin with one
  std::optional<TextPattern> pattern;  // cuts at the ends of each match; unset: does not cut
  bool keep_matches = true;
  bool keep_between = true;
};

struct HfTokenizerFile {
  std::vector<std::string> pieces;  // by id, as bytes; empty for ids that nothing has
  // Ids of the vocabulary whose pieces are words in the byte alphabet (added tokens need not be).
  std::vector<int32_t> word_ids;
  std::array<int32_t, 256> byte_ids{};
  std::vector<BytePairs::Merge> merges;
  bool ignore_merges = false;  // a word that is a token as a whole is that token

  bool nfc = false;
  std::vector<SplitStep> steps;
  std::vector<AddedToken> added;             // found in the text as it was given
  std::vector<AddedToken> added_normalized;  // found in the text after normalization; contents too
  int32_t eod = 0;
  int32_t pad = -1;  // -1: none
};

// `eod` is the text of the token that ends a document; when it is empty, the first of the usual
// names that the file has. `pad` is the text of the token that stands for padding, or empty; one
// that also ends documents is none. Errors as make_tokenizer's.
HfTokenizerFile parse_hf_tokenizer(const std::string& contents, const std::string& path,
                                   const std::string& eod, const std::string& pad);

// The token that the text of a tokenizer_config.json names as `name`, such as "eos_token"; empty
// when it names none.
std::string token_of_config(const std::string& contents, const std::string& path, const char* name);

}  // namespace troupe
