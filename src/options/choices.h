// Options whose texts stand for values, mostly enumerators: the names of the values, and what binds
// them to a member of Options.
//
// Constants and pure functions; any thread.
#pragma once

#include <array>
#include <cstddef>
#include <iterator>
#include <optional>
#include <span>
#include <string_view>
#include <type_traits>
#include <vector>

#include "base/error.h"

namespace troupe {

struct Options;

template <class T>
struct Choice {
  std::string_view name;  // as a person types it
  T value;
};

// The name of a value, which is one of the choices.
template <class T, size_t N>
constexpr std::string_view name_among(const Choice<T> (&choices)[N], const T& value) {
  for (const Choice<T>& choice : choices) {
    if (choice.value == value) return choice.name;
  }
  TROUPE_CHECK(false, "a value among the choices");
}

template <class T, size_t N>
constexpr std::optional<T> value_among(const Choice<T> (&choices)[N], std::string_view name) {
  for (const Choice<T>& choice : choices) {
    if (choice.name == name) return choice.value;
  }
  return std::nullopt;
}

// A member of Options that holds one of several values, none or one (std::optional), or a list of
// them (std::vector). Two that are bound to the same member and the same choices are equal.
struct ChoiceMember {
  std::span<const std::string_view> names;
  bool is_list = false;
  // The names of what it holds. Empty: unset.
  std::vector<std::string_view> (*chosen)(const Options&) = nullptr;
  // `name` is one of `names`. Adds to a list, replaces anything else.
  void (*choose)(Options&, std::string_view name) = nullptr;
  // Unsets; a member that always holds a value keeps it.
  void (*clear)(Options&) = nullptr;

  bool operator==(const ChoiceMember& other) const { return chosen == other.chosen; }
};

// The choices' names alone.
template <const auto& kChoices>
inline constexpr auto kNamesOf = [] {
  std::array<std::string_view, std::size(kChoices)> names;
  for (size_t i = 0; i < names.size(); ++i) names[i] = kChoices[i].name;
  return names;
}();

// What binds Options::*kMember, a T, std::optional<T> or std::vector<T>, to an array of Choice<T>.
template <auto kMember, const auto& kChoices>
class BoundChoice {
  using Value = std::remove_cvref_t<decltype(kChoices[0].value)>;
  using Held = std::remove_cvref_t<decltype(std::declval<Options>().*kMember)>;
  static constexpr bool kIsList = std::is_same_v<Held, std::vector<Value>>;
  static constexpr bool kIsOptional = std::is_same_v<Held, std::optional<Value>>;

  static std::vector<std::string_view> chosen(const Options& options) {
    const Held& held = options.*kMember;
    std::vector<std::string_view> names;
    if constexpr (kIsList) {
      for (const Value& value : held) names.push_back(name_among(kChoices, value));
    } else if constexpr (kIsOptional) {
      if (held) names.push_back(name_among(kChoices, *held));
    } else {
      names.push_back(name_among(kChoices, held));
    }
    return names;
  }

  static void choose(Options& options, std::string_view name) {
    const Value value = *value_among(kChoices, name);
    if constexpr (kIsList) {
      (options.*kMember).push_back(value);
    } else {
      options.*kMember = value;
    }
  }

  static void clear(Options& options) {
    if constexpr (kIsList || kIsOptional) options.*kMember = Held{};
  }

 public:
  static constexpr ChoiceMember kBound = {.names = kNamesOf<kChoices>,
                                          .is_list = kIsList,
                                          .chosen = chosen,
                                          .choose = choose,
                                          .clear = clear};
};

template <auto kMember, const auto& kChoices>
inline constexpr ChoiceMember kChoiceMember = BoundChoice<kMember, kChoices>::kBound;

}  // namespace troupe
