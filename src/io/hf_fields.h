// Reading a config.json of Hugging Face field by field.
//
// What is not supported, and fields that are missing, are collected, so that one message names all
// of them; what is malformed is refused at once (UserError, bad request), with what was collected.
// Absent and null fields are the same unless said. Borrows what it is made of; one thread.
#pragma once

#include <algorithm>
#include <cstdint>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"

namespace troupe {

// What was collected.
struct HfProblems {
  std::vector<std::string> sentences = {};
  std::vector<std::string> missing = {};  // names, in quotes

  bool empty() const { return sentences.empty() && missing.empty(); }
  std::string text() const {
    std::vector<std::string> all = sentences;
    if (!missing.empty()) {
      all.push_back(fmt::format("{}he field{} {} {} missing.", all.empty() ? "t" : "T",
                                missing.size() == 1 ? "" : "s", fmt::join(missing, ", "),
                                missing.size() == 1 ? "is" : "are"));
    }
    return fmt::format("{}", fmt::join(all, " "));
  }
};

class HfFields {
 public:
  HfFields(const nlohmann::json& object, const std::string& where, HfProblems& problems)
      : object_(object), where_(where), problems_(problems) {}

  // Beside missing fields the problem is left out: it may be that of a value in their place.
  [[noreturn]] void refuse(const std::string& problem) const {
    if (problems_.missing.empty()) problems_.sentences.push_back(problem);
    refuse_collected();
  }
  // Goes on, as if the field were not there.
  void add_unsupported(std::string problem) const {
    problems_.sentences.push_back(std::move(problem));
  }
  [[noreturn]] void refuse_collected() const {
    throw_bad_request(fmt::format("{}: {}", where_, problems_.text()));
  }
  // An object within this one, under the same rules.
  HfFields within(const nlohmann::json& object) const { return {object, where_, problems_}; }

  const nlohmann::json* find(const char* name) const {
    const auto found = object_.find(name);
    return found == object_.end() || found->is_null() ? nullptr : &*found;
  }
  // Is it there, be it as null?
  bool mentions(const char* name) const { return object_.contains(name); }
  // The first of several names of the same thing that is present.
  const nlohmann::json* find(std::initializer_list<const char*> names) const {
    for (const char* name : names) {
      if (const nlohmann::json* value = find(name)) return value;
    }
    return nullptr;
  }

  int32_t integer(std::initializer_list<const char*> names, int32_t otherwise) const {
    const nlohmann::json* value = find(names);
    return value == nullptr ? otherwise : to_integer(*value, *names.begin());
  }
  // 2 in place of what is missing: no number of anything is refused for that.
  int32_t required_integer(std::initializer_list<const char*> names) const {
    const nlohmann::json* value = find(names);
    if (value != nullptr) return to_integer(*value, *names.begin());
    add_missing(*names.begin());
    return 2;
  }
  double number(const char* name, double otherwise) const {
    const nlohmann::json* value = find(name);
    if (value == nullptr) return otherwise;
    if (!value->is_number()) refuse(fmt::format("the field \"{}\" must be a number.", name));
    return value->get<double>();
  }
  double required_number(const char* name) const {
    if (find(name) == nullptr) add_missing(name);
    return number(name, 1);
  }
  bool boolean(const char* name, bool otherwise) const {
    const nlohmann::json* value = find(name);
    if (value == nullptr) return otherwise;
    if (!value->is_boolean()) refuse(fmt::format("the field \"{}\" must be true or false.", name));
    return value->get<bool>();
  }
  std::string text(const char* name, const std::string& otherwise) const {
    const nlohmann::json* value = find(name);
    if (value == nullptr) return otherwise;
    if (!value->is_string()) refuse(fmt::format("the field \"{}\" must be a string.", name));
    return value->get<std::string>();
  }
  // A field that is present must have the value that Troupe computes.
  void expect_false(const char* name) const {
    if (boolean(name, false)) add_unsupported(fmt::format("\"{}\": true is not supported.", name));
  }
  void expect_number(const char* name, double value) const {
    if (number(name, value) == value) return;
    add_unsupported(fmt::format("\"{}\" other than {} is not supported.", name, value));
  }

  int32_t to_integer(const nlohmann::json& value, const char* name) const {
    if (!value.is_number_integer() || value.get<double>() > 2147483647.0 ||
        value.get<double>() < -2147483648.0) {
      refuse(fmt::format("the field \"{}\" must be an integer of at most 2147483647.", name));
    }
    return value.get<int32_t>();
  }

 private:
  void add_missing(const char* name) const {
    std::string quoted = fmt::format("\"{}\"", name);
    std::vector<std::string>& missing = problems_.missing;
    if (std::find(missing.begin(), missing.end(), quoted) == missing.end()) {
      missing.push_back(std::move(quoted));
    }
  }

  const nlohmann::json& object_;
  const std::string& where_;
  HfProblems& problems_;
};

}  // namespace troupe
