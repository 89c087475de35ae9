// TensorBoard's event files, read as their formats are defined and without the code that writes
// them: TFRecord framing, checksums bit by bit, protobuf's wire format.
#pragma once

#include <cstdint>
#include <cstring>
#include <fstream>
#include <gtest/gtest.h>
#include <iterator>
#include <map>
#include <string>
#include <vector>

namespace troupe::testing {

inline uint32_t crc32c_bit_by_bit(const std::string& data) {
  uint32_t crc = ~0U;
  for (const char c : data) {
    crc ^= static_cast<uint8_t>(c);
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0x82f63b78U : 0U);
  }
  return ~crc;
}

// crc rotated right by 15 bits, plus a constant (tensorflow/core/lib/hash/crc32c.h).
inline uint32_t mask_crc(uint32_t crc) {
  return ((crc >> 15) | (crc << 17)) + 0xa282ead8U;
}

template <class T>
T number_at(const std::string& bytes, size_t at) {
  T value{};
  std::memcpy(&value, bytes.data() + at, sizeof value);
  return value;
}

// The events of a file, each a protobuf message, checksums verified.
inline std::vector<std::string> event_records(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  const std::string all((std::istreambuf_iterator<char>(file)), {});
  std::vector<std::string> found;
  size_t at = 0;
  while (at < all.size()) {
    const auto length = number_at<uint64_t>(all, at);
    EXPECT_EQ(number_at<uint32_t>(all, at + 8), mask_crc(crc32c_bit_by_bit(all.substr(at, 8))));
    if (at + 16 + length > all.size()) {
      ADD_FAILURE() << "a record reaches beyond the end";
      return found;
    }
    found.push_back(all.substr(at + 12, length));
    EXPECT_EQ(number_at<uint32_t>(all, at + 12 + length),
              mask_crc(crc32c_bit_by_bit(found.back())));
    at += 16 + length;
  }
  return found;
}

// The fields of a protobuf message: numbers as such, everything else as its bytes.
struct Message {
  std::map<uint32_t, std::vector<uint64_t>> numbers;
  std::map<uint32_t, std::vector<std::string>> bytes;

  explicit Message(const std::string& text) {
    size_t at = 0;
    const auto varint = [&] {
      uint64_t value = 0;
      for (int shift = 0;; shift += 7) {
        const auto byte = static_cast<uint8_t>(text.at(at++));
        value |= uint64_t{byte & 0x7fU} << shift;
        if ((byte & 0x80) == 0) return value;
      }
    };
    while (at < text.size()) {
      const uint64_t key = varint();
      const auto field = static_cast<uint32_t>(key >> 3);
      switch (key & 7) {
        case 0:
          numbers[field].push_back(varint());
          break;
        case 1:
          numbers[field].push_back(number_at<uint64_t>(text, at));
          at += 8;
          break;
        case 2: {
          const uint64_t size = varint();
          bytes[field].push_back(text.substr(at, size));
          at += size;
          break;
        }
        case 5:
          numbers[field].push_back(number_at<uint32_t>(text, at));
          at += 4;
          break;
        default:
          ADD_FAILURE() << "wire type " << (key & 7);
          return;
      }
    }
  }
};

}  // namespace troupe::testing
