#include "io/safetensors.h"

#include <cstring>
#include <limits>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "io/io_test_support.h"

namespace troupe {
namespace {

using io_test::expect_phrase;
using io_test::get_file;
using io_test::message_of;
using io_test::put_file;
using io_test::TempFolder;

// A file of this header, as it stands, and `data_bytes` bytes of data.
std::string file_of(const std::string& header, size_t data_bytes) {
  const uint64_t length = header.size();
  std::string contents(8, '\0');
  std::memcpy(contents.data(), &length, 8);
  contents += header;
  for (size_t i = 0; i < data_bytes; ++i) contents += static_cast<char>(i * 37 + 1);
  return contents;
}

std::string text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

std::span<const std::byte> bytes_of_text(const std::string& text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

// Writes all tensors of `file` to `path`, each in two pieces.
void write_again(const SafetensorsFile& file, const std::string& path) {
  const std::vector<TensorSpec> specs(file.entries().begin(), file.entries().end());
  const Disk disk;
  SafetensorsWriter writer(disk, path, specs, file.metadata());
  for (size_t i = 0; i < specs.size(); ++i) {
    const std::span<const std::byte> bytes = file.bytes(file.entries()[i]);
    writer.append(i, bytes.first(bytes.size() / 3));
    writer.append(i, bytes.subspan(bytes.size() / 3));
  }
  writer.finish();
  for (size_t i = 0; i < specs.size(); ++i) {
    const std::span<const std::byte> bytes = file.bytes(file.entries()[i]);
    EXPECT_EQ(writer.tensor_hashes().at(i), hash_bytes(bytes.data(), bytes.size()));
  }
  EXPECT_EQ(writer.file_bytes(), file_size(path));
  const SafetensorsFile again = SafetensorsFile::open(path);
  EXPECT_EQ(writer.header_hash(), hash_bytes(again.header().data(), again.header().size()));
}

TEST(Safetensors, RewritingAFileGivesTheSameBytes) {
  const TempFolder folder;
  // As Hugging Face's library writes it: metadata first, tensors in the order of their bytes,
  // padding by spaces to 8 bytes, a scalar, an empty tensor, a name that needs escapes.
  std::string header =
      R"({"__metadata__":{"format":"pt"},"a":{"dtype":"F64","shape":[2],"data_offsets":[0,16]},)"
      R"("b\"\u001f\n\\é":{"dtype":"F32","shape":[2,1,2],"data_offsets":[16,32]},)"
      R"("empty":{"dtype":"BF16","shape":[0,7],"data_offsets":[32,32]},)"
      R"("half":{"dtype":"F16","shape":[3],"data_offsets":[32,38]},)"
      R"("n":{"dtype":"I64","shape":[],"data_offsets":[38,46]},)"
      R"("i":{"dtype":"I32","shape":[1],"data_offsets":[46,50]},)"
      R"("bytes":{"dtype":"U8","shape":[5],"data_offsets":[50,55]}})";
  header.resize((header.size() + 7) / 8 * 8, ' ');
  put_file(folder / "a", file_of(header, 55));
  const SafetensorsFile file = SafetensorsFile::open(folder / "a");
  write_again(file, folder / "b");
  EXPECT_EQ(get_file(folder / "a"), get_file(folder / "b"));

  ASSERT_EQ(file.entries().size(), 7U);
  EXPECT_EQ(file.metadata(), (SafetensorsMetadata{{"format", "pt"}}));
  const TensorEntry* entry = file.find("b\"\x1f\n\\\xc3\xa9");
  ASSERT_NE(entry, nullptr);
  EXPECT_EQ(entry->dtype, FileDType::f32);
  EXPECT_EQ(entry->shape, (std::vector<int64_t>{2, 1, 2}));
  EXPECT_EQ(text_of(file.bytes(*entry)), get_file(folder / "a").substr(8 + header.size() + 16, 16));
  EXPECT_EQ(elements_of(*file.find("half")), 3);
  EXPECT_EQ(elements_of(*file.find("n")), 1);
  EXPECT_EQ(elements_of(*file.find("empty")), 0);
  EXPECT_EQ(file.find("none"), nullptr);
}

TEST(Safetensors, EntriesComeInTheOrderOfTheirBytes) {
  const TempFolder folder;
  put_file(folder / "f", file_of(R"({"late":{"data_offsets":[4,8],"shape":[1],"dtype":"F32"},)"
                                 R"("early":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})",
                                 8));
  const SafetensorsFile file = SafetensorsFile::open(folder / "f");
  EXPECT_EQ(file.entries()[0].name, "early");
  EXPECT_EQ(file.find("late")->begin, 4U);
  EXPECT_TRUE(file.metadata().empty());
}

TEST(Safetensors, AFileWithoutTensors) {
  const TempFolder folder;
  put_file(folder / "f", file_of("{}", 0));
  EXPECT_TRUE(SafetensorsFile::open(folder / "f").entries().empty());
  write_again(SafetensorsFile::open(folder / "f"), folder / "g");
}

// The length is that of the header alone; the eight bytes before it belong to the file, too.
TEST(Safetensors, AHeaderThatReachesPastTheFileByLessThanItsLengthIsRefused) {
  const TempFolder folder;
  const std::string whole = file_of("{}", 0);
  for (uint64_t length = whole.size() - 8 + 1; length <= whole.size(); ++length) {
    std::string contents = whole;
    std::memcpy(contents.data(), &length, sizeof length);
    put_file(folder / "f", contents);
    expect_phrase(message_of(ExitStatus::failed, [&] { SafetensorsFile::open(folder / "f"); }),
                  "beyond the end of the file");
  }
}

struct Broken {
  const char* what;
  std::string contents;
  const char* phrase;
};

std::string tensor(const std::string& shape, const std::string& offsets,
                   const std::string& dtype = "F32") {
  return R"({"dtype":")" + dtype + R"(","shape":)" + shape + R"(,"data_offsets":)" + offsets + "}";
}

TEST(Safetensors, BrokenFilesAreRefusedWithAClearMessage) {
  const std::string a = tensor("[2]", "[0,8]");
  const std::string nested(1'000'000, '[');
  std::string objects;
  for (int i = 0; i < 200'000; ++i) objects += "{\"a\":";
  std::string huge_length = file_of("{}", 0);
  huge_length[7] = '\x7f';
  std::string long_header = file_of("{}", 0);
  long_header[0] = 100;
  std::string above_the_limit = file_of("{}", 0);
  const uint64_t limit = kMaxSafetensorsHeaderBytes + 1;
  std::memcpy(above_the_limit.data(), &limit, 8);

  const std::vector<Broken> table = {
      {"empty file", "", "too short"},
      {"half a length", "1234", "too short"},
      {"header of 2^62 bytes", huge_length, "more than the format allows"},
      {"header just above the limit", above_the_limit, "more than the format allows"},
      {"header beyond the file", long_header, "beyond the end of the file"},
      {"no header", file_of("", 0), "does not begin with '{'"},
      {"an array at the top", file_of("[]", 0), "does not begin with '{'"},
      {"text instead of JSON", file_of("{hello}", 0), "not valid JSON at byte"},
      {"JSON cut short", file_of("{\"a\":", 0), "not valid JSON at byte"},
      {"something after the JSON", file_of("{}{}", 0), "not valid JSON at byte"},
      {"invalid UTF-8", file_of("{\"\xff\":" + a + "}", 8), "not valid JSON at byte"},
      {"deep arrays as a tensor", file_of("{\"a\":" + nested, 0), "tensor \"a\" has an array"},
      {"deep arrays as a shape", file_of("{\"a\":{\"shape\":" + nested, 0), "has an array"},
      {"deep objects", file_of("{\"a\":" + objects, 0), "has a field \"a\""},
      {"deep metadata", file_of("{\"__metadata__\":" + nested, 0), "the header has an array"},
      {"deep metadata value", file_of("{\"__metadata__\":{\"x\":" + nested, 0), "\"x\""},
      {"a number as a tensor", file_of("{\"a\":1}", 0), "tensor \"a\" has a number"},
      {"a boolean as a tensor", file_of("{\"a\":true}", 0), "tensor \"a\" has a boolean"},
      {"a negative number as a tensor", file_of("{\"a\":-1}", 0),
       "tensor \"a\" has a negative number where the format has an object"},
      {"a fraction as a tensor", file_of("{\"a\":0.5}", 0),
       "tensor \"a\" has a number with a fraction where the format has an object"},
      {"a text as an offset", file_of(R"({"a":{"data_offsets":["0"]}})", 0),
       "where the format has integers in \"data_offsets\""},
      {"null as a tensor", file_of("{\"a\":null}", 0), "tensor \"a\" has null"},
      {"a tensor without dtype", file_of(R"({"a":{"shape":[2],"data_offsets":[0,8]}})", 8),
       "tensor \"a\" has no \"dtype\""},
      {"a tensor without shape", file_of(R"({"a":{"dtype":"F32","data_offsets":[0,8]}})", 8),
       "tensor \"a\" has no \"shape\""},
      {"a tensor without offsets", file_of(R"({"a":{"dtype":"F32","shape":[2]}})", 8),
       "tensor \"a\" has no \"data_offsets\""},
      {"an unknown field", file_of(R"({"a":{"dtype":"F32","strides":[1]}})", 8),
       "a field \"strides\""},
      {"a field twice", file_of(R"({"a":{"dtype":"F32","dtype":"F32"}})", 8), "\"dtype\" twice"},
      {"an unknown dtype", file_of("{\"a\":" + tensor("[2]", "[0,8]", "F8_E5M2") + "}", 8),
       "\"F8_E5M2\", which is not supported"},
      {"a dtype that is no text", file_of(R"({"a":{"dtype":7}})", 8), "\"dtype\""},
      {"a negative extent", file_of("{\"a\":" + tensor("[-2]", "[0,8]") + "}", 8),
       "tensor \"a\" has a negative extent"},
      {"an extent with a fraction", file_of("{\"a\":" + tensor("[2.5]", "[0,8]") + "}", 8),
       "no integer of 63 bits"},
      {"an extent of 2^63", file_of("{\"a\":" + tensor("[9223372036854775808]", "[0,8]") + "}", 8),
       "no integer of 63 bits"},
      {"an extent of 2^70",
       file_of("{\"a\":" + tensor("[1180591620717411303424]", "[0,8]") + "}", 8),
       "no integer of 63 bits"},
      {"a shape that overflows to its right size",
       file_of("{\"a\":" + tensor("[4611686018427387904,4]", "[0,0]") + "}", 0), "overflows"},
      {"an overflow hidden by a zero",
       file_of("{\"a\":" + tensor("[0,4611686018427387904,4]", "[0,0]") + "}", 0), "overflows"},
      {"too many dimensions", file_of("{\"a\":" + tensor("[1,1,1,1,1,1,1,1,2]", "[0,8]") + "}", 8),
       "more than 8 dimensions"},
      {"a size that does not match", file_of("{\"a\":" + tensor("[3]", "[0,8]") + "}", 8),
       "tensor \"a\" takes 8 bytes, but its shape and dtype need 12"},
      {"one offset", file_of("{\"a\":" + tensor("[2]", "[0]") + "}", 8), "fewer than two"},
      {"three offsets", file_of("{\"a\":" + tensor("[2]", "[0,8,8]") + "}", 8), "more than two"},
      {"a negative offset", file_of("{\"a\":" + tensor("[2]", "[-8,0]") + "}", 8),
       "negative number in \"data_offsets\""},
      {"offsets reversed", file_of("{\"a\":" + tensor("[2]", "[8,0]") + "}", 8),
       "ends before it begins"},
      {"an end beyond the data", file_of("{\"a\":" + a + "}", 7), "beyond the 7 bytes of data"},
      {"an end of 2^64 - 1",
       file_of("{\"a\":" + tensor("[2]", "[18446744073709551607,18446744073709551615]") + "}", 8),
       "beyond the 8 bytes"},
      {"an overlap", file_of("{\"a\":" + a + ",\"b\":" + tensor("[2]", "[4,12]") + "}", 12),
       "tensor \"b\" at bytes [4, 12) overlaps tensor \"a\""},
      {"the same bytes twice", file_of("{\"a\":" + a + ",\"b\":" + a + "}", 8), "overlaps"},
      {"a gap", file_of("{\"a\":" + a + ",\"b\":" + tensor("[1]", "[12,16]") + "}", 16),
       "tensor \"b\" at bytes [12, 16) leaves a gap"},
      {"a gap at the beginning", file_of("{\"a\":" + tensor("[2]", "[4,12]") + "}", 12), "gap"},
      {"bytes that no tensor takes", file_of("{\"a\":" + a + "}", 9), "its tensors take only 8"},
      {"a name twice", file_of("{\"a\":" + a + ",\"a\":" + tensor("[2]", "[8,16]") + "}", 16),
       "tensor \"a\" is given twice"},
      {"metadata twice", file_of(R"({"__metadata__":{},"__metadata__":{}})", 0), "given twice"},
      {"a metadata name twice", file_of(R"({"__metadata__":{"x":"1","x":"2"}})", 0),
       "\"x\" is given twice"},
      {"metadata that is no text", file_of(R"({"__metadata__":{"x":1}})", 0), "\"x\""},
  };
  const TempFolder folder;
  for (const Broken& broken : table) {
    SCOPED_TRACE(broken.what);
    put_file(folder / "f.safetensors", broken.contents);
    const std::string message =
        message_of(ExitStatus::failed, [&] { SafetensorsFile::open(folder / "f.safetensors"); });
    expect_phrase(message, broken.phrase);
    expect_phrase(message, folder / "f.safetensors");
  }
}

TEST(Safetensors, EveryTruncationIsRefused) {
  const TempFolder folder;
  const std::string whole =
      file_of("{\"a\":" + tensor("[2]", "[0,8]") + ",\"b\":" + tensor("[1]", "[8,12]") + "}", 12);
  for (size_t length = 0; length < whole.size(); ++length) {
    put_file(folder / "f", whole.substr(0, length));
    message_of(ExitStatus::failed, [&] { SafetensorsFile::open(folder / "f"); });
  }
}

TEST(Safetensors, FlippingAnyBitOfAHeaderNeverLeavesTheFile) {
  const TempFolder folder;
  const std::string whole =
      file_of("{\"a\":" + tensor("[2]", "[0,8]") + ",\"b\":" + tensor("[1]", "[8,12]") + "}", 12);
  for (size_t bit = 0; bit < (whole.size() - 12) * 8; ++bit) {
    std::string damaged = whole;
    damaged[bit / 8] = static_cast<char>(damaged[bit / 8] ^ (1 << bit % 8));
    put_file(folder / "f", damaged);
    try {
      const SafetensorsFile file = SafetensorsFile::open(folder / "f");
      uint64_t bytes = 0;
      for (const TensorEntry& entry : file.entries()) bytes += file.bytes(entry).size();
      EXPECT_EQ(bytes + file.header().size(), whole.size());
    } catch (const UserError&) {
    }
  }
}

TEST(SafetensorsDeathTest, TheWriterHoldsItsCallerToTheAnnouncement) {
  const TempFolder folder;
  const Disk disk;
  const std::vector<TensorSpec> specs = {{"a", FileDType::u8, {2}}, {"b", FileDType::u8, {2}}};
  const std::string bytes = "123";
  SafetensorsWriter writer(disk, folder / "f", specs);
  EXPECT_DEATH(writer.append(0, bytes_of_text(bytes)), "too many bytes");
  EXPECT_DEATH(writer.append(1, bytes_of_text(bytes).first(2)), "in the order announced");
  EXPECT_DEATH(writer.finish(), "not all bytes of tensor a");
  EXPECT_DEATH(SafetensorsWriter(disk, folder / "g", {specs[0], specs[0]}), "given twice");
}

// A folder of four tensors of 8 bytes, written with the given limit.
void write_folder(const std::string& path, uint64_t max_shard_bytes) {
  const Disk disk;
  std::vector<TensorSpec> specs;
  for (const char* name : {"a", "b", "c", "d"}) specs.push_back({name, FileDType::f32, {2}});
  specs.push_back({"empty", FileDType::f32, {0}});
  SafetensorsFolderWriter writer(disk, path, specs, max_shard_bytes);
  for (size_t i = 0; i < 4; ++i) {
    const std::string bytes(8, static_cast<char>('A' + i));
    writer.append(i, bytes_of_text(bytes).first(5));
    writer.append(i, bytes_of_text(bytes).subspan(5));
  }
  writer.finish();
}

TEST(SafetensorsFolder, RoundTripsWithEveryShardSize) {
  const std::map<uint64_t, size_t> files_of_limit = {{1, 5}, {8, 4}, {16, 2}, {24, 2}, {32, 1}};
  for (const auto& [limit, files] : files_of_limit) {
    SCOPED_TRACE(limit);
    const TempFolder folder;
    write_folder(folder / "new/model", limit);
    const SafetensorsFolder model = SafetensorsFolder::open(folder / "new/model");
    EXPECT_EQ(model.files().size(), files);
    EXPECT_EQ(path_exists(folder / "new/model/model.safetensors"), files == 1);
    for (size_t i = 0; i < 4; ++i) {
      const SafetensorsFolder::Located found =
          model.find(std::string(1, static_cast<char>('a' + i)));
      ASSERT_NE(found.entry, nullptr);
      EXPECT_EQ(text_of(found.bytes()), std::string(8, static_cast<char>('A' + i)));
    }
    EXPECT_NE(model.find("empty").entry, nullptr);
    EXPECT_EQ(model.find("none").entry, nullptr);
    for (const auto& entry : std::filesystem::directory_iterator(folder / "new/model")) {
      EXPECT_NE(entry.path().extension(), ".tmp");
    }
  }
}

TEST(SafetensorsFolder, TheIndexIsThatOfHuggingFace) {
  const TempFolder folder;
  write_folder(folder.path(), 16);
  EXPECT_EQ(get_file(folder / "model.safetensors.index.json"),
            "{\n  \"metadata\": {\n    \"total_size\": 32\n  },\n  \"weight_map\": {\n"
            "    \"a\": \"model-00001-of-00002.safetensors\",\n"
            "    \"b\": \"model-00001-of-00002.safetensors\",\n"
            "    \"c\": \"model-00002-of-00002.safetensors\",\n"
            "    \"d\": \"model-00002-of-00002.safetensors\",\n"
            "    \"empty\": \"model-00002-of-00002.safetensors\"\n  }\n}\n");
}

TEST(SafetensorsFolder, AnUnfinishedWriterLeavesNothingBehind) {
  const TempFolder folder;
  const Disk disk;
  {
    SafetensorsFolderWriter writer(disk, folder.path(), {{"a", FileDType::u8, {2}}}, 100);
    EXPECT_TRUE(path_exists(folder / "model.safetensors.tmp"));
  }
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

TEST(SafetensorsFolder, AModelIsNotOverwritten) {
  const TempFolder folder;
  write_folder(folder.path(), 16);
  expect_phrase(message_of(ExitStatus::bad_request, [&] { write_folder(folder.path(), 100); }),
                "already holds a model");
}

TEST(SafetensorsFolder, BrokenFoldersAreRefusedWithFileAndTensor) {
  const std::string first = "model-00001-of-00002.safetensors";
  const std::string second = "model-00002-of-00002.safetensors";
  const std::string index = "model.safetensors.index.json";
  const auto refuse = [&](ExitStatus status, const auto& damage) {
    const TempFolder folder;
    write_folder(folder.path(), 16);
    damage(folder);
    return message_of(status, [&] { SafetensorsFolder::open(folder.path()); });
  };
  // Replaces one text in the index.
  const auto edit = [&](const std::string& from, const std::string& to) {
    return [&index, from, to](const TempFolder& folder) {
      std::string text = get_file(folder / index);
      const size_t at = text.find(from);
      ASSERT_NE(at, std::string::npos);
      put_file(folder / index, text.replace(at, from.size(), to));
    };
  };
  const ExitStatus failed = ExitStatus::failed;

  std::string message = refuse(failed, edit("\"d\": \"" + second, "\"d\": \"" + first));
  expect_phrase(message, first + ": tensor \"d\" is missing");
  message = refuse(failed, edit("    \"c\": \"" + second + "\",\n", ""));
  expect_phrase(message, second + ": tensor \"c\" is here, but");
  expect_phrase(refuse(failed, edit("\"a\": \"" + first, "\"a\": \"../" + first)),
                "tensor \"a\" names the file");
  expect_phrase(refuse(failed, edit("\"a\": \"" + first + "\"", "\"a\": 3")),
                "tensor \"a\" names no file");
  expect_phrase(refuse(failed, edit("\"b\":", "\"a\":")), "\"a\" is given twice");
  expect_phrase(refuse(failed, edit("weight_map", "weight_mop")), "\"weight_map\"");
  expect_phrase(refuse(failed, edit("{", "{{")), "not valid JSON");
  expect_phrase(refuse(failed, [&](const TempFolder& folder) { put_file(folder / index, "[]"); }),
                "\"weight_map\"");
  expect_phrase(
      refuse(failed, [&](const TempFolder& folder) { std::filesystem::remove(folder / second); }),
      second);
  expect_phrase(refuse(failed,
                       [&](const TempFolder& folder) {
                         std::filesystem::resize_file(folder / second,
                                                      file_size(folder / second) - 1);
                       }),
                "beyond the 15 bytes of data");
  expect_phrase(refuse(ExitStatus::bad_request,
                       [&](const TempFolder& folder) { std::filesystem::remove(folder / index); }),
                "holds neither");
  expect_phrase(refuse(ExitStatus::bad_request,
                       [&](const TempFolder& folder) {
                         std::filesystem::copy_file(folder / first, folder / "model.safetensors");
                       }),
                "holds both");
  expect_phrase(
      message_of(ExitStatus::bad_request, [] { SafetensorsFolder::open("/no/such/folder"); }),
      "/no/such/folder");
}

TEST(Shards, AreFilledInOrder) {
  using Sizes = std::vector<uint64_t>;
  using First = std::vector<size_t>;
  EXPECT_EQ(split_into_shards(Sizes{}, 10, 9), (First{0, 0}));
  EXPECT_EQ(split_into_shards(Sizes{4, 6, 1}, 10, 9), (First{0, 2, 3}));
  EXPECT_EQ(split_into_shards(Sizes{100, 1, 100}, 10, 9), (First{0, 1, 2, 3}));
  EXPECT_EQ(split_into_shards(Sizes{0, 0, 0, 0}, 10, 3), (First{0, 3, 4}));
  const uint64_t most = std::numeric_limits<uint64_t>::max();
  EXPECT_EQ(split_into_shards(Sizes{most - 1, 2}, most, 9), (First{0, 1, 2}));
}

}  // namespace
}  // namespace troupe
