#include "data/text_pattern.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <array>
#include <fmt/format.h>
#include <pcre2.h>

#include "base/error.h"

namespace troupe {
namespace {

// Oniguruma's \s. PCRE2's own would also match U+180E.
constexpr std::string_view kWhiteSpace =
    R"(\t-\r \x{85}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000})";

// Memory for backtracking of compiled patterns: allocated as needed up to the maximum, which a run
// of some hundred thousand characters that all belong to one word may need.
constexpr size_t kStackStart = size_t{32} << 10;
constexpr size_t kStackMaximum = size_t{256} << 20;

bool is_alphanumeric(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
}

// Rewrites an expression for PCRE2, refusing what the two engines read differently.
class Translator {
 public:
  Translator(std::string_view expression, const std::string& where)
      : in_(expression), where_(where) {}

  std::string run() {
    while (at_ < in_.size()) {
      const char c = in_[at_];
      if (c == '\\') {
        escape();
      } else if (in_class_) {
        in_class();
      } else if (c == '[') {
        open_class();
      } else if (c == '(' && follows("(?")) {
        group();
      } else if (c == '{') {
        quantifier();
      } else {
        copy(1);
      }
    }
    return std::move(out_);
  }

 private:
  bool follows(std::string_view text) const { return in_.substr(at_).starts_with(text); }

  void copy(size_t count) {
    out_ += in_.substr(at_, count);
    at_ += count;
  }

  [[noreturn]] void refuse(std::string_view what) const {
    throw_bad_request(
        fmt::format("{}: the regular expression {} has {} at byte {}, which is not supported",
                    where_, in_, what, at_));
  }

  void escape() {
    if (at_ + 1 >= in_.size()) refuse("a backslash at its end");
    const char c = in_[at_ + 1];
    if (c == 's') {
      out_ += in_class_ ? std::string(kWhiteSpace) : fmt::format("[{}]", kWhiteSpace);
      at_ += 2;
    } else if (c == 'S' && !in_class_) {
      out_ += fmt::format("[^{}]", kWhiteSpace);
      at_ += 2;
    } else if (c == 'u') {
      if (at_ + 6 > in_.size()) refuse("an unfinished \\u");
      out_ += fmt::format("\\x{{{}}}", in_.substr(at_ + 2, 4));
      at_ += 6;
    } else if (c == 'p' || c == 'P' || c == 'x') {
      const size_t close = in_.substr(at_ + 2).starts_with('{') ? in_.find('}', at_) : at_ + 1;
      if (close == std::string_view::npos) refuse("an unfinished escape");
      copy(close + 1 - at_);
    } else if (is_alphanumeric(c) && std::string_view("dDrntfae").find(c) == std::string::npos) {
      refuse(fmt::format("\\{}", c));
    } else {
      copy(2);
    }
  }

  void open_class() {
    in_class_ = true;
    copy(follows("[^") ? 2 : 1);
    if (follows("]")) refuse("']' as the first character of a class");
  }

  // Oniguruma knows sets inside sets and their intersection.
  void in_class() {
    if (follows("&&")) refuse("an intersection (&&)");
    if (follows("[")) refuse("a class inside a class");
    if (follows("]")) in_class_ = false;
    copy(1);
  }

  void group() {
    constexpr std::array<std::string_view, 7> kGroups = {"(?:",  "(?i:", "(?=", "(?!",
                                                         "(?<=", "(?<!", "(?>"};
    for (const std::string_view group : kGroups) {
      if (follows(group)) return copy(group.size());
    }
    refuse("a special group");
  }

  // After {n,m}, a plus repeats in Ruby and makes possessive in Perl.
  void quantifier() {
    const size_t close = in_.find('}', at_);
    if (close == std::string_view::npos) refuse("an unfinished quantifier");
    if (in_.substr(close + 1).starts_with('+')) refuse("a plus after {}");
    copy(close + 1 - at_);
  }

  std::string_view in_;
  const std::string& where_;
  std::string out_;
  size_t at_ = 0;
  bool in_class_ = false;
};

std::string message_of(int error) {
  std::array<PCRE2_UCHAR, 256> text{};
  pcre2_get_error_message(error, text.data(), text.size());
  return reinterpret_cast<const char*>(text.data());
}

}  // namespace

void PatternScratch::Free::operator()(pcre2_real_match_data_8* data) const {
  pcre2_match_data_free(data);
}
void PatternScratch::Free::operator()(pcre2_real_match_context_8* context) const {
  pcre2_match_context_free(context);
}
void PatternScratch::Free::operator()(pcre2_real_jit_stack_8* stack) const {
  pcre2_jit_stack_free(stack);
}
void TextPattern::Free::operator()(pcre2_real_code_8* code) const {
  pcre2_code_free(code);
}

PatternScratch::PatternScratch()
    : data_(pcre2_match_data_create(1, nullptr)),
      stack_(pcre2_jit_stack_create(kStackStart, kStackMaximum, nullptr)),
      context_(pcre2_match_context_create(nullptr)) {
  if (data_ == nullptr || context_ == nullptr) throw_failed("no memory for regular expressions");
  // Without a stack of ours (no memory, or no compiler in this PCRE2) the machine's serves.
  pcre2_jit_stack_assign(context_.get(), nullptr, stack_.get());
}

TextPattern::TextPattern(std::string_view expression, uint32_t options, const std::string& where)
    : where_(where) {
  int error = 0;
  size_t offset = 0;
  code_.reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(expression.data()), expression.size(),
                            options | PCRE2_UTF, &error, &offset, nullptr));
  if (code_ == nullptr) {
    throw_bad_request(fmt::format("{}: the regular expression {} is wrong at byte {}: {}", where,
                                  expression, offset, message_of(error)));
  }
  // Where PCRE2 has no compiler for the machine, it interprets: slower, the same matches.
  pcre2_jit_compile(code_.get(), PCRE2_JIT_COMPLETE);
}

TextPattern TextPattern::regex(std::string_view expression, const std::string& where) {
  // In Ruby ^ and $ are the ends of lines.
  return {Translator(expression, where).run(), PCRE2_UCP | PCRE2_MULTILINE, where};
}

TextPattern TextPattern::literal(std::string_view text, const std::string& where) {
  return {text, PCRE2_LITERAL, where};
}

bool TextPattern::find(std::string_view text, size_t from, PatternScratch& scratch,
                       TextMatch& match) const {
  const int result =
      pcre2_match(code_.get(), reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), from,
                  PCRE2_NO_UTF_CHECK, scratch.data_.get(), scratch.context_.get());
  if (result == PCRE2_ERROR_NOMATCH) return false;
  if (result < 0) {
    throw_failed(
        fmt::format("{}: matching gave up in a text of {} bytes, {} bytes from its "
                    "start: {}",
                    where_, text.size(), from, message_of(result)));
  }
  const size_t* range = pcre2_get_ovector_pointer(scratch.data_.get());
  match = {range[0], range[1]};
  return true;
}

}  // namespace troupe
