// Words for what lower rooms refuse (parallel/refusal.h): each setting by its flag.
//
// Pure functions; any thread.
#pragma once

#include <optional>
#include <string>
#include <utility>

#include "parallel/refusal.h"

namespace troupe {

// The message, with the flag of each setting that it names.
std::string text_of(const Refusal& refusal);

// Throws a UserError (bad request) with that message.
[[noreturn]] void throw_refusal(const Refusal& refusal);

// Throws it where there is a refusal.
void require_accepted(const std::optional<Refusal>& refusal);
template <class T>
T require_accepted(OrRefusal<T> answer) {
  if (answer.refusal() != nullptr) throw_refusal(*answer.refusal());
  return std::move(answer.value());
}

}  // namespace troupe
