// Content hashes of data: what they notice, and that hashing in the background finds the same.
#include "train/data_hash.h"

#include <chrono>
#include <cstring>
#include <fstream>
#include <gtest/gtest.h>
#include <string>
#include <thread>
#include <vector>

#include "io/hash.h"
#include "train/train_test_support.h"

namespace troupe {
namespace {

using namespace testing;

// One document of `count` tokens; token `changed` is another one.
void write_tokens(const std::string& prefix, int64_t count, int64_t changed = -1) {
  IndexedDatasetWriter writer(prefix, TokenType::u16, /*overwrite=*/true);
  std::vector<int32_t> tokens(static_cast<size_t>(count), 7);
  if (changed >= 0) tokens[static_cast<size_t>(changed)] = 8;
  writer.append(tokens);
  writer.end_sequence();
  writer.end_document();
  writer.finish();
}

std::string contents_of(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

// As docs/checkpoint_format.md defines it, for files small enough to be sampled whole.
std::string little_endian(uint64_t value) {
  std::string bytes;
  for (int i = 0; i < 8; ++i) bytes += static_cast<char>(value >> 8 * i);
  return bytes;
}

TEST(DataHash, IsWhatThePageSays) {
  const TempFolder folder;
  const std::string prefix = folder / "data";
  write_tokens(prefix, 100);
  const IndexedDataset set(prefix);
  const std::string idx = contents_of(prefix + ".idx");
  const std::string bin = contents_of(prefix + ".bin");
  const std::string sampled = little_endian(idx.size()) + idx + little_endian(bin.size()) + bin;
  const std::string full = idx + bin;
  EXPECT_EQ(sampled_hash(set).sampled, hash_bytes(sampled.data(), sampled.size()));
  EXPECT_EQ(sampled_hash(set).bytes, full.size());
  EXPECT_EQ(full_hash(set), hash_bytes(full.data(), full.size()));
}

// 2 MiB of tokens: blocks of 4096 bytes, 256 of them, the first and the last included.
TEST(DataHash, TheSampleSeesTheEndsAndTheFullHashEverything) {
  const TempFolder folder;
  constexpr int64_t kTokens = 1 << 20;
  write_tokens(folder / "data", kTokens);
  const IndexedDataset set(folder / "data");
  const DataHash sampled = sampled_hash(set);
  const uint64_t full = full_hash(set);
  struct Change {
    int64_t token;
    bool in_sample;
  };
  // Block 1 begins at byte (2^21 - 4096) / 255 = 8208, token 4104; after block 0 a gap begins at
  // token 2048.
  for (const Change& change : {Change{0, true},
                               {2047, true},
                               {2048, false},
                               {4103, false},
                               {4104, true},
                               {kTokens - 1, true}}) {
    SCOPED_TRACE(change.token);
    write_tokens(folder / "other", kTokens, change.token);
    const IndexedDataset other(folder / "other");
    EXPECT_EQ(sampled_hash(other).sampled != sampled.sampled, change.in_sample);
    EXPECT_NE(full_hash(other), full);
  }
}

TEST(DataHash, DiffersAsFarAsBothAreKnown) {
  const DataHash hash{.bytes = 5, .sampled = 1, .full = 2};
  EXPECT_FALSE(hash.differs(hash));
  EXPECT_FALSE(hash.differs({.bytes = 5, .sampled = 1, .full = {}}));
  EXPECT_TRUE(hash.differs({.bytes = 5, .sampled = 1, .full = 3}));
  EXPECT_TRUE(hash.differs({.bytes = 5, .sampled = 3, .full = {}}));
  EXPECT_TRUE(hash.differs({.bytes = 6, .sampled = 1, .full = 2}));
}

TEST(DataHash, IsDescribedByTheBestThatIsKnown) {
  EXPECT_EQ((DataHash{.bytes = 5, .sampled = 1, .full = 2}).describe(),
            "5 bytes, xxh3 0000000000000002");
  EXPECT_EQ((DataHash{.bytes = 5, .sampled = 1, .full = {}}).describe(),
            "5 bytes, sampled xxh3 0000000000000001");
}

// All sets together, to the byte.
TEST(DataHash, SmallDataAreHashedAtOnce) {
  const TempFolder folder;
  write_tokens(folder / "a", 10);
  write_tokens(folder / "b", 300);
  const SharedDatasets sets = {std::make_shared<const IndexedDataset>(folder / "a"),
                               std::make_shared<const IndexedDataset>(folder / "b")};
  const uint64_t bytes = bytes_of(*sets[0]) + bytes_of(*sets[1]);
  EXPECT_TRUE(DataHasher(sets, /*in_full=*/true, /*at_once=*/bytes).is_done());
}

TEST(DataHash, TheBackgroundFindsTheSame) {
  const TempFolder folder;
  write_tokens(folder / "a", 1 << 20);
  write_tokens(folder / "b", 300);
  const SharedDatasets sets = {std::make_shared<const IndexedDataset>(folder / "a"),
                               std::make_shared<const IndexedDataset>(folder / "b")};
  const DataHasher at_once(sets, /*in_full=*/true);
  ASSERT_TRUE(at_once.is_done());
  const DataHasher in_background(sets, /*in_full=*/true, /*at_once=*/0);
  while (!in_background.is_done()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  const DataHasher sampled(sets, /*in_full=*/false);
  ASSERT_TRUE(sampled.is_done());
  for (size_t i = 0; i < sets.size(); ++i) {
    EXPECT_EQ(at_once.hashes()[i].full, full_hash(*sets[i]));
    EXPECT_EQ(in_background.hashes()[i].full, full_hash(*sets[i]));
    EXPECT_EQ(in_background.hashes()[i].sampled, at_once.hashes()[i].sampled);
    EXPECT_FALSE(sampled.hashes()[i].full.has_value());
  }
  // Ends whether or not it is at work.
  for (int i = 0; i < 20; ++i) const DataHasher cut_short(sets, /*in_full=*/true, /*at_once=*/0);
}

TEST(DataHash, OfWeightsSeesEachFile) {
  const TempFolder folder;
  const auto put = [&](const char* name, const std::string& text) {
    std::ofstream(folder / name, std::ios::binary) << text;
  };
  put("config.json", "{}");
  put("model.safetensors", "weights");
  const uint64_t hash = sampled_weights_hash(folder.path());
  put("readme.md", "not a weight");
  EXPECT_EQ(sampled_weights_hash(folder.path()), hash);
  put("model.safetensors", "Weights");
  EXPECT_NE(sampled_weights_hash(folder.path()), hash);
  put("a.safetensors", "");
  const std::string expected = little_endian(0) + "a.safetensors" + little_endian(2) +
                               "config.json{}" + little_endian(7) + "model.safetensorsWeights";
  EXPECT_EQ(sampled_weights_hash(folder.path()), hash_bytes(expected.data(), expected.size()));
}

}  // namespace
}  // namespace troupe
