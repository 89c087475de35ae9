// Plain values as bytes, to be sent to a process of the same build on a machine of the same kind.
// Pure functions; any thread.
#pragma once

#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "base/error.h"

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
// broken invariant.
class ByteReader {
 public:
  explicit ByteReader(std::string_view bytes) : bytes_(bytes) {}

  bool at_end() const { return bytes_.empty(); }

  template <class T>
  T take() {
    static_assert(std::is_trivially_copyable_v<T>);
    T value;
    std::memcpy(&value, take_bytes(sizeof(T)).data(), sizeof(T));
    return value;
  }
  std::string_view take_text() { return take_bytes(take<size_t>()); }
  template <class T>
  std::vector<T> take_values() {
    std::vector<T> values(take<size_t>());
    for (T& value : values) value = take<T>();
    return values;
  }

 private:
  std::string_view take_bytes(size_t count) {
    TROUPE_CHECK(bytes_.size() >= count, "bytes of another rank are cut short");
    const std::string_view taken = bytes_.substr(0, count);
    bytes_.remove_prefix(count);
    return taken;
  }

  std::string_view bytes_;
};

}  // namespace troupe
