// Reading a config.json of Hugging Face field by field.
//
// What is not supported, missing or of the wrong type is collected, so that one message names all
// of it; what contradicts itself is refused at once (UserError, bad request), with what was
// collected. Absent and null fields are the same unless said. Borrows what it is made of; one
// thread.
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
  // A value that was missing or of the wrong type has another one in its place.
  bool any_replaced = false;

  bool empty() const { return sentences.empty() && missing.empty(); }
  std::string text() const {
    std::vector<std::string> all = sentences;
    if (!missing.empty()) {
      all.push_back(fmt::format("the field{} {} {} missing.", missing.size() == 1 ? "" : "s",
                                fmt::join(missing, ", "), missing.size() == 1 ? "is" : "are"));
    }
    for (size_t i = 1; i < all.size(); ++i) {
      if (all[i].starts_with("the ")) all[i].front() = 'T';
    }
    return fmt::format("{}", fmt::join(all, " "));
  }
};

class HfFields {
 public:
  HfFields(const nlohmann::json& object, const std::string& where, HfProblems& problems)
      : object_(object), where_(where), problems_(problems) {}

  // Where values were replaced the problem is left out: it may be theirs.
  [[noreturn]] void refuse(const std::string& problem) const {
    if (!problems_.any_replaced) problems_.sentences.push_back(problem);
    refuse_collected();
  }
  // Goes on, as if the field were not there.
  void add_unsupported(std::string problem) const {
    problems_.sentences.push_back(std::move(problem));
  }
  // As refuse(), and goes on.
  void add_contradiction(std::string problem) const {
    if (!problems_.any_replaced) add_unsupported(std::move(problem));
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
  int32_t required_integer(std::initializer_list<const char*> names) const {
    const nlohmann::json* value = find(names);
    if (value != nullptr) return to_integer(*value, *names.begin());
    add_missing(*names.begin());
    return kReplacement;
  }
  double number(const char* name, double otherwise) const {
    const nlohmann::json* value = find(name);
    if (value == nullptr) return otherwise;
    if (value->is_number()) return value->get<double>();
    add_malformed(name, "a number");
    return otherwise;
  }
  double required_number(const char* name) const {
    if (find(name) == nullptr) add_missing(name);
    return number(name, kReplacement);
  }
  bool boolean(const char* name, bool otherwise) const {
    const nlohmann::json* value = find(name);
    if (value == nullptr) return otherwise;
    if (value->is_boolean()) return value->get<bool>();
    add_malformed(name, "true or false");
    return otherwise;
  }
  std::string text(const char* name, const std::string& otherwise) const {
    const nlohmann::json* value = find(name);
    if (value == nullptr) return otherwise;
    if (value->is_string()) return value->get<std::string>();
    add_malformed(name, "a string");
    return otherwise;
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
    if (value.is_number_integer() && value.get<double>() <= 2147483647.0 &&
        value.get<double>() >= -2147483648.0) {
      return value.get<int32_t>();
    }
    add_malformed(name, "an integer of at most 2147483647");
    return kReplacement;
  }

 private:
  static constexpr int32_t kReplacement = 2;  // no size is refused for being 2

  // Fields are read more than once.
  void add_once(std::vector<std::string>& list, std::string text) const {
    problems_.any_replaced = true;
    if (std::find(list.begin(), list.end(), text) == list.end()) list.push_back(std::move(text));
  }
  void add_missing(const char* name) const {
    add_once(problems_.missing, fmt::format("\"{}\"", name));
  }
  void add_malformed(const char* name, const char* wanted) const {
    add_once(problems_.sentences, fmt::format("the field \"{}\" must be {}.", name, wanted));
  }

  const nlohmann::json& object_;
  const std::string& where_;
  HfProblems& problems_;
};

}  // namespace troupe
