// A vector that is indexed by ids: by what has a member `index` (ValueId, StateId), or by whole
// numbers that are never negative (operations of a program). So a table by value is not read with
// an operation, and no index needs a cast.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>
#include <vector>

namespace troupe {

template <class Id, class T>
class IdVector {
 public:
  IdVector() = default;
  explicit IdVector(int32_t size, const T& value = T())
      : elements_(static_cast<size_t>(size), value) {}

  // `id` must be valid and below size().
  decltype(auto) operator[](Id id) { return elements_[position_of(id)]; }
  decltype(auto) operator[](Id id) const { return elements_[position_of(id)]; }

  int32_t size() const { return static_cast<int32_t>(elements_.size()); }
  bool empty() const { return elements_.empty(); }
  // Is there an element of this id?
  bool has(Id id) const { return position_of(id) < elements_.size(); }
  void resize(int32_t size, const T& value = T()) {
    elements_.resize(static_cast<size_t>(size), value);
  }

  auto begin() { return elements_.begin(); }
  auto end() { return elements_.end(); }
  auto begin() const { return elements_.begin(); }
  auto end() const { return elements_.end(); }

 private:
  static size_t position_of(Id id) {
    if constexpr (std::is_integral_v<Id>) {
      return static_cast<size_t>(id);
    } else {
      return static_cast<size_t>(id.index);
    }
  }

  std::vector<T> elements_;
};

// By the index of an operation in its program.
template <class T>
using OpVector = IdVector<int32_t, T>;

}  // namespace troupe
