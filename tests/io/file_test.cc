#include "io/file.h"

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <sys/stat.h>
#include <utility>
#include <vector>

#include "io/hash.h"
#include "io/io_test_support.h"
#include "io/json.h"
#include "support/interrupted_pipe.h"

namespace troupe {
namespace {

using io_test::expect_phrase;
using io_test::get_file;
using io_test::message_of;
using io_test::put_file;
using io_test::TempFolder;

TEST(File, WritesAndReadsBack) {
  const TempFolder folder;
  const std::string contents("a\0b\n", 4);
  const Disk disk;
  disk.write_file(folder / "f", contents);
  EXPECT_EQ(read_file(folder / "f", 100), contents);
  EXPECT_EQ(file_size(folder / "f"), 4U);
  disk.write_file(folder / "f", "");
  EXPECT_EQ(read_file(folder / "f", 0), "");
}

TEST(File, MapsAFileAndAnEmptyOne) {
  const TempFolder folder;
  put_file(folder / "f", "hello");
  put_file(folder / "empty", "");
  MappedFile file = MappedFile::open(folder / "f");
  const MappedFile moved = std::move(file);
  ASSERT_EQ(moved.bytes().size(), 5U);
  EXPECT_EQ(static_cast<char>(moved.bytes()[4]), 'o');
  EXPECT_EQ(moved.path(), folder / "f");
  EXPECT_EQ(MappedFile::open(folder / "empty").bytes().size(), 0U);
}

TEST(File, ForgottenBytesAreReadAgain) {
  const TempFolder folder;
  std::string contents;
  for (size_t i = 0; i < 300'000; ++i) contents += static_cast<char>(i % 251);
  put_file(folder / "f", contents);
  const MappedFile file = MappedFile::open(folder / "f");
  const auto is_whole = [&] {
    return std::memcmp(file.bytes().data(), contents.data(), contents.size()) == 0;
  };
  EXPECT_TRUE(is_whole());
  for (const auto& [first, count] :
       {std::pair<size_t, size_t>(0, 1), {70'000, 100'000}, {299'999, 1}, {5, 0}, {0, 300'000}}) {
    file.forget(file.bytes().subspan(first, count));
    EXPECT_TRUE(is_whole()) << first;
  }
}

TEST(File, RefusalsNameThePathAndTheReason) {
  const TempFolder folder;
  put_file(folder / "f", "hello");
  ASSERT_EQ(::mkfifo((folder / "pipe").c_str(), 0600), 0);
  const auto failed = [](const auto& body) { return message_of(ExitStatus::failed, body); };

  const auto bad_request = [](const auto& body) {
    return message_of(ExitStatus::bad_request, body);
  };

  const std::string missing = bad_request([&] { MappedFile::open(folder / "none"); });
  expect_phrase(missing, folder / "none");
  expect_phrase(missing, "No such file or directory");
  expect_phrase(failed([&] { MappedFile::open(folder.path()); }), "not a regular file");
  expect_phrase(failed([&] { MappedFile::open(folder / "pipe"); }), "not a regular file");
  expect_phrase(failed([&] { read_file(folder / "f", 4); }), "at most 4");
  expect_phrase(bad_request([&] { file_size(folder / "none"); }), folder / "none");

  const Disk disk;
  expect_phrase(failed([&] { disk.write_file(folder / "none/f", "x"); }), "cannot create");
  expect_phrase(
      message_of(ExitStatus::bad_request, [&] { disk.make_directories(folder / "f/below"); }),
      folder / "f is a file, not a folder.");
  expect_phrase(failed([&] { disk.rename(folder / "none", folder / "x"); }), folder / "none");
  expect_phrase(failed([&] { disk.sync_directory(folder / "none"); }), folder / "none");
}

TEST(File, AFullDiskIsReportedWithItsReason) {
  if (!path_exists("/dev/full")) GTEST_SKIP() << "this system has no /dev/full";
  const Disk disk;
  const std::string message =
      message_of(ExitStatus::failed, [&] { disk.write_file("/dev/full", "x"); });
  expect_phrase(message, "/dev/full");
  expect_phrase(message, "No space left on device");
}

// A signal, as of a window that changes its size, ends a write() early or before its first byte.
TEST(File, SignalsInterruptNoWriting) {
  const TempFolder folder;
  testing::InterruptedPipe pipe(folder / "pipe");
  const std::string contents = pipe.too_much();
  {
    const Disk disk;
    OutputFile file(disk, folder / "pipe");
    file.write(contents.data(), contents.size());
  }
  EXPECT_TRUE(pipe.end() == contents) << pipe.end().size() << " of " << contents.size();
}

TEST(File, DirectoriesAreMadeWithParentsAndRemovedWithContents) {
  const TempFolder folder;
  const Disk disk;
  disk.make_directories(folder / "a/b/c");
  disk.make_directories(folder / "a/b/c");
  disk.write_file(folder / "a/b/f", "x");
  disk.rename(folder / "a/b", folder / "moved");
  EXPECT_EQ(get_file(folder / "moved/f"), "x");
  disk.remove_tree(folder / "moved");
  disk.remove_tree(folder / "moved");
  EXPECT_FALSE(path_exists(folder / "moved"));
  EXPECT_TRUE(path_exists(folder / "a"));
}

TEST(File, TheHookSeesEveryChangeAndCanPreventIt) {
  const TempFolder folder;
  std::vector<std::string> seen;
  const Disk disk([&](std::string_view operation, const std::string& path) {
    seen.push_back(std::string(operation) + " " + path.substr(folder.path().size()));
    if (operation == "rename") throw_failed("prevented");
  });
  disk.make_directories(folder / "d");
  disk.write_file(folder / "d/f", "x");
  message_of(ExitStatus::failed, [&] { disk.rename(folder / "d/f", folder / "g"); });
  disk.remove_tree(folder / "d");
  EXPECT_EQ(seen, (std::vector<std::string>{"make directory /d", "sync directory ", "create /d/f",
                                            "write /d/f", "sync /d/f", "rename /d/f", "remove /d/f",
                                            "remove /d"}));
}

TEST(Hash, AgreesWithThePublishedFunctionAndWithItself) {
  // XXH3_64bits of the empty input, from the reference implementation.
  EXPECT_EQ(hash_to_hex(hash_bytes("", 0)), "2d06800538d394c2");
  std::string text(100'000, 'x');
  for (size_t i = 0; i < text.size(); ++i) text[i] = static_cast<char>(i * 7);
  StreamingHash hash;
  for (size_t i = 0; i < text.size(); i += 999) {
    hash.update(text.data() + i, std::min<size_t>(999, text.size() - i));
  }
  EXPECT_EQ(hash.digest(), hash_bytes(text.data(), text.size()));
  hash.reset();
  EXPECT_EQ(hash.digest(), hash_bytes(nullptr, 0));
}

TEST(Hash, HexadecimalRoundTripRefusesEverythingElse) {
  for (const uint64_t hash : {uint64_t{0}, ~uint64_t{0}, uint64_t{0x0123456789abcdef}}) {
    EXPECT_EQ(hash_from_hex(hash_to_hex(hash)), hash);
  }
  EXPECT_EQ(hash_to_hex(0x0123456789abcdef), "0123456789abcdef");
  for (const char* text : {"", "0123456789abcde", "0123456789abcdeF", "0123456789abcdeg",
                           "0123456789abcdef0", " 123456789abcdef"}) {
    EXPECT_FALSE(hash_from_hex(text).has_value()) << text;
  }
}

TEST(Json, HostileTextsAreRefused) {
  const auto refuse = [](const std::string& text) {
    return message_of(ExitStatus::failed, [&] { parse_json(text, "some.json", 4); });
  };
  expect_phrase(refuse("{\"a\": }"), "some.json: is not valid JSON at byte 7");
  expect_phrase(refuse("{\"a\": 1, \"a\": 2}"), "\"a\" is given twice");
  expect_phrase(refuse("{\"a\": {\"b\": 1, \"b\": 2}}"), "\"b\" is given twice");
  expect_phrase(refuse("[[[[[]]]]]"), "nested deeper than 4");
  expect_phrase(refuse(std::string(1'000'000, '[')), "nested deeper than 4");
  expect_phrase(refuse("1e999"), "some.json");
}

TEST(Json, TheLimitItselfAndRepeatedNamesInDifferentObjectsAreFine) {
  EXPECT_NO_THROW(parse_json("[[[{\"a\": 1}]], [[{\"a\": 1}]]]", "some.json", 4));
}

// The library's own conversions cut numbers that do not fit.
TEST(Json, WholeNumbersAreReadWithoutLoss) {
  const nlohmann::json object = nlohmann::json::parse(
      R"({"a": -7, "b": 18446744073709551615, "c": 7.0, "d": true, "e": 9223372036854775807})");
  const auto read = [&](const char* name, int64_t min, int64_t max) {
    return integer_field(object, name, min, max, "file");
  };
  EXPECT_EQ(read("a", -7, 0), -7);
  EXPECT_EQ(read("e", 0, INT64_MAX), INT64_MAX);
  for (const char* name : {"b", "c", "d"}) {
    expect_phrase(message_of(ExitStatus::failed, [&] { read(name, INT64_MIN, INT64_MAX); }),
                  std::string("file: the field \"") + name + "\" must be a whole number");
  }
  expect_phrase(message_of(ExitStatus::failed, [&] { read("a", -6, 0); }), "from -6 to 0");
  expect_phrase(message_of(ExitStatus::failed, [&] { read("a", -9, -8); }), "from -9 to -8");
  expect_phrase(message_of(ExitStatus::failed, [&] { read("x", 0, 1); }), "\"x\" is missing");
  expect_phrase(message_of(ExitStatus::failed,
                           [&] { integer_field(nlohmann::json::array(), "x", 0, 1, "file"); }),
                "\"x\" is missing");
}

}  // namespace
}  // namespace troupe
