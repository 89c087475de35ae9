#include "data/tokenizer.h"

#include <fmt/format.h>

#include "base/error.h"

namespace troupe {

std::string_view Tokenizer::piece(int32_t id) const {
  if (id < 0 || id >= vocab_size()) {
    throw_failed(fmt::format("token id {} is not in the {} tokenizer's vocabulary of {}", id,
                             name(), vocab_size()));
  }
  return known_piece(id);
}

std::string Tokenizer::decode(std::span<const int32_t> ids) const {
  std::string text;
  text.reserve(ids.size());
  for (const int32_t id : ids) text += piece(id);
  return text;
}

bool TokenizerModel::same_as(const TokenizerModel& other) const {
  return type == other.type && contents == other.contents && eod == other.eod &&
         (!pad || !other.pad || *pad == *other.pad);
}

}  // namespace troupe
