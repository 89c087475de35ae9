// Megatron's tokenizers that have no tokenizer.json: vocab.json with merges.txt (GPT2BPETokenizer),
// tiktoken's lists of tokens (TikTokenizer), and no tokenizer at all (NullTokenizer).
//
// The first two are rewritten as the tokenizer.json that means the same, so that checkpoints,
// exports and data/hf_tokenizer.h know one kind of file. Pure functions, any thread. What is wrong
// inside a file is `failed` and names it; settings that do not fit it are bad requests that name
// the flag.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "data/tokenizer.h"

namespace troupe {

inline constexpr std::string_view kGpt2BpeTokenizer = "GPT2BPETokenizer";
inline constexpr std::string_view kTikTokenizer = "TikTokenizer";
inline constexpr std::string_view kNullTokenizer = "NullTokenizer";

// A file's contents and its name.
struct TokenizerFile {
  std::string path;
  std::string contents;
};

// `vocabulary` is a JSON object of tokens in the byte alphabet and their ids, `merges` has a merge
// a line ("#version" lines aside). "<|endoftext|>" ends a document and is found in text.
std::string tokenizer_json_of_gpt2(const TokenizerFile& vocabulary, const TokenizerFile& merges);

// `file` holds tokens by rank: a JSON array of {"rank", "token_bytes" (base64), "token_str"}, as
// Megatron reads it, or a line "BASE64 RANK" for each, as tiktoken writes it. The first
// details.tiktoken_num_special_tokens ids are special tokens (<unk>, <s>, </s>, <mask>, <pad>,
// <cls>, <sep>, then <SPECIAL_7> and so on), those of the file follow, up to
// details.vocab_size ids in all (131,072 unless given); </s> ends a document.
std::string tokenizer_json_of_tiktoken(const TokenizerFile& file, const TokenizerDetails& details);

// "N EOD", which is what a NullTokenizer consists of.
std::string null_tokenizer_contents(const TokenizerDetails& details);

// Ids are written in decimal, separated by white space. Text that is no such list is a bad request.
std::unique_ptr<Tokenizer> make_null_tokenizer(const TokenizerModel& model);

}  // namespace troupe
