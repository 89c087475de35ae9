// What the JSON library says of a text, fit for a message. Any thread.
#pragma once

#include <algorithm>
#include <string>

namespace troupe {

// The library quotes what it read last, which may be the whole line and hold a DEL.
inline std::string readable(std::string message) {
  constexpr size_t kLongest = 300;
  if (message.size() > kLongest) message.replace(kLongest, std::string::npos, "...");
  std::replace(message.begin(), message.end(), '\x7f', '?');
  return message;
}

}  // namespace troupe
