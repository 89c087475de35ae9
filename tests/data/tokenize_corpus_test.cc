#include "data/tokenize_corpus.h"

#include <gtest/gtest.h>
#include <string>
#include <sys/stat.h>
#include <utility>
#include <vector>

#include "data/data_test_support.h"
#include "data/make_tokenizer.h"

namespace troupe {
namespace {

// The documents of a data set as text, each checked to end with the end of a document.
std::vector<std::string> documents_of(const std::string& prefix) {
  const auto tokenizer = make_tokenizer({});
  const IndexedDataset dataset(prefix);
  EXPECT_EQ(dataset.num_documents(), dataset.num_sequences());
  std::vector<std::string> texts;
  for (int64_t i = 0; i < dataset.num_sequences(); ++i) {
    std::vector<int32_t> ids(static_cast<size_t>(dataset.sequence_length(i)));
    dataset.read(i, 0, dataset.sequence_length(i), ids.data());
    EXPECT_EQ(ids.back(), tokenizer->eod());
    texts.push_back(tokenizer->decode(ids));
    EXPECT_EQ(texts.back().size() + 1, ids.size());
  }
  return texts;
}

TokenizeResult run(const TokenizeOptions& options, int threads = 2) {
  ThreadPool pool(threads);
  return tokenize_corpus(*make_tokenizer({}), options, pool);
}

using Texts = std::vector<std::string>;

TEST(TokenizeCorpus, OneDocumentPerFile) {
  const TempFolder dir;
  put_file(dir / "b.txt", "second\n\n\n");
  put_file(dir / "empty.txt", "");
  put_file(dir / "a.txt", std::string("fir\0st\xff", 7));
  TokenizeOptions options;
  options.inputs = {dir / "b.txt", dir / "empty.txt", dir / "a.txt"};
  options.output_prefix = dir / "set";
  const TokenizeResult result = run(options);
  EXPECT_TRUE(result.completed);
  EXPECT_EQ(result.empty_documents, 1);
  EXPECT_EQ(result.progress.documents, 2);
  EXPECT_EQ(result.progress.tokens, 10 + 8);
  EXPECT_EQ(result.progress.bytes_done, 16U);
  EXPECT_EQ(result.progress.bytes_total, 16U);
  EXPECT_EQ(documents_of(dir / "set"), (Texts{"second\n\n\n", std::string("fir\0st\xff", 7)}));
}

TEST(TokenizeCorpus, LargeFileIsReadWhole) {
  const TempFolder dir;
  std::string text(2'500'000, 'a');
  for (size_t i = 0; i < text.size(); i += 7) text[i] = static_cast<char>(i % 251);
  put_file(dir / "a.txt", text);
  TokenizeOptions options;
  options.inputs = {dir / "a.txt"};
  options.output_prefix = dir / "set";
  run(options);
  EXPECT_TRUE(documents_of(dir / "set") == Texts{text});
}

TEST(TokenizeCorpus, SplitsAtBlankLines) {
  struct Case {
    const char* text;
    int lines;
    Texts documents;
  };
  const std::vector<Case> cases = {
      {"one\ntwo\n\nthree\n", 1, {"one\ntwo", "three"}},
      {"\n\none\n \t\r\n\f\nthree", 1, {"one", "three"}},
      {"one\n\ntwo\n\n\nthree\n\n\n", 2, {"one\n\ntwo", "three"}},
      {"one\n\ntwo\n\n\n\nthree", 3, {"one\n\ntwo", "three"}},
      {"  one \r\n\r\ntwo\r\n", 1, {"  one \r", "two\r"}},
      {"one", 1, {"one"}},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.text);
    const TempFolder dir;
    put_file(dir / "a.txt", c.text);
    TokenizeOptions options;
    options.inputs = {dir / "a.txt"};
    options.output_prefix = dir / "set";
    options.split_blank_lines = c.lines;
    const TokenizeResult result = run(options);
    EXPECT_EQ(result.progress.bytes_done, std::string(c.text).size());
    EXPECT_EQ(documents_of(dir / "set"), c.documents);
  }
}

TEST(TokenizeCorpus, FilesEndDocuments) {
  const TempFolder dir;
  put_file(dir / "a.txt", "one\n\ntwo");
  put_file(dir / "b.txt", "three");
  TokenizeOptions options;
  options.inputs = {dir / "a.txt", dir / "b.txt"};
  options.output_prefix = dir / "set";
  options.split_blank_lines = 1;
  run(options);
  EXPECT_EQ(documents_of(dir / "set"), (Texts{"one", "two", "three"}));
}

TEST(TokenizeCorpus, JsonLines) {
  const TempFolder dir;
  put_file(dir / "a.jsonl",
           "{\"text\": \"one\\n\\u00e9\", \"id\": 1}\n"
           "\n"
           "{\"id\": 2, \"text\": \"\"}\r\n"
           "{\"text\": \"last\"}");
  TokenizeOptions options;
  options.inputs = {dir / "a.jsonl"};
  options.output_prefix = dir / "set";
  const TokenizeResult result = run(options);
  EXPECT_EQ(result.empty_documents, 1);
  EXPECT_EQ(result.progress.bytes_done, result.progress.bytes_total);
  EXPECT_EQ(documents_of(dir / "set"), (Texts{"one\n\xc3\xa9", "last"}));
}

TEST(TokenizeCorpus, FormatAndKeyCanBeChosen) {
  const TempFolder dir;
  put_file(dir / "a.data", "{\"body\": \"one\"}\n");
  TokenizeOptions options;
  options.inputs = {dir / "a.data"};
  options.output_prefix = dir / "set";
  options.format = CorpusFormat::jsonl;
  options.json_key = "body";
  run(options);
  EXPECT_EQ(documents_of(dir / "set"), Texts{"one"});

  options.format = CorpusFormat::by_extension;
  options.overwrite = true;
  run(options);
  EXPECT_EQ(documents_of(dir / "set"), Texts{"{\"body\": \"one\"}\n"});

  for (const std::string name : {"b.json", "b.jsonl"}) {
    put_file(dir / name, "{\"body\": \"two\"}\n");
    options.inputs = {dir / name};
    run(options);
    EXPECT_EQ(documents_of(dir / "set"), Texts{"two"}) << name;
  }
}

TEST(TokenizeCorpus, MalformedJsonNamesFileAndLineAndLeavesNothing) {
  struct Case {
    const char* line;
    const char* message;
  };
  const std::vector<Case> cases = {
      {"{\"text\": \"cut", "line 3: not valid JSON at byte 14"},
      {"{\"text\": \"\xff\"}", "line 3: not valid JSON at byte 11"},
      {"{\"text\": \"one\"} {}", "line 3: not valid JSON at byte 17"},
      {"{\"text\": 1e999}", "line 3: valid JSON, but a number in it is too large"},
      {"[\"text\"]", "a JSON array"},
      {"{\"body\": \"one\"}", "no field \"text\""},
      {"{\"text\": 3}", "is a JSON number, not a string"},
      {"{\"text\": null}", "is a JSON null"},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.line);
    const TempFolder dir;
    put_file(dir / "a.jsonl", std::string("{\"text\": \"fine\"}\n\n") + c.line + "\n");
    TokenizeOptions options;
    options.inputs = {dir / "a.jsonl"};
    options.output_prefix = dir / "set";
    const std::string message = message_of(ExitStatus::bad_request, [&] { run(options); });
    EXPECT_TRUE(contains(message, (dir / "a.jsonl") + ", line 3: ")) << message;
    EXPECT_TRUE(contains(message, c.message)) << message;
    EXPECT_EQ(dir.files(), Texts{"a.jsonl"});
  }
}

// The JSON library's message holds all of the text that it read last.
TEST(TokenizeCorpus, MalformedJsonGivesAMessageFitToBeShown) {
  const TempFolder dir;
  put_file(dir / "a.jsonl", "{\"text\": \"" + std::string(100'000, '\x7f') + "\xff\"}");
  TokenizeOptions options;
  options.inputs = {dir / "a.jsonl"};
  options.output_prefix = dir / "set";
  const std::string message = message_of(ExitStatus::bad_request, [&] { run(options); });
  EXPECT_TRUE(contains(message, "not valid JSON")) << message.substr(0, 1000);
  EXPECT_LT(message.size(), 1000U);
  EXPECT_FALSE(contains(message, "\x7f"));
}

TEST(TokenizeCorpus, ProgressRisesToTheTotal) {
  const TempFolder dir;
  put_file(dir / "a.txt", "one\n\ntwo\n\nthree\n");
  TokenizeOptions options;
  options.inputs = {dir / "a.txt"};
  options.output_prefix = dir / "set";
  options.split_blank_lines = 1;
  std::vector<TokenizeProgress> seen;
  options.on_progress = [&](const TokenizeProgress& progress) { seen.push_back(progress); };
  run(options);
  ASSERT_EQ(seen.size(), 3U);
  for (size_t i = 0; i < seen.size(); ++i) {
    EXPECT_EQ(seen[i].documents, static_cast<int64_t>(i) + 1);
    EXPECT_EQ(seen[i].bytes_total, 16U);
    EXPECT_LE(seen[i].bytes_done, 16U);
  }
  EXPECT_LT(seen[0].bytes_done, seen[1].bytes_done);
  EXPECT_LT(seen[0].tokens, seen[1].tokens);
  EXPECT_EQ(seen[2].bytes_done, 16U);
}

// Several batches of documents of very different lengths, JSON lines and text.
TEST(TokenizeCorpus, OutputIsTheSameForAnyNumberOfThreads) {
  const TempFolder dir;
  std::string lines;
  std::string text;
  for (int i = 0; lines.size() < 5'000'000; ++i) {
    const std::string document(static_cast<size_t>(i * i % 50'021),
                               static_cast<char>('a' + i % 26));
    lines += "{\"text\": \"" + document + "\"}\n";
    text += document + "\n\n";
  }
  put_file(dir / "a.jsonl", lines);
  put_file(dir / "b.txt", text);
  const std::string model = std::string(TROUPE_FIXTURE_DIR) + "/tokenizers/gpt2";
  const auto tokenizer = make_tokenizer(read_tokenizer_model("HuggingFaceTokenizer", model));
  std::vector<std::string> bins;
  std::vector<std::string> indices;
  for (const int threads : {1, 2, 5}) {
    ThreadPool pool(threads);
    TokenizeOptions options;
    options.inputs = {dir / "a.jsonl"};
    options.output_prefix = dir / std::to_string(threads);
    const TokenizeResult result = tokenize_corpus(*tokenizer, options, pool);
    EXPECT_EQ(result.progress.bytes_done, lines.size());
    EXPECT_GE(result.empty_documents, 1);
    options.inputs = {dir / "b.txt"};
    options.output_prefix += "b";
    options.split_blank_lines = 1;
    tokenize_corpus(*tokenizer, options, pool);
    for (const char* which : {"", "b"}) {
      bins.push_back(get_file(dir / (std::to_string(threads) + which + ".bin")));
      indices.push_back(get_file(dir / (std::to_string(threads) + which + ".idx")));
    }
  }
  for (size_t i = 1; i < bins.size(); ++i) {
    EXPECT_TRUE(bins[i] == bins[0]) << i;
    EXPECT_TRUE(indices[i] == indices[0]) << i;
  }
}

// Of several wrong lines the first is named, whichever thread finds one first.
TEST(TokenizeCorpus, TheFirstWrongLineIsNamed) {
  const TempFolder dir;
  std::string lines;
  for (int i = 1; i <= 200; ++i) lines += i >= 100 ? "{]\n" : "{\"text\": \"fine\"}\n";
  put_file(dir / "a.jsonl", lines);
  TokenizeOptions options;
  options.inputs = {dir / "a.jsonl"};
  options.output_prefix = dir / "set";
  const std::string message = message_of(ExitStatus::bad_request, [&] { run(options, 4); });
  EXPECT_TRUE(contains(message, "line 100: ")) << message;
  EXPECT_EQ(dir.files(), Texts{"a.jsonl"});
}

TEST(TokenizeCorpus, StoppingLeavesTheOldOutputAndNoOther) {
  const TempFolder dir;
  put_file(dir / "a.txt", "one\n\ntwo\n\nthree\n");
  TokenizeOptions options;
  options.inputs = {dir / "a.txt"};
  options.output_prefix = dir / "set";
  run(options);

  options.overwrite = true;
  options.split_blank_lines = 1;
  int64_t documents = 0;
  options.on_progress = [&](const TokenizeProgress& progress) { documents = progress.documents; };
  options.stop_requested = [&] { return documents == 2; };
  const TokenizeResult result = run(options);
  EXPECT_FALSE(result.completed);
  EXPECT_EQ(result.progress.documents, 2);
  EXPECT_EQ(documents_of(dir / "set"), Texts{"one\n\ntwo\n\nthree\n"});
  EXPECT_EQ(dir.files().size(), 3U);
}

// Of each kind the first bytes that its own tool writes.
TEST(TokenizeCorpus, FilesOfOtherKindsAreRefusedByName) {
  const TempFolder dir;
  using namespace std::string_literals;
  const std::vector<std::pair<std::string, std::string>> kinds = {
      {"\x1f\x8b\x08\x00"s, "a gzip file"},  {"\x28\xb5\x2f\xfd\x24"s, "a Zstandard file"},
      {"\xfd"s + "7zXZ\x00"s, "an xz file"}, {"BZh91AY&SY\x01"s, "a bzip2 file"},
      {"PK\x03\x04\x14"s, "a zip archive"},  {"PAR1\x15\x04\x15"s, "a Parquet file"},
      {"ARROW1\x00\x00"s, "an Arrow file"}};
  for (const auto& [begin, name] : kinds) {
    put_file(dir / "in.txt", begin + "rest of the file");
    TokenizeOptions options;
    options.inputs = {dir / "in.txt"};
    options.output_prefix = dir / "set";
    const std::string message = message_of(ExitStatus::bad_request, [&] { run(options); });
    EXPECT_TRUE(contains(message, "in.txt is " + name)) << message;
    EXPECT_EQ(dir.files(), Texts{"in.txt"}) << "nothing is written";
  }
  put_file(dir / "in.txt", "PARIS, BZhang and PKs are text");
  TokenizeOptions options;
  options.inputs = {dir / "in.txt"};
  options.output_prefix = dir / "set";
  EXPECT_EQ(run(options).progress.documents, 1);
}

TEST(TokenizeCorpus, OnlyRegularFilesAreRead) {
  const TempFolder dir;
  ASSERT_EQ(mkfifo((dir / "pipe").c_str(), 0600), 0);
  for (const std::string& path : {dir / "pipe", std::string("/dev/zero")}) {
    TokenizeOptions options;
    options.inputs = {path};
    options.output_prefix = dir / "set";
    const std::string message = message_of(ExitStatus::bad_request, [&] { run(options); });
    EXPECT_TRUE(contains(message, path + " is no regular file")) << message;
  }
}

// A line or a document beyond the bound is refused after no more than the bound has been kept.
TEST(TokenizeCorpus, DocumentsHaveABound) {
  const TempFolder dir;
  put_file(dir / "in.txt", "0123456789\n\n0123\n4567\n");
  put_file(dir / "in.jsonl", "{\"text\": \"0123456789\"}\n");
  TokenizeOptions options;
  options.output_prefix = dir / "set";
  options.overwrite = true;
  const auto refused = [&](const std::string& input, int blank_lines, uint64_t bound) {
    options.inputs = {dir / input};
    options.split_blank_lines = blank_lines;
    options.longest_document = bound;
    return message_of(ExitStatus::bad_request, [&] { run(options); });
  };
  EXPECT_TRUE(contains(refused("in.txt", 0, 21), "in.txt: a document of more than 21 bytes"));
  EXPECT_TRUE(contains(refused("in.txt", 1, 9), "in.txt, line 1: more than 9 bytes"));
  EXPECT_TRUE(contains(refused("in.jsonl", 0, 21), "in.jsonl, line 1: more than 21 bytes"));
  put_file(dir / "in.txt", "01234\n\n0123\n4567\n");
  EXPECT_TRUE(contains(refused("in.txt", 1, 8), "in.txt: a document of more than 8 bytes"));
  options.longest_document = 9;
  EXPECT_EQ(run(options).progress.documents, 2) << "as long as the bound is allowed";
}

// Read in pieces of a MiB: a line may end with one, or lie across several.
TEST(TokenizeCorpus, LinesLieAcrossPieces) {
  const TempFolder dir;
  const size_t piece = size_t{1} << 20;
  const Texts lines = {std::string(piece - 1, 'a'), std::string(5, 'b'),
                       std::string(3 * piece, 'c'), std::string(piece, 'd')};
  std::string text;
  for (const std::string& line : lines) text += line + "\n\n";
  put_file(dir / "in.txt", text);
  TokenizeOptions options;
  options.inputs = {dir / "in.txt"};
  options.output_prefix = dir / "set";
  options.split_blank_lines = 1;
  EXPECT_EQ(run(options).progress.bytes_done, text.size());
  EXPECT_TRUE(documents_of(dir / "set") == lines);
}

TEST(TokenizeCorpus, WrongRequests) {
  const TempFolder dir;
  put_file(dir / "blank.txt", "\n \n");
  put_file(dir / "a.jsonl", "{\"text\": \"one\"}\n");
  struct Case {
    Texts inputs;
    int lines;
    const char* message;
  };
  const std::vector<Case> cases = {
      {{}, 0, "no input file"},
      {{dir / "missing.txt"}, 0, "missing.txt does not exist"},
      {{dir / ""}, 0, "is a folder"},
      {{dir / "blank.txt"}, 1, "no text in the 1 input file(s)"},
      {{dir / "blank.txt"}, -1, "-1 blank lines"},
      {{dir / "a.jsonl"}, 1, "leave one of the two out"},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.message);
    TokenizeOptions options;
    options.inputs = c.inputs;
    options.output_prefix = dir / "set";
    options.split_blank_lines = c.lines;
    const std::string message = message_of(ExitStatus::bad_request, [&] { run(options); });
    EXPECT_TRUE(contains(message, c.message)) << message;
    EXPECT_EQ(dir.files().size(), 2U);
  }
}

}  // namespace
}  // namespace troupe
