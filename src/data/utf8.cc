#include "data/utf8.h"

#include <cstdint>
#include <cstring>
#include <utf8proc.h>
#include <vector>

#include "base/error.h"

namespace troupe {
namespace {

constexpr std::string_view kReplacement = "\xef\xbf\xbd";

uint8_t byte_at(std::string_view text, size_t at) {
  return static_cast<uint8_t>(text[at]);
}

// What begins at `at`: a well-formed sequence, or the longest beginning of one (at least a byte).
struct Sequence {
  size_t size = 1;
  bool valid = false;
};

// Table 3-7 of the Unicode standard: the second byte's range depends on the first byte.
Sequence sequence_at(std::string_view text, size_t at) {
  const uint8_t first = byte_at(text, at);
  if (first < 0x80) return {1, true};
  if (first < 0xc2 || first > 0xf4) return {1, false};
  const size_t length = first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
  uint8_t lowest = 0x80;
  uint8_t highest = 0xbf;
  if (first == 0xe0) lowest = 0xa0;
  if (first == 0xed) highest = 0x9f;
  if (first == 0xf0) lowest = 0x90;
  if (first == 0xf4) highest = 0x8f;
  for (size_t i = 1; i < length; ++i) {
    if (at + i >= text.size()) return {i, false};
    const uint8_t byte = byte_at(text, at + i);
    if (byte < lowest || byte > highest) return {i, false};
    lowest = 0x80;
    highest = 0xbf;
  }
  return {length, true};
}

// The end of the run of ASCII that begins at `at`.
size_t skip_ascii(std::string_view text, size_t at) {
  constexpr uint64_t kHighBits = 0x8080808080808080;
  while (at + sizeof(uint64_t) <= text.size()) {
    uint64_t word = 0;
    std::memcpy(&word, text.data() + at, sizeof(word));
    if ((word & kHighBits) != 0) break;
    at += sizeof(word);
  }
  while (at < text.size() && byte_at(text, at) < 0x80) ++at;
  return at;
}

// The first ill-formed byte at or after `at`, or the end.
size_t skip_valid(std::string_view text, size_t at) {
  for (;;) {
    at = skip_ascii(text, at);
    if (at == text.size()) return at;
    const Sequence sequence = sequence_at(text, at);
    if (!sequence.valid) return at;
    at += sequence.size;
  }
}

// Characters from U+0300 on begin with this byte or a larger one. All smaller characters are in
// form C, have combining class 0 and never compose with what is before them: text may be cut
// before each of them and normalized piece by piece.
constexpr uint8_t kFirstThatMayChange = 0xcc;

bool is_continuation(uint8_t byte) {
  return (byte & 0xc0) == 0x80;
}

// Appends form C of `text` to `out`. `buffer` is kept between calls.
void append_nfc(std::string_view text, std::vector<utf8proc_int32_t>& buffer, std::string& out) {
  const auto options = static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE);
  const auto* bytes = reinterpret_cast<const utf8proc_uint8_t*>(text.data());
  const auto size = static_cast<utf8proc_ssize_t>(text.size());
  // No code point comes from less than a byte, so this is nearly always enough. One place is for
  // the zero that utf8proc_reencode writes after the text.
  if (buffer.size() < text.size() + 1) buffer.resize(text.size() + 1);
  utf8proc_ssize_t count = 0;
  for (;;) {
    const auto room = static_cast<utf8proc_ssize_t>(buffer.size()) - 1;
    count = utf8proc_decompose(bytes, size, buffer.data(), room, options);
    TROUPE_CHECK(count >= 0, utf8proc_errmsg(count));
    if (count <= room) break;
    buffer.resize(static_cast<size_t>(count) + 1);
  }
  const utf8proc_ssize_t written = utf8proc_reencode(buffer.data(), count, options);
  TROUPE_CHECK(written >= 0, utf8proc_errmsg(written));
  out.append(reinterpret_cast<const char*>(buffer.data()), static_cast<size_t>(written));
}

}  // namespace

std::string_view replace_invalid_utf8(std::string_view text, std::string& storage) {
  size_t valid_end = skip_valid(text, 0);
  if (valid_end == text.size()) return text;
  storage.clear();
  storage.reserve(text.size() + text.size() / 8);
  size_t at = 0;
  while (valid_end < text.size()) {
    storage.append(text, at, valid_end - at);
    storage.append(kReplacement);
    at = valid_end + sequence_at(text, valid_end).size;
    valid_end = skip_valid(text, at);
  }
  storage.append(text, at);
  return storage;
}

std::string_view normalize_nfc(std::string_view text, std::string& storage) {
  const auto find_changing = [&](size_t at) {
    while (at < text.size() && byte_at(text, at) < kFirstThatMayChange) ++at;
    return at;
  };
  size_t begin = find_changing(0);
  if (begin == text.size()) return text;
  storage.clear();
  storage.reserve(text.size());
  std::vector<utf8proc_int32_t> buffer;
  size_t done = 0;
  while (begin < text.size()) {
    size_t end = begin;
    while (end < text.size() &&
           (byte_at(text, end) >= kFirstThatMayChange || is_continuation(byte_at(text, end)))) {
      ++end;
    }
    // The character before may compose with the first of the run.
    while (begin > done && is_continuation(byte_at(text, begin - 1))) --begin;
    if (begin > done) --begin;
    storage.append(text, done, begin - done);
    append_nfc(text.substr(begin, end - begin), buffer, storage);
    done = end;
    begin = find_changing(end);
  }
  storage.append(text, done);
  return storage;
}

void append_utf8(char32_t code_point, std::string& text) {
  utf8proc_uint8_t bytes[4];
  const utf8proc_ssize_t size =
      utf8proc_encode_char(static_cast<utf8proc_int32_t>(code_point), bytes);
  text.append(reinterpret_cast<const char*>(bytes), static_cast<size_t>(size));
}

char32_t next_code_point(std::string_view text, size_t& at) {
  utf8proc_int32_t code_point = 0;
  const utf8proc_ssize_t size =
      utf8proc_iterate(reinterpret_cast<const utf8proc_uint8_t*>(text.data()) + at,
                       static_cast<utf8proc_ssize_t>(text.size() - at), &code_point);
  TROUPE_CHECK(size > 0, "text must be valid UTF-8 here");
  at += static_cast<size_t>(size);
  return static_cast<char32_t>(code_point);
}

bool is_white_space(char32_t code_point) {
  switch (code_point) {
    case 0x20:
    case 0x85:
    case 0xa0:
    case 0x1680:
    case 0x2028:
    case 0x2029:
    case 0x202f:
    case 0x205f:
    case 0x3000:
      return true;
    default:
      return (code_point >= 0x09 && code_point <= 0x0d) ||
             (code_point >= 0x2000 && code_point <= 0x200a);
  }
}

}  // namespace troupe
