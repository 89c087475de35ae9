// Tokenizers: text to token ids and back.
//
// Text is bytes. Tokenizers that know characters read bytes that are not valid UTF-8 as Python's
// decode(errors="replace") would: each maximal ill-formed subsequence counts as U+FFFD. A tokenizer
// is immutable after make_tokenizer and may be used from any number of threads at once.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace troupe {

class Tokenizer {
 public:
  virtual ~Tokenizer() = default;

  // The type's name, as read_tokenizer_model takes it.
  virtual std::string_view name() const = 0;

  // Ids are in [0, vocab_size()). Padding of the model's vocabulary to a multiple is the model's
  // matter.
  virtual int32_t vocab_size() const = 0;

  // The id that ends a document. Text encodes to it only where a Hugging Face tokenizer finds it
  // written out ("<|endoftext|>").
  virtual int32_t eod() const = 0;

  // The id that stands for padding, or -1: samples have no loss for it (data/sampler.h). Never
  // eod().
  virtual int32_t pad() const { return -1; }

  // Appends the ids of `text` to `ids`. No beginning or end of document is added. Text that the
  // tokenizer's library cannot take (2 GiB in one document) is `failed`.
  virtual void encode(std::string_view text, std::vector<int32_t>& ids) const = 0;

  // The bytes that an id adds to a text that goes on: part of a character may be among them, and
  // the end of a document adds none. An id outside the vocabulary is `failed`. Lives as long as the
  // tokenizer.
  std::string_view piece(int32_t id) const;

  // The text of the ids: their pieces joined. (SentencePiece: as its library decodes, without the
  // space that encoding puts before a text, and with U+FFFD for incomplete characters.)
  virtual std::string decode(std::span<const int32_t> ids) const;

 private:
  // Of an id in [0, vocab_size()).
  virtual std::string_view known_piece(int32_t id) const = 0;
};

// All that makes a tokenizer: what a checkpoint keeps of it.
struct TokenizerModel {
  std::string type = "byte";
  std::string path;      // of the file, for messages
  std::string contents;  // of the file; empty for byte; "IDS EOD" for NullTokenizer
  std::string eod;       // text of the token that ends a document; empty: the file or its kind says

  // Text of the token that stands for padding; empty: there is none. Unset in checkpoints that do
  // not say.
  std::optional<std::string> pad = {};

  // The same tokenizer, wherever it was read from.
  bool same_as(const TokenizerModel& other) const;
};

// What some types need beside a file.
struct TokenizerDetails {
  std::string vocab_file = {};                 // GPT2BPETokenizer: vocab.json
  std::string merge_file = {};                 // and merges.txt
  std::optional<int32_t> vocab_size = {};      // NullTokenizer, TikTokenizer
  std::optional<int32_t> eod = {};             // NullTokenizer; unset: the last id
  std::string tiktoken_pattern = "v2";         // or v1
  int32_t tiktoken_num_special_tokens = 1000;  // the first ids
};

}  // namespace troupe
