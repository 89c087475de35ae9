// Merges of byte-pair encoding, without a tokenizer file around them.
#include "data/byte_pairs.h"

#include <gtest/gtest.h>
#include <string_view>
#include <vector>

namespace troupe {
namespace {

std::vector<int32_t> encode(const std::vector<BytePairs::Merge>& merges, std::string_view word) {
  std::array<int32_t, 256> byte_ids{};
  for (size_t byte = 0; byte < 256; ++byte) byte_ids[byte] = static_cast<int32_t>(byte);
  const BytePairs pairs(byte_ids, merges);
  BytePairs::Scratch scratch;
  std::vector<int32_t> ids;
  pairs.encode(word, scratch, ids);
  return ids;
}

TEST(BytePairs, TheLowestRankIsMergedFirst) {
  EXPECT_EQ(encode({{'a', 'b', 300}, {'b', 'c', 301}}, "abc"), (std::vector<int32_t>{300, 'c'}));
  EXPECT_EQ(encode({{'b', 'c', 301}, {'a', 'b', 300}}, "abc"), (std::vector<int32_t>{'a', 301}));
}

// As in Hugging Face's library, whose table of merges takes the last entry of a pair.
TEST(BytePairs, AMergeListedTwiceHasItsLastRank) {
  EXPECT_EQ(encode({{'a', 'b', 300}, {'b', 'c', 301}, {'a', 'b', 300}}, "abc"),
            (std::vector<int32_t>{'a', 301}));
}

}  // namespace
}  // namespace troupe
