#include "base/text.h"

namespace troupe {

std::string printable(std::string_view text, size_t longest) {
  std::string result;
  const std::string_view shown = text.substr(0, longest);
  for (size_t i = 0; i < shown.size(); ++i) {
    const auto byte = static_cast<unsigned char>(shown[i]);
    // Characters above ASCII that control terminals, or turn the direction of writing.
    const std::string_view two = shown.substr(i, 2);
    const std::string_view three = shown.substr(i, 3);
    const bool controls = two >= "\xc2\x80" && two <= "\xc2\x9f";
    const bool turns = (three >= "\xe2\x80\xaa" && three <= "\xe2\x80\xae") ||
                       (three >= "\xe2\x81\xa6" && three <= "\xe2\x81\xa9");
    result += byte < 0x20 || byte == 0x7f || controls || turns ? '?' : shown[i];
    i += controls ? 1 : turns ? 2 : 0;
  }
  return result + (text.size() > longest ? "..." : "");
}

std::string quote_name(std::string_view name) {
  return '"' + printable(name) + '"';
}

}  // namespace troupe
