#include "options/layer_pattern.h"

#include <charconv>
#include <fmt/format.h>
#include <string_view>

#include "base/error.h"
#include "base/text.h"

namespace troupe {
namespace {

// A recursive reader of a list:
//   sum = product { "+" product };  product = list [ "*" N ];  list = "(" sum ")" | "[" 0|1 ... "]"
class LayerPattern {
 public:
  LayerPattern(std::string_view flag, const std::string& text) : flag_(flag), text_(text) {}

  std::vector<bool> read(int32_t layers, bool (*has)(int64_t layer, int64_t every)) {
    std::vector<bool> pattern;
    if (text_.find('[') == std::string::npos) {
      const int64_t every = number();
      if (every < 1) refuse("a number is at least 1");
      for (int32_t layer = 0; layer < layers; ++layer) pattern.push_back(has(layer, every));
    } else {
      pattern = sum(0);
    }
    if (peek() != '\0') refuse(fmt::format("unexpected '{}'", peek()));
    if (pattern.size() != static_cast<size_t>(layers)) {
      refuse(fmt::format("it describes {} layers, the model has {}", pattern.size(), layers));
    }
    return pattern;
  }

 private:
  static constexpr size_t kMostLayers = 10000;
  static constexpr int kDeepest = 16;

  [[noreturn]] void refuse(const std::string& problem) const {
    throw_bad_request(
        fmt::format("--{} {}: {}. Write a number, or lists of 0 and 1 such as ([0]*3+[1]*58).",
                    flag_, quote_name(text_), problem));
  }
  char peek() {
    while (at_ < text_.size() && text_[at_] == ' ') ++at_;
    return at_ < text_.size() ? text_[at_] : '\0';
  }
  bool take(char wanted) {
    if (peek() != wanted) return false;
    ++at_;
    return true;
  }
  int64_t number() {
    int64_t value = 0;
    bool any = false;
    for (peek(); at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9'; ++at_) {
      value = value * 10 + (text_[at_] - '0');
      any = true;
      if (value > static_cast<int64_t>(kMostLayers)) refuse("the number is too large");
    }
    if (!any) refuse("a number is missing");
    return value;
  }
  std::vector<bool> sum(int depth) {
    std::vector<bool> all = product(depth);
    while (take('+')) {
      const std::vector<bool> more = product(depth);
      all.insert(all.end(), more.begin(), more.end());
      if (all.size() > kMostLayers) refuse("it describes too many layers");
    }
    return all;
  }
  std::vector<bool> product(int depth) {
    std::vector<bool> once = list(depth);
    if (!take('*')) return once;
    const auto times = static_cast<size_t>(number());
    if (once.size() * times > kMostLayers) refuse("it describes too many layers");
    std::vector<bool> all;
    for (size_t i = 0; i < times; ++i) all.insert(all.end(), once.begin(), once.end());
    return all;
  }
  std::vector<bool> list(int depth) {
    if (depth > kDeepest) refuse("the brackets are nested too deeply");
    if (take('(')) {
      std::vector<bool> items = sum(depth + 1);
      if (!take(')')) refuse("a ')' is missing");
      return items;
    }
    if (!take('[')) refuse("a '[' is missing");
    std::vector<bool> items;
    while (!take(']')) {
      const int64_t item = number();
      if (item > 1) refuse("layers are marked by 0 or 1");
      items.push_back(item == 1);
      if (!take(',') && peek() != ']') refuse("a ']' is missing");
    }
    return items;
  }

  const std::string_view flag_;
  const std::string& text_;
  size_t at_ = 0;
};

}  // namespace

std::vector<bool> parse_moe_layer_freq(const std::string& text, int32_t layers) {
  return LayerPattern("moe-layer-freq", text).read(layers, [](int64_t layer, int64_t every) {
    return layer % every == 0;
  });
}

namespace {

bool is_not_last_of(int64_t layer, int64_t every) {
  return (layer + 1) % every != 0;
}

}  // namespace

std::vector<bool> parse_window_attn_skip_freq(const std::string& text, int32_t layers) {
  return LayerPattern("window-attn-skip-freq", text).read(layers, is_not_last_of);
}

std::vector<bool> parse_linear_attention_freq(const std::string& text, int32_t layers) {
  return LayerPattern("linear-attention-freq", text).read(layers, is_not_last_of);
}

}  // namespace troupe
