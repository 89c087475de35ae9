#include "base/shape.h"

#include "base/error.h"

namespace troupe {

Shape::Shape(std::initializer_list<int64_t> extents)
    : Shape(std::span<const int64_t>(extents.begin(), extents.size())) {}

Shape::Shape(std::span<const int64_t> extents) {
  TROUPE_CHECK(extents.size() <= kMaxRank, "a tensor has at most four dimensions");
  for (const int64_t extent : extents) {
    TROUPE_CHECK(extent >= 0, "negative extent");
    extents_[static_cast<size_t>(rank_++)] = extent;
  }
}

int64_t Shape::elements() const {
  int64_t product = 1;
  for (int i = 0; i < rank_; ++i) product *= extents_[static_cast<size_t>(i)];
  return product;
}

int64_t Shape::row_elements() const {
  int64_t product = 1;
  for (int i = 1; i < rank_; ++i) product *= extents_[static_cast<size_t>(i)];
  return product;
}

std::string Shape::to_string() const {
  std::string text = "[";
  for (int i = 0; i < rank_; ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(extents_[static_cast<size_t>(i)]);
  }
  return text + "]";
}

}  // namespace troupe
