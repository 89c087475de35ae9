#include "train/data_sets.h"

#include <algorithm>
#include <fmt/format.h>

#include "base/units.h"
#include "data/mock_dataset.h"
#include "train/terminal.h"

namespace troupe {
namespace {

SequenceRange share_of(const IndexedDataset& set, std::string_view split_weights, Split split) {
  return split_sequences(split_weights, set.num_sequences())[static_cast<size_t>(split)];
}

}  // namespace

DataSets open_run_data(const DataSpec& spec, int64_t vocab_size, int32_t eod,
                       std::string_view tokenizer) {
  if (spec.mock) {
    return {.sets = {make_mock_dataset(vocab_size, eod)}, .weights = {}};
  }
  return open_data_sets(spec.path, vocab_size, tokenizer);
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
    members.push_back({.dataset = set, .sequences = share_of(*set, split_weights, options.split)});
  }
  return std::make_unique<SampleSource>(std::move(members), data.weights, options);
}

bool has_samples(const DataSets& data, std::string_view split_weights,
                 const SampleOptions& options) {
  return std::all_of(data.sets.begin(), data.sets.end(), [&](const auto& set) {
    const SequenceRange share = share_of(*set, split_weights, options.split);
    int64_t tokens = 0;
    for (int64_t i = share.begin; i < share.end; ++i) tokens += set->sequence_length(i);
    return tokens >= least_tokens(options);
  });
}

std::string describe_use(const SampleSource& source, int64_t samples) {
  std::string text;
  for (const MemberUse& use : source.use_of(samples)) {
    text += fmt::format("  {}: {}, {} tokens; ", use.prefix,
                        counted(static_cast<int64_t>(use.documents), "document"),
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
