#include "base/text.h"

namespace troupe {

std::string printable(std::string_view text, size_t longest) {
  std::string result;
  for (const char c : text.substr(0, longest)) {
    const auto byte = static_cast<unsigned char>(c);
    result += byte < 0x20 || byte == 0x7f ? '?' : c;
  }
  return result + (text.size() > longest ? "..." : "");
}

std::string quote_name(std::string_view name) {
  return '"' + printable(name) + '"';
}

}  // namespace troupe
