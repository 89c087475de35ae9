// Reading a config.json of Hugging Face field by field.
//
// What is malformed is refused at once (UserError, bad request). What is well-formed and not
// supported is collected, so that one message names all of it. Absent and null fields are the same
// unless said. Borrows what it is made of; one thread.
#pragma once

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

class HfFields {
 public:
  HfFields(const nlohmann::json& object, const std::string& where,
           std::vector<std::string>& unsupported)
      : object_(object), where_(where), unsupported_(unsupported) {}

  [[noreturn]] void refuse(const std::string& problem) const {
    throw_bad_request(fmt::format("{}: {}", where_, problem));
  }
  // Goes on, as if the field were not there.
  void add_unsupported(std::string problem) const { unsupported_.push_back(std::move(problem)); }
  void refuse_unsupported() const {
    if (!unsupported_.empty()) refuse(fmt::format("{}", fmt::join(unsupported_, " ")));
  }
  // An object within this one, under the same rules.
  HfFields within(const nlohmann::json& object) const { return {object, where_, unsupported_}; }

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
    if (value == nullptr) refuse(fmt::format("the field \"{}\" is missing.", *names.begin()));
    return to_integer(*value, *names.begin());
  }
  double number(const char* name, double otherwise) const {
    const nlohmann::json* value = find(name);
    if (value == nullptr) return otherwise;
    if (!value->is_number()) refuse(fmt::format("the field \"{}\" must be a number.", name));
    return value->get<double>();
  }
  double required_number(const char* name) const {
    if (find(name) == nullptr) refuse(fmt::format("the field \"{}\" is missing.", name));
    return number(name, 0);
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
  const nlohmann::json& object_;
  const std::string& where_;
  std::vector<std::string>& unsupported_;
};

}  // namespace troupe
