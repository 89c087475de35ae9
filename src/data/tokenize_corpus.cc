#include "data/tokenize_corpus.h"

#include <algorithm>
#include <cerrno>
#include <exception>
#include <filesystem>
#include <fmt/format.h>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include "base/error.h"
#include "data/indexed_dataset.h"
#include "data/json_text.h"

namespace troupe {
namespace {

constexpr size_t kChunkSize = size_t{1} << 20;

// Text of one batch, per thread: some tenths of a second of work, so that the threads seldom wait
// for one another and a request to stop is soon heard.
constexpr size_t kBatchBytesPerThread = size_t{2} << 20;

constexpr std::string_view kStandardInput = "-";

bool is_blank(std::string_view line) {
  return line.find_first_not_of(" \t\r\f\v") == std::string_view::npos;
}

bool is_json_lines(const std::string& path, CorpusFormat format) {
  if (format != CorpusFormat::by_extension) return format == CorpusFormat::jsonl;
  return path.ends_with(".jsonl") || path.ends_with(".json");
}

// The text of a line of a JSON lines file.
std::string text_of_line(const std::string& path, int64_t number, const std::string& line,
                         const std::string& key) {
  std::string problem;
  std::optional<nlohmann::json> parsed = parse_json_text(line, problem);
  if (!parsed) throw_bad_request(fmt::format("{}, line {}: {}", path, number, problem));
  nlohmann::json& object = *parsed;
  if (!object.is_object()) {
    throw_bad_request(
        fmt::format("{}, line {}: a JSON {}, where an object like {{\"{}\": "
                    "\"...\"}} belongs",
                    path, number, object.type_name(), key));
  }
  const auto field = object.find(key);
  if (field == object.end()) {
    throw_bad_request(
        fmt::format("{}, line {}: the object has no field \"{}\"; name the field "
                    "that holds the text",
                    path, number, key));
  }
  if (!field->is_string()) {
    throw_bad_request(fmt::format("{}, line {}: field \"{}\" is a JSON {}, not a string", path,
                                  number, key, field->type_name()));
  }
  return std::move(field->get_ref<std::string&>());
}

// What people have text in that is none: how such files begin.
struct FileKind {
  std::string_view magic;
  std::string_view name;
  std::string_view remedy;
};
constexpr std::string_view kUnpack =
    "Unpack it, or pipe the unpacked text into --input - (with --input-format).";
constexpr FileKind kFileKinds[] = {
    {"\x1f\x8b", "a gzip file", kUnpack},
    {"\x28\xb5\x2f\xfd", "a Zstandard file", kUnpack},
    {"\xfd"
     "7zXZ",
     "an xz file", kUnpack},
    {"BZh91AY&SY", "a bzip2 file", kUnpack},
    {"PK\x03\x04", "a zip archive", kUnpack},
    {"PAR1\x15", "a Parquet file", "Write its text column as JSON lines first."},
    {"ARROW1", "an Arrow file", "Write its text column as JSON lines first."},
};

// `begin`: of what the input holds, at least the longest `magic` or all.
void refuse_other_kinds(const std::string& path, std::string_view begin) {
  for (const FileKind& kind : kFileKinds) {
    if (!begin.starts_with(kind.magic)) continue;
    throw_bad_request(fmt::format("input {} is {}, not text. {}", path, kind.name, kind.remedy));
  }
}

void refuse_other_kinds(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  char begin[16] = {};
  in.read(begin, sizeof(begin));
  refuse_other_kinds(path, std::string_view(begin, static_cast<size_t>(in.gcount())));
}

// The lines of an input, each of at most `longest` bytes.
class LineReader {
 public:
  LineReader(std::istream& in, const std::string& name, uint64_t longest)
      : in_(in), name_(name), longest_(longest) {}

  // The next line without its newline; false at the end. `bytes`: with the newline.
  bool next(std::string& line, uint64_t& bytes) {
    line.clear();
    bytes = 0;
    ++number_;
    while (true) {
      if (at_ == buffer_.size() && !fill()) return bytes > 0;
      const size_t end = std::min(buffer_.find('\n', at_), buffer_.size());
      line.append(buffer_, at_, end - at_);
      bytes += end - at_;
      at_ = end;
      if (line.size() > longest_) refuse();
      if (end == buffer_.size()) continue;
      ++at_;
      ++bytes;
      return true;
    }
  }

 private:
  bool fill() {
    buffer_.resize(kChunkSize);
    in_.read(buffer_.data(), static_cast<std::streamsize>(kChunkSize));
    buffer_.resize(static_cast<size_t>(in_.gcount()));
    if (std::exchange(is_begin_, false)) refuse_other_kinds(name_, buffer_);
    at_ = 0;
    return !buffer_.empty();
  }

  [[noreturn]] void refuse() const {
    throw_bad_request(
        fmt::format("{}, line {}: more than {} bytes; documents and lines have at most that many",
                    name_, number_, longest_));
  }

  std::istream& in_;
  const std::string& name_;
  const uint64_t longest_;
  std::string buffer_;
  size_t at_ = 0;
  bool is_begin_ = true;
  int64_t number_ = 0;
};

// A document on its way from the input to the output.
struct Document {
  std::string text;
  const std::string* path = nullptr;  // JSON lines: text is still the line with this number
  int64_t line = 0;
  uint64_t bytes_done = 0;  // of the inputs when it had been read

  std::vector<int32_t> ids = {};  // empty when the text is
  std::exception_ptr error = {};
};

// One run over all inputs. Its functions that read return false when asked to stop.
class Run {
 public:
  Run(const Tokenizer& tokenizer, const TokenizeOptions& options, ThreadPool& pool)
      : tokenizer_(tokenizer),
        options_(options),
        pool_(pool),
        writer_(options.output_prefix, token_type_for_vocabulary(tokenizer.vocab_size()),
                options.overwrite) {}

  TokenizeResult run() {
    for (const std::string& path : options_.inputs) {
      if (!file(path)) return result_;
    }
    if (!write_batch()) return result_;
    result_.progress.bytes_done = bytes_read_;
    if (result_.progress.documents == 0) {
      throw_bad_request(
          fmt::format("no text in the {} input file(s), the first of which is {}: nothing to write",
                      options_.inputs.size(), options_.inputs.front()));
    }
    writer_.finish();
    result_.completed = true;
    return result_;
  }

  void add_input_size(uint64_t bytes) { result_.progress.bytes_total += bytes; }

 private:
  bool file(const std::string& path) {
    const std::string source = path == kStandardInput ? "/dev/stdin" : path;
    std::ifstream in(source, std::ios::binary);
    if (!in) {
      throw_failed(fmt::format("cannot open {}: {}", path, std::generic_category().message(errno)));
    }
    bool go_on = false;
    if (is_json_lines(path, options_.format)) {
      go_on = json_lines(path, in);
    } else if (options_.split_blank_lines > 0) {
      go_on = split_text(path, in);
    } else {
      go_on = whole_text(path, in);
    }
    if (in.bad()) throw_failed(fmt::format("cannot read {}: the disk reports an error", path));
    return go_on;
  }

  bool whole_text(const std::string& path, std::ifstream& in) {
    std::string text;
    while (in) {
      const size_t size = text.size();
      text.resize(size + kChunkSize);
      in.read(text.data() + size, static_cast<std::streamsize>(kChunkSize));
      text.resize(size + static_cast<size_t>(in.gcount()));
      if (size == 0) refuse_other_kinds(path, text);
      check_length(path, text.size());
      if (stopped()) return false;
    }
    if (in.bad()) return true;
    bytes_read_ += text.size();
    return document({.text = std::move(text)});
  }

  bool split_text(const std::string& path, std::ifstream& in) {
    LineReader lines(in, path, options_.longest_document);
    std::string text;
    std::string line;
    int64_t blank_lines = 0;  // since the last line that was not blank
    while (next_line(lines, line)) {
      if (is_blank(line)) {
        ++blank_lines;
        continue;
      }
      if (blank_lines >= options_.split_blank_lines && !text.empty()) {
        if (!document({.text = std::move(text)})) return false;
        text.clear();
      }
      // Blank lines inside a document are kept as empty lines.
      if (!text.empty()) text.append(static_cast<size_t>(blank_lines) + 1, '\n');
      text += line;
      check_length(path, text.size());
      blank_lines = 0;
    }
    return text.empty() || document({.text = std::move(text)});
  }

  bool json_lines(const std::string& path, std::ifstream& in) {
    LineReader lines(in, path, options_.longest_document);
    std::string line;
    int64_t number = 0;
    while (next_line(lines, line)) {
      ++number;
      if (is_blank(line)) continue;
      if (!document({.text = line, .path = &path, .line = number})) return false;
    }
    return true;
  }

  bool next_line(LineReader& lines, std::string& line) {
    uint64_t bytes = 0;
    if (!lines.next(line, bytes)) return false;
    bytes_read_ += bytes;
    return true;
  }

  void check_length(const std::string& path, size_t bytes) const {
    if (bytes <= options_.longest_document) return;
    throw_bad_request(fmt::format(
        "{}: a document of more than {} bytes. --split-documents N ends documents at N blank "
        "lines, and in JSON lines each line is one.",
        path, options_.longest_document));
  }

  bool document(Document document) {
    if (stopped()) return false;
    document.bytes_done = bytes_read_;
    batch_bytes_ += document.text.size();
    batch_.push_back(std::move(document));
    return batch_bytes_ < kBatchBytesPerThread * static_cast<size_t>(pool_.threads()) ||
           write_batch();
  }

  bool write_batch() {
    pool_.parallel_for(static_cast<int64_t>(batch_.size()),
                       [&](int64_t i, int /*worker*/) { encode(batch_[static_cast<size_t>(i)]); });
    for (const Document& document : batch_) {
      if (stopped()) return false;
      // Errors come in the order of the documents, whichever thread met one first.
      if (document.error) std::rethrow_exception(document.error);
      write(document);
    }
    batch_.clear();
    batch_bytes_ = 0;
    return true;
  }

  // Called by the pool's threads.
  void encode(Document& document) const {
    try {
      if (document.path != nullptr) {
        document.text =
            text_of_line(*document.path, document.line, document.text, options_.json_key);
      }
      if (document.text.empty()) return;
      tokenizer_.encode(document.text, document.ids);
      document.ids.push_back(tokenizer_.eod());
    } catch (...) {
      document.error = std::current_exception();
    }
  }

  void write(const Document& document) {
    if (document.ids.empty()) {
      ++result_.empty_documents;
      return;
    }
    writer_.append(document.ids);
    writer_.end_sequence();
    writer_.end_document();
    ++result_.progress.documents;
    result_.progress.bytes_done = document.bytes_done;
    result_.progress.tokens = writer_.num_tokens();
    if (options_.on_progress) options_.on_progress(result_.progress);
  }

  bool stopped() const { return options_.stop_requested && options_.stop_requested(); }

  const Tokenizer& tokenizer_;
  const TokenizeOptions& options_;
  ThreadPool& pool_;
  IndexedDatasetWriter writer_;
  TokenizeResult result_;
  uint64_t bytes_read_ = 0;
  std::vector<Document> batch_;
  size_t batch_bytes_ = 0;
};

}  // namespace

TokenizeResult tokenize_corpus(const Tokenizer& tokenizer, const TokenizeOptions& options,
                               ThreadPool& pool) {
  if (options.inputs.empty()) throw_bad_request("no input file to tokenize; name at least one");
  if (options.split_blank_lines < 0) {
    throw_bad_request(fmt::format(
        "documents cannot be split at runs of {} blank lines; give 0 (one document per file) or "
        "more",
        options.split_blank_lines));
  }
  // All inputs are looked at before the first is read: a misspelt name at the end of a long list
  // must not cost the whole run.
  uint64_t bytes = 0;
  for (const std::string& path : options.inputs) {
    std::error_code error;
    if (path == kStandardInput) continue;
    const auto status = std::filesystem::status(path, error);
    if (!std::filesystem::exists(status)) {
      throw_bad_request(fmt::format("input file {} does not exist", path));
    }
    if (std::filesystem::is_directory(status)) {
      throw_bad_request(
          fmt::format("input {} is a folder; name the files inside it instead", path));
    }
    if (!std::filesystem::is_regular_file(status)) {
      throw_bad_request(fmt::format(
          "input {} is no regular file; pipe text from elsewhere into --input -.", path));
    }
    const uintmax_t size = std::filesystem::file_size(path, error);
    if (!error) bytes += size;
    refuse_other_kinds(path);
    if (options.split_blank_lines > 0 && is_json_lines(path, options.format)) {
      throw_bad_request(fmt::format(
          "input {} is read as JSON lines, where each line is a document: splitting at blank lines "
          "has no meaning there; leave one of the two out",
          path));
    }
  }
  Run run(tokenizer, options, pool);
  run.add_input_size(bytes);
  return run.run();
}

}  // namespace troupe
