#include "program/row_origin.h"

namespace troupe {

std::string text_of(const RowOrigin& origin) {
  std::string text;
  if (origin.first_row > 0) text += " first_row=" + std::to_string(origin.first_row);
  if (origin.chunks.ranks > 1) {
    text +=
        " chunks=" + std::to_string(origin.chunks.rank) + "/" + std::to_string(origin.chunks.ranks);
  }
  return text;
}

}  // namespace troupe
