#include "data/utf8.h"

#include <gtest/gtest.h>

namespace troupe {
namespace {

std::string valid(const std::string& text) {
  std::string storage;
  return std::string(replace_invalid_utf8(text, storage));
}

std::string nfc(const std::string& text) {
  std::string storage;
  return std::string(normalize_nfc(text, storage));
}

// Expected values are those of Python's bytes.decode("utf-8", "replace").
TEST(ReplaceInvalidUtf8, AsPythonDoes) {
  const std::string r = "\xef\xbf\xbd";
  struct Case {
    std::string in;
    std::string out;
  };
  const std::vector<Case> cases = {
      {"plain and \xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80",
       "plain and \xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80"},
      {"\x80", r},
      {"a\xff\xfe z", "a" + r + r + " z"},
      {"\xc0\xaf", r + r},                  // overlong
      {"\xe0\x80\x80", r + r + r},          // overlong
      {"\xed\xa0\x80", r + r + r},          // a surrogate
      {"\xf4\x90\x80\x80", r + r + r + r},  // above U+10FFFF
      {"\xe2\x82", r},                      // cut by the end
      {"\xe2\x82 a", r + " a"},             // cut by another character
      {"\xf0\x9f\x98 \xf0\x9f\x98\xe2\x82\xac", r + " " + r + "\xe2\x82\xac"},
      {"\xc3(", r + "("},
      {"12345678\xe2\x82", "12345678" + r},  // after a word of ASCII
      {std::string("a\0b", 3), std::string("a\0b", 3)},
      {"", ""},
  };
  for (const Case& c : cases) {
    EXPECT_EQ(valid(c.in), c.out);
    EXPECT_EQ(valid("eight bytes" + c.in + "and more"), "eight bytes" + c.out + "and more");
  }
}

TEST(ReplaceInvalidUtf8, ValidTextIsNotCopied) {
  const std::string text = "caf\xc3\xa9";
  std::string storage;
  EXPECT_EQ(replace_invalid_utf8(text, storage).data(), text.data());
}

// Expected values are those of Python's unicodedata.normalize("NFC", text).
TEST(NormalizeNfc, ComposesAndReorders) {
  struct Case {
    const char* in;
    const char* out;
  };
  const std::vector<Case> cases = {
      {"plain \u00e9 \u00f1", "plain \u00e9 \u00f1"},
      {"e\u0301", "\u00e9"},
      {"xe\u0301y e\u0301", "x\u00e9y \u00e9"},
      {"\u00e9\u0323", "\u1eb9\u0301"},  // the dot below comes first and composes
      {"\u0301e", "\u0301e"},            // a mark with nothing before it
      {"\u212b\u2126", "\u00c5\u03a9"},  // characters that stand for others
      {"\u1112\u1161\u11ab", "\ud55c"},  // Hangul
      {"\u0958", "\u0915\u093c"},        // excluded from composition
      {"\u0344", "\u0308\u0301"},        // becomes longer
      {"s\u0323\u0307s\u0307\u0323", "\u1e69\u1e69"},
  };
  for (const Case& c : cases) EXPECT_EQ(nfc(c.in), c.out);
}

// Of a text within another one, whose next character would compose.
TEST(NormalizeNfc, EndsWithTheText) {
  const std::string text = "xe\u0301\u0323";
  std::string storage;
  EXPECT_EQ(normalize_nfc(std::string_view(text).substr(0, 4), storage), "x\u00e9");
}

TEST(IsWhiteSpace, IsUnicodesProperty) {
  for (const char32_t c : {U'\t', U'\r', U' ', U'\u0085', U'\u00a0', U'\u2003', U'\u3000'}) {
    EXPECT_TRUE(is_white_space(c)) << static_cast<uint32_t>(c);
  }
  for (const char32_t c : {U'a', U'\u180e', U'\u200b', U'\ufeff', U'\u001c'}) {
    EXPECT_FALSE(is_white_space(c)) << static_cast<uint32_t>(c);
  }
}

}  // namespace
}  // namespace troupe
