#include "train/data_sets.h"

#include <fmt/format.h>

#include "base/units.h"

namespace troupe {

DataPath data_path_of(const Options& options) {
  if (options.data_args_path.empty()) return parse_data_path(options.data_path, "--data-path");
  return parse_data_path(read_data_args(options.data_args_path),
                         "--data-args-path " + options.data_args_path);
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
    text += fmt::format("  {}: {} documents, {} tokens; {:.2f} % of the samples, {:.2f} epochs\n",
                        use.prefix, use.documents, format_count(static_cast<double>(use.tokens)),
                        100 * static_cast<double>(use.samples) / static_cast<double>(samples),
                        use.epochs);
  }
  return text;
}

}  // namespace troupe
