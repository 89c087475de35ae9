#include "train/data_sets.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <sstream>

#include "base/error.h"
#include "base/units.h"
#include "data/mock_dataset.h"
#include "io/file.h"
#include "io/json.h"

namespace troupe {
namespace {

constexpr uint64_t kMaxListBytes = uint64_t{16} << 20;

// The words of one split in the JSON file of --per-split-data-args-path: a list, or one text.
std::vector<std::string> words_of_split(const std::string& path, const char* split) {
  const std::string flag = "--per-split-data-args-path " + path;
  const nlohmann::json document = parse_json(read_file(path, kMaxListBytes), path, 4);
  if (!document.is_object() || !document.contains(split)) {
    throw_bad_request(fmt::format(
        "{}: no \"{}\" in it; it is an object of \"train\", \"valid\" and \"test\".", flag, split));
  }
  const nlohmann::json& value = document.at(split);
  std::vector<std::string> words;
  if (value.is_string()) {
    std::istringstream stream(value.get<std::string>());
    for (std::string word; stream >> word;) words.push_back(word);
  }
  for (const nlohmann::json& word : value.is_array() ? value : nlohmann::json::array()) {
    words.push_back(word.is_string() ? word.get<std::string>() : word.dump());
  }
  if (words.empty()) {
    throw_bad_request(
        fmt::format("{}: \"{}\" is no list of data sets (and weights).", flag, split));
  }
  return words;
}

// What training reads, and the whole run unless each split has data of its own.
DataPath data_path_of(const Options& options) {
  if (!options.per_split_data_args_path.empty()) {
    return parse_data_path(words_of_split(options.per_split_data_args_path, "train"),
                           "--per-split-data-args-path " + options.per_split_data_args_path);
  }
  if (!options.train_data_path.empty()) {
    return parse_data_path(options.train_data_path, "--train-data-path");
  }
  if (options.data_args_path.empty()) return parse_data_path(options.data_path, "--data-path");
  return parse_data_path(read_data_args(options.data_args_path),
                         "--data-args-path " + options.data_args_path);
}

}  // namespace

bool has_data_per_split(const Options& options) {
  return !options.mock_data &&
         (!options.train_data_path.empty() || !options.per_split_data_args_path.empty());
}

std::string split_of(const Options& options) {
  return has_data_per_split(options) ? "1,0,0" : options.split;
}

DataSets open_run_data(const Options& options, int64_t vocab_size, int32_t eod,
                       std::string_view tokenizer) {
  if (options.mock_data) {
    return {.sets = {make_mock_dataset(vocab_size, eod)}, .weights = {}};
  }
  return open_data_sets(data_path_of(options), vocab_size, tokenizer);
}

std::vector<std::string> validation_words(const Options& options) {
  if (!options.per_split_data_args_path.empty()) {
    return words_of_split(options.per_split_data_args_path, "valid");
  }
  if (options.valid_data_path.empty()) {
    throw_bad_request(
        "--train-data-path is for training alone: evaluations need --valid-data-path.");
  }
  return options.valid_data_path;
}

DataSets open_data_sets(const DataPath& path, int64_t vocab_size, std::string_view tokenizer) {
  DataSets data{.sets = {}, .weights = path.weights};
  for (const std::string& prefix : path.prefixes) {
    data.sets.push_back(std::make_shared<const IndexedDataset>(prefix));
    require_vocabulary(*data.sets.back(), vocab_size, tokenizer);
  }
  return data;
}

std::string fingerprint(const DataSets& data) {
  std::string text;
  for (size_t i = 0; i < data.sets.size(); ++i) {
    if (i > 0) text += "; ";
    if (!data.weights.empty()) text += fmt::format("{} x ", data.weights[i]);
    text += fmt::format("{} sequences, {} tokens", data.sets[i]->num_sequences(),
                        data.sets[i]->num_tokens());
  }
  return text;
}

std::unique_ptr<SampleSource> make_source(const DataSets& data, std::string_view split_weights,
                                          const SampleOptions& options) {
  std::vector<SourceMember> members;
  for (const auto& set : data.sets) {
    const auto ranges = split_sequences(split_weights, set->num_sequences());
    members.push_back({.dataset = set, .sequences = ranges[static_cast<size_t>(options.split)]});
  }
  return std::make_unique<SampleSource>(std::move(members), data.weights, options);
}

std::string describe_use(const SampleSource& source, int64_t samples) {
  std::string text;
  for (const MemberUse& use : source.use_of(samples)) {
    text += fmt::format("  {}: {} documents, {} tokens; ", use.prefix, use.documents,
                        format_count(static_cast<double>(use.tokens)));
    if (use.samples != samples) {
      text += fmt::format("{:.2f} % of the samples, ",
                          100 * static_cast<double>(use.samples) / static_cast<double>(samples));
    }
    text += fmt::format("{:.2f} epochs\n", use.epochs);
  }
  return text;
}

}  // namespace troupe
