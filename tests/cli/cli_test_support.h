// What the tests of the command line share: the message of an expected refusal.
#pragma once

#include <gtest/gtest.h>
#include <string>

#include "base/error.h"

namespace troupe {

// Runs `action`, which must throw a UserError with `status`, and returns its message.
template <class Action>
std::string message_of(ExitStatus status, const Action& action) {
  try {
    action();
  } catch (const UserError& error) {
    EXPECT_EQ(static_cast<int>(error.status()), static_cast<int>(status)) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "nothing was refused";
  return {};
}

}  // namespace troupe
