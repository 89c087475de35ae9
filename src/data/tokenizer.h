// Tokenizers: text to token ids and back.
//
// Text is bytes; nothing here requires valid UTF-8 of the caller. A tokenizer is immutable after
// make_tokenizer and may be used from any number of threads at once.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace troupe {

class Tokenizer {
 public:
  virtual ~Tokenizer() = default;

  // The type's name, as make_tokenizer takes it.
  virtual std::string_view name() const = 0;

  // Ids are in [0, vocab_size()). Padding of the model's vocabulary to a multiple is the model's
  // matter.
  virtual int32_t vocab_size() const = 0;

  // The id that ends a document. No text encodes to it.
  virtual int32_t eod() const = 0;

  // Appends the ids of `text` to `ids`. No end of document is added.
  virtual void encode(std::string_view text, std::vector<int32_t>& ids) const = 0;

  // The bytes that the ids stand for; the end of a document stands for none. An id outside the
  // vocabulary is `failed`. Part of a character may come out when the ids end inside one.
  virtual std::string decode(std::span<const int32_t> ids) const = 0;
};

// Types:
//   byte   ids 0 to 255 are the bytes, 256 is the end of a document; takes no file.
// An unknown type, or a path that the type has no use for, is a bad request.
std::unique_ptr<Tokenizer> make_tokenizer(std::string_view type, const std::string& path);

}  // namespace troupe
