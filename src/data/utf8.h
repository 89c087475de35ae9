// Bytes as Unicode text: what happens to a document before a tokenizer that knows characters sees
// it.
//
// Functions of their arguments alone, from any thread. Each returns `text` itself when there is
// nothing to change, and otherwise a view of `storage`, which it overwrites; `text` must not lie in
// `storage`.
#pragma once

#include <string>
#include <string_view>

namespace troupe {

// Valid UTF-8: each maximal ill-formed subsequence becomes U+FFFD, as the Unicode standard (section
// 3.9, "U+FFFD Substitution of Maximal Subparts") and Python's decode(errors="replace") do it.
std::string_view replace_invalid_utf8(std::string_view text, std::string& storage);

// Normalization form C. `text` is valid UTF-8.
std::string_view normalize_nfc(std::string_view text, std::string& storage);

// A code point as UTF-8, appended to `text`.
void append_utf8(char32_t code_point, std::string& text);

// The code point that begins at `at` of valid UTF-8; moves `at` past it.
char32_t next_code_point(std::string_view text, size_t& at);

// Unicode's White_Space property.
bool is_white_space(char32_t code_point);

}  // namespace troupe
