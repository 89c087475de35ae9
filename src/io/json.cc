#include "io/json.h"

#include <nlohmann/json.hpp>
#include <unordered_set>
#include <vector>

#include "base/error.h"

namespace troupe {
namespace {

// Looks through a document without building it. The library's own parser can filter while it
// builds, but then takes time that grows with the square of the length of an array of objects.
class Inspector final : public nlohmann::json_sax<nlohmann::json> {
 public:
  Inspector(const std::string& path, int max_depth) : path_(path), max_depth_(max_depth) {}

  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t) override { return true; }
  bool number_unsigned(number_unsigned_t) override { return true; }
  bool number_float(number_float_t, const string_t&) override { return true; }
  bool string(string_t&) override { return true; }
  bool binary(binary_t&) override { return true; }

  bool start_object(size_t) override {
    names_.emplace_back();
    return enter();
  }
  bool end_object() override {
    names_.pop_back();
    return leave();
  }
  bool start_array(size_t) override { return enter(); }
  bool end_array() override { return leave(); }

  bool key(string_t& name) override {
    if (!names_.back().insert(name).second) {
      throw_failed(path_ + ": " + quote_name(name) + " is given twice in one JSON object");
    }
    return true;
  }

  bool parse_error(size_t position, const std::string&,
                   const nlohmann::detail::exception&) override {
    throw_failed(path_ + ": is not valid JSON at byte " + std::to_string(position));
  }

 private:
  bool enter() {
    if (++depth_ > max_depth_) {
      throw_failed(path_ + ": JSON is nested deeper than " + std::to_string(max_depth_) +
                   " levels");
    }
    return true;
  }
  bool leave() {
    --depth_;
    return true;
  }

  const std::string& path_;
  int max_depth_;
  int depth_ = 0;
  std::vector<std::unordered_set<std::string>> names_;  // of each object that is open
};

}  // namespace

nlohmann::json parse_json(std::string_view text, const std::string& path, int max_depth) {
  Inspector inspector(path, max_depth);
  nlohmann::json::sax_parse(text.begin(), text.end(), &inspector);
  return nlohmann::json::parse(text.begin(), text.end());
}

std::string quote_name(std::string_view name) {
  constexpr size_t kLongest = 160;
  std::string text = "\"";
  for (const char c : name.substr(0, kLongest)) {
    const auto byte = static_cast<unsigned char>(c);
    text += byte < 0x20 || byte == 0x7f ? '?' : c;
  }
  return text + (name.size() > kLongest ? "...\"" : "\"");
}

}  // namespace troupe
