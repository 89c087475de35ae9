// Writes small SentencePiece models, as a test or a fuzz target needs them: the fields of a
// ModelProto in Protocol Buffers' wire format. Any thread.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

namespace troupe::testing {

inline std::string varint(uint64_t value) {
  std::string bytes;
  for (; value >= 0x80; value >>= 7) bytes.push_back(static_cast<char>((value & 0x7f) | 0x80));
  return bytes + static_cast<char>(value);
}

inline std::string varint_field(uint64_t number, uint64_t value) {
  return varint(number << 3) + varint(value);
}

inline std::string bytes_field(uint64_t number, std::string_view bytes) {
  return varint((number << 3) | 2) + varint(bytes.size()) + std::string(bytes);
}

inline constexpr int kNormalPiece = 1;
inline constexpr int kUnknownPiece = 2;
inline constexpr int kControlPiece = 3;
inline constexpr int kUserDefinedPiece = 4;
inline constexpr int kUnusedPiece = 5;
inline constexpr int kBytePiece = 6;

inline std::string sentencepiece(std::string_view text, float score = 0, int type = kNormalPiece) {
  std::string bits(sizeof(score), '\0');
  std::memcpy(bits.data(), &score, sizeof(score));
  return bytes_field(1, bytes_field(1, text) + varint((2 << 3) | 5) + bits +
                            varint_field(3, static_cast<uint64_t>(type)));
}

// What every model starts with: unknown text, and the end of a document.
inline std::string first_pieces() {
  return sentencepiece("<unk>", 0, kUnknownPiece) + sentencepiece("</s>", 0, kControlPiece);
}

// One piece for every byte.
inline std::string byte_pieces() {
  constexpr std::string_view kDigits = "0123456789ABCDEF";
  std::string pieces;
  for (size_t byte = 0; byte < 256; ++byte) {
    const std::string text = {'<', '0', 'x', kDigits[byte >> 4], kDigits[byte & 15], '>'};
    pieces += sentencepiece(text, 0, kBytePiece);
  }
  return pieces;
}

// Kinds: 1 unigram, 2 BPE, 3 word, 4 character.
inline std::string trainer_specification(int kind, bool byte_fallback = false) {
  return bytes_field(
      2, varint_field(3, static_cast<uint64_t>(kind)) + varint_field(35, byte_fallback ? 1 : 0));
}

// The units of a trie of which none is found: each holds a place of a text, 0, instead of a label.
inline std::array<uint32_t, 256> no_rules() {
  std::array<uint32_t, 256> units{};
  units.fill(1U << 31);
  return units;
}

// The units of a trie with one rule: U+FB01 (the ligature of f and i) becomes the text at 0.
inline std::array<uint32_t, 256> one_rule() {
  std::array<uint32_t, 256> units = no_rules();
  const auto lead = [&](uint32_t at, uint32_t base) { return (at ^ base) << 10; };
  units[0] = lead(0, 1);
  units[1 ^ 0xef] = 0xef | lead(1 ^ 0xef, 2);
  units[2 ^ 0xac] = 0xac | lead(2 ^ 0xac, 3);
  units[3 ^ 0x81] = 0x81 | (1U << 8) | lead(3 ^ 0x81, 4);
  return units;
}

inline std::string table_of_rules(const std::array<uint32_t, 256>& units,
                                  std::string_view texts = std::string_view("fi", 3)) {
  constexpr uint32_t kTrieBytes = 256 * sizeof(uint32_t);
  std::string table(sizeof(kTrieBytes) + kTrieBytes, '\0');
  std::memcpy(table.data(), &kTrieBytes, sizeof(kTrieBytes));
  std::memcpy(table.data() + sizeof(kTrieBytes), units.data(), kTrieBytes);
  return table.append(texts);
}

inline std::string normalizer_specification(std::string_view table) {
  return bytes_field(3, bytes_field(2, table));
}

}  // namespace troupe::testing
