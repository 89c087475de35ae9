#include "io/json.h"

#include <nlohmann/json.hpp>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/text.h"

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

int64_t integer_field(const nlohmann::json& object, const char* name, int64_t min, int64_t max,
                      const std::string& where) {
  const auto found = object.find(name);
  if (found == object.end()) throw_failed(where + ": the field \"" + name + "\" is missing");
  const bool fits = found->is_number_unsigned() ? std::in_range<int64_t>(found->get<uint64_t>())
                                                : found->is_number_integer();
  if (!fits || found->get<int64_t>() < min || found->get<int64_t>() > max) {
    throw_failed(where + ": the field \"" + name + "\" must be a whole number from " +
                 std::to_string(min) + " to " + std::to_string(max));
  }
  return found->get<int64_t>();
}

std::string reason_of(const std::exception& error) {
  const std::string_view text = error.what();
  const size_t bracket = text.starts_with('[') ? text.find("] ") : std::string_view::npos;
  return printable(bracket == std::string_view::npos ? text : text.substr(bracket + 2));
}

}  // namespace troupe
