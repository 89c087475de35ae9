// The message of an expected error.
#pragma once

#include <gtest/gtest.h>
#include <string>

#include "base/error.h"

namespace troupe::testing {

// Runs `body`, which must throw a UserError of this status, and returns its message.
template <class Body>
std::string message_of(ExitStatus status, const Body& body) {
  try {
    body();
  } catch (const UserError& error) {
    EXPECT_EQ(static_cast<int>(error.status()), static_cast<int>(status)) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "no error was thrown";
  return "";
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// Expects that `text` contains `phrase`.
inline void expect_phrase(const std::string& text, const std::string& phrase) {
  EXPECT_TRUE(contains(text, phrase)) << "\"" << phrase << "\" is not in: " << text.substr(0, 1000);
}

}  // namespace troupe::testing
