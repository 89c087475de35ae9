#include "options/toml_file.h"

#include <algorithm>
#include <cstdint>
#include <fmt/format.h>
#include <string_view>

#include "base/error.h"
#include "base/text.h"
#include "io/file.h"

namespace troupe {
namespace {

constexpr uint64_t kMaxFileBytes = uint64_t{1} << 20;

// Refuses a text whose tables, arrays or dotted names stand in each other to any depth, which the
// library follows by recursion. Options need a list at most.
class DepthCheck {
 public:
  DepthCheck(std::string_view text, const std::string& path) : text_(text), path_(path) {}

  void run() {
    while (at_ < text_.size()) {
      const char c = text_[at_];
      if (c == '"' || c == '\'') {
        skip_string(c);
      } else if (c == '#') {
        at_ = std::min(text_.find('\n', at_), text_.size());
      } else {
        look_at(c);
        ++at_;
      }
    }
  }

 private:
  static constexpr int kDeepest = 32;

  void look_at(char c) {
    if (c == '\n') ++line_;
    if (c == '[' || c == '{') count(depth_);
    if ((c == ']' || c == '}') && depth_ > 0) --depth_;
    if (c == '.') count(dots_);
    if (c == '\n' || c == '=' || c == ',') dots_ = 0;
  }

  void count(int& number) const {
    if (++number <= kDeepest) return;
    throw_bad_request(
        fmt::format("{}:{}: tables, lists or names with dots stand in each other more "
                    "than {} deep; options need none but lists.",
                    path_, line_, kDeepest));
  }

  void skip_string(char quote) {
    const std::string three(3, quote);
    const bool is_long = text_.substr(at_).starts_with(three);
    const std::string_view end = is_long ? std::string_view(three) : std::string_view(&quote, 1);
    at_ += end.size();
    while (at_ < text_.size() && !text_.substr(at_).starts_with(end)) {
      // An unfinished string is a mistake that the library names.
      if (text_[at_] == '\n' && !is_long) return;
      if (text_[at_] == '\n') ++line_;
      at_ += quote == '"' && text_[at_] == '\\' ? 2 : 1;
    }
    at_ = std::min(at_ + end.size(), text_.size());
  }

  std::string_view text_;
  const std::string& path_;
  size_t at_ = 0;
  int line_ = 1;
  int depth_ = 0;
  int dots_ = 0;
};

}  // namespace

toml::table read_toml_file(const std::string& path) {
  return parse_toml(read_file(path, kMaxFileBytes), path);
}

toml::table parse_toml(const std::string& text, const std::string& path) {
  DepthCheck(text, path).run();
  try {
    return toml::parse(text, path);
  } catch (const toml::parse_error& error) {
    throw_bad_request(fmt::format("{}:{}: {}.", path, error.source().begin.line,
                                  printable(error.description(), kLongestComplaint)));
  }
}

}  // namespace troupe
