// The alphabet in which byte-level vocabularies are written: a printable character for each byte.
// Those of Latin-1 that can be seen stand for themselves, the others for U+0100 onwards in order.
//
// Immutable; any number of threads. Nothing here fails.
#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>

namespace troupe {

class ByteAlphabet {
 public:
  ByteAlphabet();

  // The character of a byte, in UTF-8.
  const std::string& character(size_t byte) const { return characters_[byte]; }

  // The characters of all bytes of `bytes`.
  std::string word(std::string_view bytes) const;

  // The bytes that a word of the alphabet, in valid UTF-8, stands for; nothing when it has other
  // characters.
  std::optional<std::string> bytes_of(std::string_view word) const;

 private:
  std::array<std::string, 256> characters_;
  std::unordered_map<char32_t, char> byte_of_;
};

}  // namespace troupe
