#include "data/byte_alphabet.h"

#include <cstdint>

#include "data/utf8.h"

namespace troupe {

ByteAlphabet::ByteAlphabet() {
  char32_t next = 0x100;
  for (uint32_t byte = 0; byte < 256; ++byte) {
    const bool visible = (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte != 0xad);
    const char32_t character = visible ? static_cast<char32_t>(byte) : next++;
    append_utf8(character, characters_[byte]);
    byte_of_[character] = static_cast<char>(byte);
  }
}

std::string ByteAlphabet::word(std::string_view bytes) const {
  std::string word;
  for (const char byte : bytes) word += characters_[static_cast<unsigned char>(byte)];
  return word;
}

std::optional<std::string> ByteAlphabet::bytes_of(std::string_view word) const {
  std::string bytes;
  for (size_t at = 0; at < word.size();) {
    const auto found = byte_of_.find(next_code_point(word, at));
    if (found == byte_of_.end()) return std::nullopt;
    bytes.push_back(found->second);
  }
  return bytes;
}

}  // namespace troupe
