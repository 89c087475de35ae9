// Regular expressions of tokenizer files: what is rewritten for PCRE2, and what is refused.
#include "data/text_pattern.h"

#include <algorithm>
#include <gtest/gtest.h>
#include <string>

#include "support/errors.h"

namespace troupe::testing {
namespace {

// The matches in the text, each in brackets.
std::string matches(std::string_view expression, std::string_view text) {
  const TextPattern pattern = TextPattern::regex(expression, "file");
  PatternScratch scratch;
  std::string found;
  TextMatch match;
  for (size_t from = 0; from < text.size() && pattern.find(text, from, scratch, match);) {
    found += "[" + std::string(text.substr(match.begin, match.end - match.begin)) + "]";
    from = std::max(match.end, from + 1);
  }
  return found;
}

TEST(TextPattern, MeansWhatTokenizersMean) {
  struct Case {
    const char* expression;
    const char* text;
    const char* found;
  };
  const Case cases[] = {
      {R"(\s+)", "a \t\nb", "[ \t\n]"},
      {R"(\s)", "a\u00a0b\u2003c", "[\u00a0][\u2003]"},
      {R"(\S+)", "ab\u3000c", "[ab][c]"},
      {R"([^\s\d]+)", "ab 12 c", "[ab][c]"},
      {R"(\u0061\u00e9+)", "aéé a", "[aéé]"},
      {R"([\u0062-\u0064]+)", "abcde", "[bcd]"},
      {R"(\p{L}+)", "añ1b", "[añ][b]"},
      {R"(\P{L}+)", "a12b", "[12]"},
      {R"(\pN)", "a1", "[1]"},
      {R"(\x{62}\x63)", "abcd", "[bc]"},
      {R"(\.\d{2,3})", "a.1 .123", "[.123]"},
      {R"((?i:AB)(?=c)|(?<!x)d)", "abc abx xd d", "[ab][d]"},
      {R"([\]\[&]+)", "a[]&b", "[[]&]"},
  };
  for (const Case& each : cases) {
    EXPECT_EQ(matches(each.expression, each.text), each.found) << each.expression;
  }
}

TEST(TextPattern, RefusesWhatOtherEnginesReadInAnotherWay) {
  struct Case {
    const char* expression;
    const char* what;
    int at;
  };
  const Case cases[] = {
      {R"(a\)", "a backslash at its end", 1},
      {R"(\u00e)", "an unfinished \\u", 0},
      {R"(ab\p{L)", "an unfinished escape", 2},
      {R"(a\w)", "\\w", 1},
      {R"([\S])", "\\S", 1},
      {R"([]a])", "']' as the first character of a class", 1},
      {R"([^]a])", "']' as the first character of a class", 2},
      {R"([a&&b])", "an intersection (&&)", 2},
      {R"([a[b]])", "a class inside a class", 2},
      {R"((?<name>a))", "a special group", 0},
      {R"(a{2)", "an unfinished quantifier", 1},
      {R"(a{2}+)", "a plus after {}", 1},
  };
  for (const Case& each : cases) {
    EXPECT_EQ(
        message_of(ExitStatus::bad_request, [&] { TextPattern::regex(each.expression, "file"); }),
        "file: the regular expression " + std::string(each.expression) + " has " + each.what +
            " at byte " + std::to_string(each.at) + ", which is not supported");
  }
}

}  // namespace
}  // namespace troupe::testing
