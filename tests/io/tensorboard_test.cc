// TensorBoard event files: read back record by record, as the formats are defined.
#include "io/tensorboard.h"

#include <bit>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <gtest/gtest.h>
#include <map>
#include <string>
#include <vector>

#include "io/io_test_support.h"

namespace troupe {
namespace {

using namespace io_test;

uint32_t crc32c_bit_by_bit(const std::string& data) {
  uint32_t crc = ~0U;
  for (const char c : data) {
    crc ^= static_cast<uint8_t>(c);
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0x82f63b78U : 0U);
  }
  return ~crc;
}

// crc rotated right by 15 bits, plus a constant (tensorflow/core/lib/hash/crc32c.h).
uint32_t mask(uint32_t crc) {
  return ((crc >> 15) | (crc << 17)) + 0xa282ead8U;
}

template <class T>
T number_at(const std::string& bytes, size_t at) {
  T value{};
  std::memcpy(&value, bytes.data() + at, sizeof value);
  return value;
}

std::vector<std::string> records(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  const std::string all((std::istreambuf_iterator<char>(file)), {});
  std::vector<std::string> found;
  size_t at = 0;
  while (at < all.size()) {
    const auto length = number_at<uint64_t>(all, at);
    EXPECT_EQ(number_at<uint32_t>(all, at + 8), mask(crc32c_bit_by_bit(all.substr(at, 8))));
    if (at + 16 + length > all.size()) {
      ADD_FAILURE() << "a record reaches beyond the end";
      return found;
    }
    found.push_back(all.substr(at + 12, length));
    EXPECT_EQ(number_at<uint32_t>(all, at + 12 + length), mask(crc32c_bit_by_bit(found.back())));
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

TEST(Crc32c, KnownValues) {
  // RFC 3720, appendix B.4.
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8a9136aaU);
  EXPECT_EQ(crc32c(std::string(32, '\xff')), 0x62a8ab43U);
  EXPECT_EQ(crc32c("123456789"), 0xe3069283U);
  EXPECT_EQ(crc32c(""), 0U);
  EXPECT_EQ(masked_crc32c("123456789"), mask(0xe3069283U));
}

TEST(Tensorboard, EventsReadBack) {
  const TempFolder folder;
  std::string path;
  {
    TensorboardWriter writer(folder / "tb/run", 0);
    path = writer.path();
    const std::vector<TensorboardWriter::Scalar> first = {{"lm loss", 2.5}, {"grad-norm", 0.1}};
    writer.write(7, first);
    const std::vector<TensorboardWriter::Scalar> second = {{"lm loss", 1e-3}};
    writer.write(3'000'000'000, second);
    EXPECT_EQ(records(path).size(), 3U) << "records are there at once";
  }
  EXPECT_NE(path.find("events.out.tfevents."), std::string::npos);
  const std::vector<std::string> found = records(path);
  ASSERT_EQ(found.size(), 3U);

  const Message version(found[0]);
  EXPECT_EQ(version.bytes.at(3), (std::vector<std::string>{"brain.Event:2"}));
  const auto wall_time = std::bit_cast<double>(version.numbers.at(1).at(0));
  EXPECT_GT(wall_time, 1.6e9) << "seconds since 1970";
  EXPECT_LT(wall_time, 1e11);

  const Message event(found[1]);
  EXPECT_EQ(event.numbers.at(2), (std::vector<uint64_t>{7}));
  const Message summary(event.bytes.at(5).at(0));
  ASSERT_EQ(summary.bytes.at(1).size(), 2U);
  const Message loss(summary.bytes.at(1)[0]);
  EXPECT_EQ(loss.bytes.at(1).at(0), "lm loss");
  EXPECT_EQ(std::bit_cast<float>(static_cast<uint32_t>(loss.numbers.at(2).at(0))), 2.5F);
  const Message norm(summary.bytes.at(1)[1]);
  EXPECT_EQ(norm.bytes.at(1).at(0), "grad-norm");
  EXPECT_EQ(std::bit_cast<float>(static_cast<uint32_t>(norm.numbers.at(2).at(0))), 0.1F);
  EXPECT_EQ(Message(found[2]).numbers.at(2), (std::vector<uint64_t>{3'000'000'000}));
}

// On both sides of where a number takes one byte more, and of a length that does.
TEST(Tensorboard, NumbersOfEveryLengthReadBack) {
  const TempFolder folder;
  TensorboardWriter writer(folder.path(), 0);
  const std::vector<uint64_t> steps = {1, 127, 128, 129, 16383, 16384, 2097151, 2097152};
  for (const uint64_t step : steps) {
    const std::string tag(step % 1000, 'x');
    const std::vector<TensorboardWriter::Scalar> scalars = {{tag, 1}};
    writer.write(static_cast<int64_t>(step), scalars);
  }
  const std::vector<std::string> found = records(writer.path());
  ASSERT_EQ(found.size(), steps.size() + 1);
  for (size_t i = 0; i < steps.size(); ++i) {
    const Message event(found[i + 1]);
    EXPECT_EQ(event.numbers.at(2), (std::vector<uint64_t>{steps[i]}));
    const Message scalar(Message(event.bytes.at(5).at(0)).bytes.at(1).at(0));
    EXPECT_EQ(scalar.bytes.at(1).at(0), std::string(steps[i] % 1000, 'x')) << steps[i];
  }
}

TEST(Tensorboard, GoingOnHidesLaterSteps) {
  const TempFolder folder;
  const TensorboardWriter first(folder.path(), 0);
  const TensorboardWriter second(folder.path(), 41);
  EXPECT_NE(first.path(), second.path());
  EXPECT_EQ(records(first.path()).size(), 1U);
  const std::vector<std::string> found = records(second.path());
  ASSERT_EQ(found.size(), 2U);
  const Message start(found[1]);
  EXPECT_EQ(start.numbers.at(2), (std::vector<uint64_t>{41}));
  EXPECT_EQ(Message(start.bytes.at(7).at(0)).numbers.at(1), (std::vector<uint64_t>{1}));
}

}  // namespace
}  // namespace troupe
