// The made-up data set: Megatron's.
#include "data/mock_dataset.h"

#include <gtest/gtest.h>
#include <numeric>
#include <vector>

namespace troupe {
namespace {

std::vector<int32_t> made_up_sequence(const IndexedDataset& data, int64_t sequence) {
  std::vector<int32_t> tokens(static_cast<size_t>(data.sequence_length(sequence)));
  data.read(sequence, 0, static_cast<int64_t>(tokens.size()), tokens.data());
  return tokens;
}

// numpy 2.3: default_rng(0).integers(1, 4096, 100000, dtype=int32), its first and last ones and its
// sum.
TEST(MockDataset, LengthsAreNumpys) {
  const auto data = make_mock_dataset(1000, 999);
  ASSERT_EQ(data->num_sequences(), 100'000);
  EXPECT_EQ(data->num_documents(), 100'000);
  const std::vector<int64_t> first = {3484, 2609, 2094, 1105, 1261, 168, 309, 68, 718, 3331};
  for (size_t i = 0; i < first.size(); ++i) {
    EXPECT_EQ(data->sequence_length(static_cast<int64_t>(i)), first[i]) << i;
  }
  const std::vector<int64_t> last = {2815, 2592, 61, 100, 769};
  for (size_t i = 0; i < last.size(); ++i) {
    EXPECT_EQ(data->sequence_length(99'995 + static_cast<int64_t>(i)), last[i]) << i;
  }
  EXPECT_EQ(data->num_tokens(), 204'637'097);
}

TEST(MockDataset, SequencesCountUpwardsAndEnd) {
  for (const int64_t vocabulary : {30, 100'000}) {  // stored as u16 and as i32
    const auto data = make_mock_dataset(vocabulary, 7);
    const std::vector<int32_t> tokens = made_up_sequence(*data, 7);  // of 68 tokens
    ASSERT_EQ(tokens.size(), 68U);
    for (size_t i = 0; i + 1 < tokens.size(); ++i) {
      EXPECT_EQ(tokens[i], static_cast<int64_t>(i + 1) % vocabulary) << i;
    }
    EXPECT_EQ(tokens.back(), 7);
  }
}

}  // namespace
}  // namespace troupe
