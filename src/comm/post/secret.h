// Secrets that the ranks of a run share, by which they know each other (handshake.h), and where
// they come from.
//
// Any thread. Errors are UserErrors (bad_request) that say what to do.
#pragma once

#include <string>

namespace troupe {

// Of a file of the user's: its bytes without white space at the ends, 16 to 4,096 of them. Refused
// if others than its owner may read it.
std::string read_secret_file(const std::string& path);

// Refuses a secret that is shorter or longer. `source` names where it is from.
std::string checked_secret(const std::string& secret, const std::string& source);

// The secret of all runs of this user on this machine: random, in a folder of /tmp that no other
// user can read, and made by the process that needs it first.
std::string machine_secret();

}  // namespace troupe
