#include "data/tokenizer.h"

#include <fmt/format.h>

#include "base/error.h"

namespace troupe {
namespace {

class ByteTokenizer final : public Tokenizer {
 public:
  std::string_view name() const override { return "byte"; }
  int32_t vocab_size() const override { return kEod + 1; }
  int32_t eod() const override { return kEod; }

  void encode(std::string_view text, std::vector<int32_t>& ids) const override {
    ids.reserve(ids.size() + text.size());
    for (const char byte : text) ids.push_back(static_cast<unsigned char>(byte));
  }

  std::string decode(std::span<const int32_t> ids) const override {
    std::string text;
    text.reserve(ids.size());
    for (const int32_t id : ids) {
      if (id < 0 || id > kEod) {
        throw_failed(fmt::format("token id {} is not in the byte tokenizer's vocabulary of {}", id,
                                 vocab_size()));
      }
      if (id != kEod) text.push_back(static_cast<char>(id));
    }
    return text;
  }

 private:
  static constexpr int32_t kEod = 256;
};

}  // namespace

std::unique_ptr<Tokenizer> make_tokenizer(std::string_view type, const std::string& path) {
  if (type != "byte") {
    throw_bad_request(fmt::format("unknown tokenizer type '{}'; known types: byte", type));
  }
  if (!path.empty()) {
    throw_bad_request(
        fmt::format("the byte tokenizer takes no file, but '{}' was given; leave it out", path));
  }
  return std::make_unique<ByteTokenizer>();
}

}  // namespace troupe
