#include "data/indexed_dataset.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstring>
#include <functional>
#include <gtest/gtest.h>
#include <numeric>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "data/data_test_support.h"

namespace {

std::atomic<size_t> most_bytes_written{SIZE_MAX};
std::atomic<int> writes_before_full_disk{INT_MAX};
std::atomic<int> syncs_before_error{INT_MAX};

}  // namespace

// Stand for those of the system in this program. It may always write less than it is given, the
// disk may be full, and what was written may be lost.
extern "C" ssize_t write(int file, const void* data, size_t size) {
  if (writes_before_full_disk != INT_MAX && writes_before_full_disk-- <= 0) {
    errno = ENOSPC;
    return -1;
  }
  return ::syscall(SYS_write, file, data, std::min(size, most_bytes_written.load()));
}

extern "C" int fsync(int file) {
  if (syncs_before_error != INT_MAX && syncs_before_error-- <= 0) {
    errno = EIO;
    return -1;
  }
  return static_cast<int>(::syscall(SYS_fsync, file));
}

namespace troupe {
namespace {

// The bytes of an index, built from the format's description alone.
struct IndexFile {
  std::string magic = std::string("MMIDIDX\0\0", 9);
  uint64_t version = 1;
  uint8_t code = 8;
  uint64_t num_sequences = 3;
  uint64_t num_boundaries = 3;
  std::vector<int32_t> lengths = {2, 0, 3};
  std::vector<int64_t> starts = {0, 4, 4};
  std::vector<int64_t> boundaries = {0, 2, 3};
  std::string tail;

  std::string bytes() const {
    std::string out = magic;
    put(out, version);
    put(out, code);
    put(out, num_sequences);
    put(out, num_boundaries);
    for (const auto value : lengths) put(out, value);
    for (const auto value : starts) put(out, value);
    for (const auto value : boundaries) put(out, value);
    return out + tail;
  }

  template <class T>
  static void put(std::string& out, T value) {
    for (size_t byte = 0; byte < sizeof(T); ++byte) {
      out.push_back(static_cast<char>(static_cast<uint64_t>(value) >> (8 * byte)));
    }
  }
};

// Five u16 tokens: 1, 256, 65535, 7, 0.
const std::string kBin("\x01\x00\x00\x01\xff\xff\x07\x00\x00\x00", 10);

std::vector<int32_t> sequence_of(const IndexedDataset& dataset, int64_t sequence) {
  std::vector<int32_t> tokens(static_cast<size_t>(dataset.sequence_length(sequence)));
  dataset.read(sequence, 0, dataset.sequence_length(sequence), tokens.data());
  return tokens;
}

TEST(IndexedDataset, ReadsAFileBuiltByHand) {
  const TempFolder dir;
  put_file(dir / "set.idx", IndexFile().bytes());
  put_file(dir / "set.bin", kBin);
  const IndexedDataset dataset(dir / "set");
  EXPECT_EQ(dataset.token_type(), TokenType::u16);
  EXPECT_EQ(dataset.num_sequences(), 3);
  EXPECT_EQ(dataset.num_documents(), 2);
  EXPECT_EQ(dataset.num_tokens(), 5);
  EXPECT_EQ(dataset.first_sequence(0), 0);
  EXPECT_EQ(dataset.first_sequence(1), 2);
  EXPECT_EQ(dataset.first_sequence(2), 3);
  EXPECT_EQ(sequence_of(dataset, 0), (std::vector<int32_t>{1, 256}));
  EXPECT_EQ(sequence_of(dataset, 1), (std::vector<int32_t>{}));
  EXPECT_EQ(sequence_of(dataset, 2), (std::vector<int32_t>{65535, 7, 0}));
  int32_t token = -1;
  dataset.read(2, 1, 1, &token);
  EXPECT_EQ(token, 7);
  EXPECT_EQ(dataset.token_range().lowest, 0);
  EXPECT_EQ(dataset.token_range().highest, 65535);
}

TEST(IndexedDataset, WriterWritesTheFileBuiltByHand) {
  const TempFolder dir;
  IndexedDatasetWriter writer(dir / "new_folder/set", TokenType::u16, false);
  writer.append(std::vector<int32_t>{1});
  writer.append(std::vector<int32_t>{256});
  writer.end_sequence();
  writer.end_sequence();
  writer.end_document();
  writer.append(std::vector<int32_t>{65535, 7, 0});
  writer.end_sequence();
  writer.end_document();
  writer.finish();
  EXPECT_EQ(get_file(dir / "new_folder/set.idx"), IndexFile().bytes());
  EXPECT_EQ(get_file(dir / "new_folder/set.bin"), kBin);
}

TEST(IndexedDataset, ModesAfterTheIndexAreAccepted) {
  const TempFolder dir;
  IndexFile file;
  file.tail = std::string(3, '\0');
  put_file(dir / "set.idx", file.bytes());
  put_file(dir / "set.bin", kBin);
  EXPECT_EQ(IndexedDataset(dir / "set").num_tokens(), 5);
}

TEST(IndexedDataset, EveryTokenTypeRoundTrips) {
  struct Case {
    TokenType type;
    int64_t size;
    std::vector<int32_t> tokens;
  };
  const std::vector<Case> cases = {
      {TokenType::u8, 1, {0, 127, 255}},
      {TokenType::i8, 1, {0, -128, 127}},
      {TokenType::i16, 2, {0, -32768, 32767}},
      {TokenType::u16, 2, {0, 1, 65535}},
      {TokenType::i32, 4, {0, INT32_MIN, INT32_MAX}},
      {TokenType::i64, 8, {0, INT32_MIN, INT32_MAX}},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(name_of(c.type));
    const TempFolder dir;
    IndexedDatasetWriter writer(dir / "set", c.type, false);
    writer.append(c.tokens);
    writer.end_sequence();
    writer.end_document();
    writer.finish();
    EXPECT_EQ(std::filesystem::file_size(dir / "set.bin"),
              static_cast<uintmax_t>(c.size) * c.tokens.size());
    const IndexedDataset dataset(dir / "set");
    EXPECT_EQ(dataset.token_type(), c.type);
    EXPECT_EQ(sequence_of(dataset, 0), c.tokens);
    const auto [lowest, highest] = std::minmax_element(c.tokens.begin(), c.tokens.end());
    EXPECT_EQ(dataset.token_range().lowest, *lowest);
    EXPECT_EQ(dataset.token_range().highest, *highest);
  }
}

TEST(IndexedDataset, MoreTokensThanOneBuffer) {
  const TempFolder dir;
  std::vector<int32_t> tokens(700'001);
  for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<int32_t>(i % 60'013);
  write_dataset(dir / "set", {tokens, {5}, tokens});
  const IndexedDataset dataset(dir / "set");
  EXPECT_EQ(dataset.num_tokens(), 1'400'003);
  EXPECT_EQ(sequence_of(dataset, 0), tokens);
  EXPECT_EQ(sequence_of(dataset, 1), std::vector<int32_t>{5});
  EXPECT_EQ(sequence_of(dataset, 2), tokens);
}

TEST(IndexedDataset, NoSequences) {
  const TempFolder dir;
  write_dataset(dir / "set", {});
  const IndexedDataset dataset(dir / "set");
  EXPECT_EQ(dataset.num_sequences(), 0);
  EXPECT_EQ(dataset.num_documents(), 0);
  EXPECT_GT(dataset.token_range().lowest, dataset.token_range().highest);
}

TEST(IndexedDataset, TokenTypeFollowsMegatron) {
  EXPECT_EQ(token_type_for_vocabulary(257), TokenType::u16);
  EXPECT_EQ(token_type_for_vocabulary(65499), TokenType::u16);
  EXPECT_EQ(token_type_for_vocabulary(65500), TokenType::i32);
}

TEST(IndexedDataset, HostileIndexesAreRefusedWithTheirPath) {
  struct Case {
    const char* name;
    std::function<void(IndexFile&)> spoil;
    const char* message;
  };
  constexpr uint64_t kHuge = uint64_t{1} << 62;
  const std::vector<Case> cases = {
      {"magic", [](IndexFile& f) { f.magic[0] = 'X'; }, "not a Megatron index"},
      {"version", [](IndexFile& f) { f.version = 2; }, "version 2"},
      {"code 0", [](IndexFile& f) { f.code = 0; }, "type code 0"},
      {"code 9", [](IndexFile& f) { f.code = 9; }, "type code 9"},
      {"float code", [](IndexFile& f) { f.code = 7; }, "floating point"},
      {"more sequences", [](IndexFile& f) { f.num_sequences = 9; }, "9 sequences do not fit"},
      {"wrapping sequences", [=](IndexFile& f) { f.num_sequences = kHuge; }, "do not fit"},
      {"all ones", [](IndexFile& f) { f.num_sequences = UINT64_MAX; }, "do not fit"},
      {"more boundaries", [](IndexFile& f) { f.num_boundaries = 4; }, "4 document boundaries"},
      {"wrapping boundaries", [=](IndexFile& f) { f.num_boundaries = kHuge; }, "do not fit"},
      {"fewer boundaries", [](IndexFile& f) { f.num_boundaries = 2; }, "8 bytes follow"},
      {"tail", [](IndexFile& f) { f.tail = "x"; }, "1 bytes follow"},
      {"cut tail", [](IndexFile& f) { f.boundaries.pop_back(); }, "do not fit"},
      {"no boundaries",
       [](IndexFile& f) {
         f.num_boundaries = 0;
         f.boundaries.clear();
       },
       "no document boundaries"},
      {"negative length", [](IndexFile& f) { f.lengths[1] = -1; }, "sequence 1 has the length -1"},
      {"length beyond .bin", [](IndexFile& f) { f.lengths[2] = 4; },
       "sequence 2 (4 tokens of 2 bytes at byte "},
      {"longest length", [](IndexFile& f) { f.lengths[0] = INT32_MAX; }, "sequence 0"},
      {"start beyond .bin", [](IndexFile& f) { f.starts[1] = 11; },
       " bytes at byte 11) lies outside "},
      {"largest start", [](IndexFile& f) { f.starts[1] = INT64_MAX; }, "sequence 1"},
      {"negative start", [](IndexFile& f) { f.starts[0] = -2; }, "sequence 0"},
      {"first boundary", [](IndexFile& f) { f.boundaries[0] = 1; },
       "the first document begins at sequence 1, not 0"},
      {"falling boundaries", [](IndexFile& f) { f.boundaries[1] = 4; },
       "document 1 ends at sequence 3, before its begin at 4"},
      {"negative boundary", [](IndexFile& f) { f.boundaries[1] = -1; },
       "document 0 ends at sequence -1, before its begin at 0"},
      {"last boundary", [](IndexFile& f) { f.boundaries[2] = 2; },
       "the last document ends at sequence 2, but there are 3 sequences"},
      {"boundary beyond", [](IndexFile& f) { f.boundaries[2] = 1000; },
       "the last document ends at sequence 1000, but there are 3 sequences"},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.name);
    const TempFolder dir;
    IndexFile file;
    c.spoil(file);
    put_file(dir / "set.idx", file.bytes());
    put_file(dir / "set.bin", kBin);
    const std::string message =
        message_of(ExitStatus::failed, [&] { const IndexedDataset dataset(dir / "set"); });
    EXPECT_TRUE(contains(message, c.message)) << message;
    EXPECT_TRUE(contains(message, dir / "set.idx")) << message;
  }
}

TEST(IndexedDataset, EveryTruncationIsRefused) {
  const TempFolder dir;
  const std::string idx = IndexFile().bytes();
  put_file(dir / "set.bin", kBin);
  for (size_t size = 0; size < idx.size(); ++size) {
    SCOPED_TRACE(size);
    put_file(dir / "set.idx", idx.substr(0, size));
    const std::string message =
        message_of(ExitStatus::failed, [&] { const IndexedDataset dataset(dir / "set"); });
    EXPECT_TRUE(contains(message, dir / "set.idx")) << message;
  }
  put_file(dir / "set.idx", idx);
  for (size_t size = 0; size < kBin.size(); ++size) {
    SCOPED_TRACE(size);
    put_file(dir / "set.bin", kBin.substr(0, size));
    const std::string message =
        message_of(ExitStatus::failed, [&] { const IndexedDataset dataset(dir / "set"); });
    EXPECT_TRUE(contains(message, dir / "set.bin")) << message;
  }
}

TEST(IndexedDataset, WideIdsAreRefusedWhenRead) {
  const TempFolder dir;
  IndexFile file;
  file.code = 5;
  file.num_sequences = 1;
  file.num_boundaries = 2;
  file.lengths = {2};
  file.starts = {0};
  file.boundaries = {0, 1};
  std::string bin;
  IndexFile::put(bin, int64_t{12});
  IndexFile::put(bin, int64_t{1} << 31);
  put_file(dir / "set.idx", file.bytes());
  put_file(dir / "set.bin", bin);
  const IndexedDataset dataset(dir / "set");
  int32_t tokens[2] = {};
  dataset.read(0, 0, 1, tokens);
  EXPECT_EQ(tokens[0], 12);
  const std::string message =
      message_of(ExitStatus::failed, [&] { dataset.read(0, 0, 2, tokens); });
  EXPECT_TRUE(contains(message, "token 1 of sequence 0 is 2147483648")) << message;
}

TEST(IndexedDataset, MissingFilesAreBadRequests) {
  const TempFolder dir;
  std::string message =
      message_of(ExitStatus::bad_request, [&] { const IndexedDataset dataset(dir / "set"); });
  EXPECT_TRUE(contains(message, dir / "set.idx")) << message;
  put_file(dir / "set.idx", IndexFile().bytes());
  message = message_of(ExitStatus::bad_request, [&] { const IndexedDataset dataset(dir / "set"); });
  EXPECT_TRUE(contains(message, dir / "set.bin")) << message;
  message =
      message_of(ExitStatus::bad_request, [&] { const IndexedDataset dataset(dir / "set.idx"); });
  EXPECT_TRUE(contains(message, "without .bin or .idx")) << message;
}

TEST(IndexedDataset, NamedPipesAreRefusedInsteadOfWaitedFor) {
  const TempFolder dir;
  ASSERT_EQ(mkfifo((dir / "set.idx").c_str(), 0600), 0);
  put_file(dir / "set.bin", "");
  const std::string message =
      message_of(ExitStatus::failed, [&] { const IndexedDataset dataset(dir / "set"); });
  EXPECT_TRUE(contains(message, (dir / "set.idx") + " is not a regular file")) << message;
}

TEST(IndexedDataset, ForeignVocabularyIsReported) {
  const TempFolder dir;
  write_dataset(dir / "set", {{0, 100}, {256, 3}});
  const IndexedDataset dataset(dir / "set");
  require_vocabulary(dataset, 257, "byte");
  const std::string message =
      message_of(ExitStatus::bad_request, [&] { require_vocabulary(dataset, 256, "byte"); });
  EXPECT_TRUE(contains(message, "from 0 to 256")) << message;
  EXPECT_TRUE(contains(message, dir / "set.bin")) << message;
}

TEST(IndexedDataset, OneForeignTokenIsEnough) {
  const TempFolder dir;
  write_dataset(dir / "set", {{7, 7}});
  const IndexedDataset dataset(dir / "set");
  require_vocabulary(dataset, 8, "byte");
  EXPECT_EQ(message_of(ExitStatus::bad_request, [&] { require_vocabulary(dataset, 7, "byte"); }),
            (dir / "set.bin") +
                " holds token ids from 7 to 7, but the byte tokenizer has ids 0 to 6: the data was "
                "written with another tokenizer; tokenize the text again or name that one");
  write_dataset(dir / "empty", {{}});
  require_vocabulary(IndexedDataset(dir / "empty"), 1, "byte");
}

TEST(IndexedDatasetWriter, UnfinishedOutputDisappears) {
  const TempFolder dir;
  {
    IndexedDatasetWriter writer(dir / "set", TokenType::u16, false);
    writer.append(std::vector<int32_t>(1'000'000, 3));
    writer.end_sequence();
    EXPECT_FALSE(std::filesystem::exists(dir / "set.bin"));
    EXPECT_FALSE(std::filesystem::exists(dir / "set.idx"));
  }
  EXPECT_TRUE(dir.files().empty());
}

TEST(IndexedDatasetWriter, WritesOfAPartGoOnBehindIt) {
  const TempFolder dir;
  std::vector<int32_t> tokens(5000);
  std::iota(tokens.begin(), tokens.end(), 0);
  most_bytes_written = 999;
  write_dataset(dir / "set", {tokens});
  most_bytes_written = SIZE_MAX;
  EXPECT_EQ(sequence_of(IndexedDataset(dir / "set"), 0), tokens);
}

// The old index goes before the new tokens come: what a killed run leaves is no data set.
TEST(IndexedDatasetWriter, AnOldIndexNeverStandsBesideNewTokens) {
  const TempFolder dir;
  write_dataset(dir / "set", {{1, 2}});
  std::filesystem::remove(dir / "set.bin");
  std::filesystem::create_directories(dir / "set.bin/in_the_way");  // of the new tokens
  IndexedDatasetWriter writer(dir / "set", TokenType::u16, true);
  writer.append(std::vector<int32_t>{9});
  writer.end_sequence();
  writer.end_document();
  const std::string message = message_of(ExitStatus::failed, [&] { writer.finish(); });
  EXPECT_TRUE(contains(message, dir / "set.bin")) << message;
  EXPECT_FALSE(std::filesystem::exists(dir / "set.idx"));
}

// Tokens and index are made durable before they get their names, and no data set is replaced by one
// that is not complete.
TEST(IndexedDatasetWriter, AnErrorOfTheDiskLeavesTheOldDataSet) {
  struct Case {
    std::atomic<int>& left;
    int good;
    const char* message;
    const char* file;
  };
  const Case cases[] = {
      {writes_before_full_disk, 0, "cannot write ", "set.bin.partial: No space left on device"},
      {writes_before_full_disk, 1, "cannot write ", "set.idx.partial: No space left on device"},
      {syncs_before_error, 0, "cannot sync ", "set.bin.partial: Input/output error"},
      {syncs_before_error, 1, "cannot sync ", "set.idx.partial: Input/output error"}};
  for (const Case& each : cases) {
    const TempFolder dir;
    write_dataset(dir / "set", {{1, 2}});
    {
      IndexedDatasetWriter writer(dir / "set", TokenType::u16, true);
      writer.append(std::vector<int32_t>{9});
      writer.end_sequence();
      writer.end_document();
      each.left = each.good;
      const std::string message = message_of(ExitStatus::failed, [&] { writer.finish(); });
      each.left = INT_MAX;
      EXPECT_EQ(message, each.message + (dir / each.file));
    }
    EXPECT_EQ(sequence_of(IndexedDataset(dir / "set"), 0), (std::vector<int32_t>{1, 2}));
    EXPECT_EQ(dir.files().size(), 2U) << each.file;
  }
}

TEST(IndexedDatasetWriter, LeftoversOfAKilledRunAreReplaced) {
  const TempFolder dir;
  put_file(dir / "set.bin.partial", std::string(100, 'x'));
  put_file(dir / "set.idx.partial", std::string(500, 'x'));
  write_dataset(dir / "set", {{1, 2}});
  EXPECT_EQ(dir.files().size(), 2U);
  EXPECT_EQ(sequence_of(IndexedDataset(dir / "set"), 0), (std::vector<int32_t>{1, 2}));
}

// As a pipe, which cannot be cut to no bytes.
TEST(IndexedDatasetWriter, WhatCannotBeEmptiedIsNamedAndTakenAway) {
  const TempFolder dir;
  ASSERT_EQ(::mkfifo((dir / "set.bin.partial").c_str(), 0600), 0);
  const std::string message = message_of(ExitStatus::failed, [&] {
    const IndexedDatasetWriter writer(dir / "set", TokenType::u16, false);
  });
  EXPECT_TRUE(contains(message, "set.bin.partial")) << message;
  EXPECT_EQ(dir.files().size(), 0U);
}

TEST(IndexedDatasetWriter, ReplacesOnlyWhenAsked) {
  const TempFolder dir;
  write_dataset(dir / "set", {{1, 2}});
  const std::string message = message_of(ExitStatus::bad_request, [&] {
    const IndexedDatasetWriter writer(dir / "set", TokenType::u16, false);
  });
  EXPECT_TRUE(contains(message, "exists already")) << message;

  IndexedDatasetWriter writer(dir / "set", TokenType::u8, true);
  writer.append(std::vector<int32_t>{9});
  writer.end_sequence();
  writer.end_document();
  EXPECT_EQ(IndexedDataset(dir / "set").num_tokens(), 2);
  writer.finish();
  EXPECT_EQ(sequence_of(IndexedDataset(dir / "set"), 0), std::vector<int32_t>{9});
  EXPECT_EQ(dir.files().size(), 2U);
}

TEST(IndexedDatasetWriter, SecondWriterIsRefused) {
  const TempFolder dir;
  IndexedDatasetWriter first(dir / "set", TokenType::u16, false);
  const std::string message = message_of(ExitStatus::failed, [&] {
    const IndexedDatasetWriter second(dir / "set", TokenType::u16, false);
  });
  EXPECT_TRUE(contains(message, "another process")) << message;
  first.append(std::vector<int32_t>{4});
  first.end_sequence();
  first.end_document();
  first.finish();
  EXPECT_EQ(IndexedDataset(dir / "set").num_tokens(), 1);
}

TEST(IndexedDatasetWriter, PrefixWithoutAName) {
  const TempFolder dir;
  for (const std::string& prefix : {std::string(), dir / "", dir / "."}) {
    const std::string message = message_of(ExitStatus::bad_request, [&] {
      const IndexedDatasetWriter writer(prefix, TokenType::u16, false);
    });
    EXPECT_TRUE(contains(message, "no file name")) << message;
  }
}

}  // namespace
}  // namespace troupe
