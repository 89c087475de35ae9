#include "data/tokenize_corpus.h"

#include <algorithm>
#include <cerrno>
#include <exception>
#include <filesystem>
#include <fmt/format.h>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string_view>
#include <system_error>

#include "base/error.h"
#include "base/text.h"
#include "data/indexed_dataset.h"

namespace troupe {
namespace {

constexpr size_t kChunkSize = size_t{1} << 20;

// Text of one batch, per thread: some tenths of a second of work, so that the threads seldom wait
// for one another and a request to stop is soon heard.
constexpr size_t kBatchBytesPerThread = size_t{2} << 20;

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
  nlohmann::json object;
  try {
    object = nlohmann::json::parse(line);
  } catch (const nlohmann::json::exception& error) {
    throw_bad_request(fmt::format("{}, line {}: not valid JSON: {}", path, number,
                                  printable(error.what(), kLongestComplaint)));
  }
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
    std::ifstream in(path, std::ios::binary);
    if (!in) {
      throw_failed(fmt::format("cannot open {}: {}", path, std::generic_category().message(errno)));
    }
    bool go_on = false;
    if (is_json_lines(path, options_.format)) {
      go_on = json_lines(path, in);
    } else if (options_.split_blank_lines > 0) {
      go_on = split_text(in);
    } else {
      go_on = whole_text(in);
    }
    if (in.bad()) throw_failed(fmt::format("cannot read {}: the disk reports an error", path));
    return go_on;
  }

  bool whole_text(std::ifstream& in) {
    std::string text;
    while (in) {
      const size_t size = text.size();
      text.resize(size + kChunkSize);
      in.read(text.data() + size, static_cast<std::streamsize>(kChunkSize));
      text.resize(size + static_cast<size_t>(in.gcount()));
      if (stopped()) return false;
    }
    if (in.bad()) return true;
    bytes_read_ += text.size();
    return document({.text = std::move(text)});
  }

  bool split_text(std::ifstream& in) {
    std::string text;
    std::string line;
    int64_t blank_lines = 0;  // since the last line that was not blank
    while (next_line(in, line)) {
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
      blank_lines = 0;
    }
    return text.empty() || document({.text = std::move(text)});
  }

  bool json_lines(const std::string& path, std::ifstream& in) {
    std::string line;
    int64_t number = 0;
    while (next_line(in, line)) {
      ++number;
      if (is_blank(line)) continue;
      if (!document({.text = line, .path = &path, .line = number})) return false;
    }
    return true;
  }

  bool next_line(std::ifstream& in, std::string& line) {
    if (!std::getline(in, line)) return false;
    bytes_read_ += line.size() + (in.eof() ? 0 : 1);
    return true;
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
    const auto status = std::filesystem::status(path, error);
    if (!std::filesystem::exists(status)) {
      throw_bad_request(fmt::format("input file {} does not exist", path));
    }
    if (std::filesystem::is_directory(status)) {
      throw_bad_request(
          fmt::format("input {} is a folder; name the files inside it instead", path));
    }
    if (std::filesystem::is_regular_file(status)) {
      const uintmax_t size = std::filesystem::file_size(path, error);
      if (!error) bytes += size;
    }
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
