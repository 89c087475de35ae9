#include "options/data_options.h"

#include <algorithm>
#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <sstream>

#include "base/error.h"
#include "base/text.h"
#include "io/file.h"
#include "io/json.h"

namespace troupe {
namespace {

constexpr uint64_t kMaxListBytes = uint64_t{16} << 20;

// The words of one split in the JSON file of --per-split-data-args-path: a list, or one text.
// Nothing where the file has none, unless it `must`.
std::vector<std::string> words_of_split(const std::string& path, const char* split,
                                        bool must = true) {
  const std::string flag = "--per-split-data-args-path " + path;
  const nlohmann::json document = parse_json(read_file(path, kMaxListBytes), path, 4);
  if (!must && document.is_object() && !document.contains(split)) return {};
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
  if (words.empty() && must) {
    throw_bad_request(
        fmt::format("{}: \"{}\" is no list of data sets (and weights).", flag, split));
  }
  return words;
}

bool has_data_per_split(const Options& options) {
  return !options.mock_data &&
         (!options.train_data_path.empty() || !options.per_split_data_args_path.empty());
}

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

// What validation reads where each split has data of its own, as --data-path would have it.
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

// What is read when the run is over; empty: nothing.
std::vector<std::string> test_words(const Options& options) {
  if (options.per_split_data_args_path.empty()) return options.test_data_path;
  return words_of_split(options.per_split_data_args_path, "test", /*must=*/false);
}

// "NAME=PREFIX" or "PREFIX", whose last part is then the name.
ValidationSpec::Set set_of(const std::string& text) {
  const size_t equals = text.find('=');
  const size_t slash = text.rfind('/');
  ValidationSpec::Set set;
  if (equals != std::string::npos) {
    set = {text.substr(0, equals), text.substr(equals + 1)};
  } else {
    set = {slash == std::string::npos ? text : text.substr(slash + 1), text};
  }
  if (set.name.empty() || set.prefix.empty()) {
    throw_bad_request(fmt::format("--valid-data-path {}: give a data set as PREFIX or NAME=PREFIX.",
                                  quote_name(text)));
  }
  return set;
}

}  // namespace

DataSpec data_spec_of(const Options& options) {
  return {.mock = options.mock_data,
          .path = options.mock_data ? DataPath{} : data_path_of(options),
          .split = has_data_per_split(options) ? "1,0,0" : options.split,
          .eod_mask_loss = options.eod_mask_loss,
          .reset_attention_mask = options.reset_attention_mask,
          .needs_padding = options.moe_router_ignore_padding};
}

ValidationSpec validation_spec_of(const Options& options) {
  ValidationSpec spec{.keep_partial = options.keep_partial_validation_sample};
  const bool per_split = has_data_per_split(options);
  const std::vector<std::string> test = per_split ? test_words(options) : options.test_data_path;
  if (options.command == Command::train) {
    if (!test.empty()) {
      spec.test = parse_data_path(test, "--test-data-path");
    } else if (!per_split) {
      spec.test_share = options.eval_micro_batch_size.value_or(options.micro_batch_size);
    }
  }
  if (per_split && !options.multiple_validation_sets) {  // as in Megatron
    spec.mixture = parse_data_path(validation_words(options), "--valid-data-path");
    return spec;
  }
  for (const std::string& text : per_split ? validation_words(options) : options.valid_data_path) {
    ValidationSpec::Set set = set_of(text);
    const bool is_taken = std::any_of(spec.sets.begin(), spec.sets.end(),
                                      [&](const auto& other) { return other.name == set.name; });
    if (is_taken) {
      throw_bad_request(
          fmt::format("--valid-data-path: two sets are called {}. Name them: NAME=PREFIX.",
                      quote_name(set.name)));
    }
    spec.sets.push_back(std::move(set));
  }
  return spec;
}

}  // namespace troupe
