// TensorBoard event files: read back record by record, as the formats are defined.
#include "io/tensorboard.h"

#include <bit>
#include <gtest/gtest.h>
#include <string>
#include <vector>

#include "io/io_test_support.h"
#include "support/event_file.h"

namespace troupe {
namespace {

using namespace io_test;
using testing::crc32c_bit_by_bit;
using testing::event_records;
using testing::mask_crc;
using testing::Message;

TEST(Crc32c, KnownValues) {
  // RFC 3720, appendix B.4.
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8a9136aaU);
  EXPECT_EQ(crc32c(std::string(32, '\xff')), 0x62a8ab43U);
  EXPECT_EQ(crc32c("123456789"), 0xe3069283U);
  EXPECT_EQ(crc32c(""), 0U);
  EXPECT_EQ(masked_crc32c("123456789"), mask_crc(0xe3069283U));
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
    EXPECT_EQ(event_records(path).size(), 3U) << "records are there at once";
  }
  EXPECT_NE(path.find("events.out.tfevents."), std::string::npos);
  const std::vector<std::string> found = event_records(path);
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
  const std::vector<std::string> found = event_records(writer.path());
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
  EXPECT_EQ(event_records(first.path()).size(), 1U);
  const std::vector<std::string> found = event_records(second.path());
  ASSERT_EQ(found.size(), 2U);
  const Message start(found[1]);
  EXPECT_EQ(start.numbers.at(2), (std::vector<uint64_t>{41}));
  EXPECT_EQ(Message(start.bytes.at(7).at(0)).numbers.at(1), (std::vector<uint64_t>{1}));
}

}  // namespace
}  // namespace troupe
