// Plain values as bytes, to be sent to a process of the same build on a machine of the same kind.
// Pure functions; any thread.
#pragma once

#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "base/dtype.h"
#include "base/error.h"
#include "base/shape.h"

namespace troupe {

template <class T>
void append_bytes(std::string& bytes, const T& value) {
  static_assert(std::is_trivially_copyable_v<T>);
  bytes.append(reinterpret_cast<const char*>(&value), sizeof(T));
}

inline void append_bytes(std::string& bytes, std::string_view text) {
  append_bytes(bytes, text.size());
  bytes += text;
}

template <class T>
void append_bytes(std::string& bytes, const std::vector<T>& values) {
  append_bytes(bytes, values.size());
  for (const T& value : values) append_bytes(bytes, value);
}

// The inverse, which takes the values off the front in their order. Bytes that are too few are a
// UserError: they come from another process. What values mean is the caller's to check.
class ByteReader {
 public:
  explicit ByteReader(std::string_view bytes) : bytes_(bytes) {}

  bool at_end() const { return bytes_.empty(); }

  // Of a type in which every pattern of bits is a value.
  template <class T>
  T take() {
    static_assert(std::is_trivially_copyable_v<T>);
    T value;
    std::memcpy(&value, take_bytes(sizeof(T)).data(), sizeof(T));
    return value;
  }
  // Of a tensor.
  DType take_dtype() {
    const auto dtype = take<DType>();
    if (size_of(dtype) == 0) refuse();
    return dtype;
  }
  Shape take_shape() {
    constexpr int64_t kMostElements = int64_t{1} << 60;
    const auto shape = take<Shape>();
    if (shape.rank() < 0 || shape.rank() > Shape::kMaxRank) refuse();
    int64_t left = kMostElements;
    for (int i = 0; i < shape.rank(); ++i) {
      if (shape[i] < 0 || shape[i] > left) refuse();
      if (shape[i] > 0) left /= shape[i];
    }
    return shape;
  }
  std::string_view take_text() { return take_bytes(take<size_t>()); }
  // The number of things that follow, each of at least this many bytes.
  size_t take_count(size_t bytes_each) {
    const auto count = take<size_t>();
    if (count > bytes_.size() / bytes_each) refuse();
    return count;
  }
  template <class T>
  std::vector<T> take_values() {
    std::vector<T> values(take_count(sizeof(T)));
    for (T& value : values) value = take<T>();
    return values;
  }

 private:
  std::string_view take_bytes(size_t count) {
    if (bytes_.size() < count) refuse();
    const std::string_view taken = bytes_.substr(0, count);
    bytes_.remove_prefix(count);
    return taken;
  }

  [[noreturn]] static void refuse() {
    throw_failed("What another rank sends is cut short, or comes from another build of Troupe.");
  }

  std::string_view bytes_;
};

}  // namespace troupe
