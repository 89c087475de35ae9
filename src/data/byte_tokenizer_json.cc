#include "data/byte_tokenizer_json.h"

#include <cstdint>
#include <nlohmann/json.hpp>

namespace troupe {
namespace {

using nlohmann::ordered_json;

constexpr const char* kEnd = "<|endoftext|>";
constexpr int32_t kEndId = 256;

// Latin-1 characters that can be seen stand for themselves in the byte alphabet of GPT-2.
bool is_visible(int32_t byte) {
  return (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 255 && byte != 173);
}

std::string utf8_of(int32_t character) {
  if (character < 0x80) return {static_cast<char>(character)};
  return {static_cast<char>(0xc0 | (character >> 6)), static_cast<char>(0x80 | (character & 0x3f))};
}

// The alphabet, each character with its byte's value; the others follow the 256th in order.
ordered_json byte_vocabulary() {
  ordered_json vocabulary = ordered_json::object();
  int32_t next = 256;
  for (int32_t byte = 0; byte < 256; ++byte) {
    vocabulary[utf8_of(is_visible(byte) ? byte : next++)] = byte;
  }
  return vocabulary;
}

}  // namespace

std::string byte_tokenizer_json() {
  const ordered_json end = {{"id", kEndId},    {"content", kEnd}, {"single_word", false},
                            {"lstrip", false}, {"rstrip", false}, {"normalized", false},
                            {"special", true}};
  const ordered_json byte_level = {{"type", "ByteLevel"},
                                   {"add_prefix_space", false},
                                   {"trim_offsets", true},
                                   {"use_regex", true}};
  ordered_json vocabulary = byte_vocabulary();
  vocabulary[kEnd] = kEndId;
  const ordered_json document = {{"version", "1.0"},
                                 {"truncation", nullptr},
                                 {"padding", nullptr},
                                 {"added_tokens", ordered_json::array({end})},
                                 {"normalizer", nullptr},
                                 {"pre_tokenizer", byte_level},
                                 {"post_processor", nullptr},
                                 {"decoder", byte_level},
                                 {"model",
                                  {{"type", "BPE"},
                                   {"dropout", nullptr},
                                   {"unk_token", nullptr},
                                   {"continuing_subword_prefix", nullptr},
                                   {"end_of_word_suffix", nullptr},
                                   {"fuse_unk", false},
                                   {"byte_fallback", false},
                                   {"ignore_merges", false},
                                   {"vocab", vocabulary},
                                   {"merges", ordered_json::array()}}}};
  return document.dump(2) + "\n";
}

std::string byte_tokenizer_config_json() {
  const ordered_json document = {{"tokenizer_class", "PreTrainedTokenizerFast"},
                                 {"clean_up_tokenization_spaces", false},
                                 {"eos_token", kEnd}};
  return document.dump(2) + "\n";
}

}  // namespace troupe
