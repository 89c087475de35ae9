#include "base/text.h"

#include <algorithm>

namespace troupe {

std::string without_controls(std::string_view text) {
  std::string result;
  int left = 0;  // bytes of a character of UTF-8 that are still to come
  for (size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    const std::string_view two = text.substr(i, 2);
    const std::string_view three = text.substr(i, 3);
    const bool is_lone = left == 0 && byte >= 0x80 && byte < 0xa0;  // a control of 8 bits
    const bool is_one = is_lone || byte == 0x7f || (byte < 0x20 && byte != '\n');
    const bool is_two = two >= "\xc2\x80" && two <= "\xc2\x9f";
    const bool turns = (three >= "\xe2\x80\xaa" && three <= "\xe2\x80\xae") ||
                       (three >= "\xe2\x81\xa6" && three <= "\xe2\x81\xa9");
    result += is_one || is_two || turns ? '?' : text[i];
    i += is_two ? 1 : turns ? 2 : 0;
    const int begun = byte < 0xc2 ? std::max(left - 1, 0) : 1 + (byte >= 0xe0) + (byte >= 0xf0);
    left = is_two || turns || byte < 0x80 ? 0 : begun;
  }
  return result;
}

std::string printable(std::string_view text, size_t longest) {
  std::string result = without_controls(text.substr(0, longest));
  std::replace(result.begin(), result.end(), '\n', '?');
  return result + (text.size() > longest ? "..." : "");
}

}  // namespace troupe
