// Regular expressions of tokenizer files, over PCRE2.
//
// The files are written for Oniguruma (Ruby syntax). Both engines read the published patterns
// alike; where the same text would mean different things to them, it is translated (\s, \u) or
// refused, so a pattern that is accepted finds here what it finds there. A pattern is immutable and
// serves any number of threads; each thread brings a PatternScratch of its own.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

struct pcre2_real_code_8;
struct pcre2_real_match_data_8;
struct pcre2_real_match_context_8;
struct pcre2_real_jit_stack_8;

namespace troupe {

class PatternScratch {
 public:
  PatternScratch();

 private:
  friend class TextPattern;
  struct Free {
    void operator()(pcre2_real_match_data_8* data) const;
    void operator()(pcre2_real_match_context_8* context) const;
    void operator()(pcre2_real_jit_stack_8* stack) const;
  };
  std::unique_ptr<pcre2_real_match_data_8, Free> data_;
  std::unique_ptr<pcre2_real_jit_stack_8, Free> stack_;
  std::unique_ptr<pcre2_real_match_context_8, Free> context_;
};

struct TextMatch {
  size_t begin = 0;
  size_t end = 0;
};

class TextPattern {
 public:
  // A bad request when the expression is wrong or not supported; the message begins with `where`.
  static TextPattern regex(std::string_view expression, const std::string& where);
  // Matches `text` itself.
  static TextPattern literal(std::string_view text, const std::string& where);

  // The leftmost match that begins at or after `from`, in valid UTF-8; false when there is none.
  // Throws (`failed`) when the expression needs more memory or steps than PCRE2 allows.
  bool find(std::string_view text, size_t from, PatternScratch& scratch, TextMatch& match) const;

 private:
  struct Free {
    void operator()(pcre2_real_code_8* code) const;
  };
  TextPattern(std::string_view expression, uint32_t options, const std::string& where);

  std::string where_;
  std::unique_ptr<pcre2_real_code_8, Free> code_;
};

}  // namespace troupe
