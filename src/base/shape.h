// The extents of a tensor: at most four dimensions, row-major, the last one contiguous.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>

namespace troupe {

class Shape {
 public:
  static constexpr int kMaxRank = 4;

  Shape() = default;
  Shape(std::initializer_list<int64_t> extents);
  explicit Shape(std::span<const int64_t> extents);

  int rank() const { return rank_; }
  int64_t operator[](int dimension) const { return extents_[static_cast<size_t>(dimension)]; }
  int64_t back() const { return rank_ == 0 ? 1 : extents_[static_cast<size_t>(rank_ - 1)]; }

  // Product of all extents; 1 for a scalar (rank 0).
  int64_t elements() const;
  // Product of all extents but the first; 1 for rank 0 and 1. The size of one row.
  int64_t row_elements() const;
  // Product of all extents but the last: the number of contiguous vectors of `back()` elements.
  int64_t vectors() const { return back() == 0 ? 0 : elements() / back(); }

  bool operator==(const Shape& other) const = default;
  std::string to_string() const;  // "[96, 48]"

 private:
  std::array<int64_t, kMaxRank> extents_{};
  int rank_ = 0;
};

}  // namespace troupe
