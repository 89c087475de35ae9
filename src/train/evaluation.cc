#include "train/evaluation.h"

#include <algorithm>
#include <bit>
#include <fmt/format.h>
#include <numeric>
#include <string_view>
#include <utility>

#include "base/error.h"
#include "base/text.h"
#include "io/json.h"
#include "train/batch_feed.h"

namespace troupe {
namespace {

// --split that leaves no sequence to other splits.
constexpr std::string_view kWholeForValidation = "0,1,0";

// "NAME=PREFIX" or "PREFIX", whose last part is then the name.
std::pair<std::string, std::string> name_and_prefix(const std::string& text) {
  const size_t equals = text.find('=');
  const size_t slash = text.rfind('/');
  std::pair<std::string, std::string> parts;
  if (equals != std::string::npos) {
    parts = {text.substr(0, equals), text.substr(equals + 1)};
  } else {
    parts = {slash == std::string::npos ? text : text.substr(slash + 1), text};
  }
  if (parts.first.empty() || parts.second.empty()) {
    throw_bad_request(fmt::format("--valid-data-path {}: give a data set as PREFIX or NAME=PREFIX.",
                                  quote_name(text)));
  }
  return parts;
}

}  // namespace

std::vector<EvaluationSet> open_evaluation_sets(const Options& options, SampleOptions common,
                                                const DataSets* data) {
  common.split = Split::validation;
  common.num_samples.reset();
  common.keep_partial = options.keep_partial_validation_sample;
  std::vector<EvaluationSet> sets;
  const bool per_split = has_data_per_split(options);
  if (per_split && !options.multiple_validation_sets) {
    // As in Megatron: one mixture.
    const DataPath path = parse_data_path(validation_words(options), "--valid-data-path");
    const DataSets mixture = open_data_sets(path, common.vocab_size, "model");
    sets.push_back({{}, make_source(mixture, kWholeForValidation, common), mixture.sets});
    return sets;
  }
  if (!per_split && options.valid_data_path.empty()) {
    DataSets opened;
    if (data == nullptr) {
      opened = open_run_data(options, common.vocab_size, common.eod, "model");
      data = &opened;
    }
    sets.push_back({{}, make_source(*data, options.split, common)});
    return sets;
  }
  for (const std::string& text : per_split ? validation_words(options) : options.valid_data_path) {
    const auto [name, prefix] = name_and_prefix(text);
    for (const EvaluationSet& earlier : sets) {
      if (earlier.name == name) {
        throw_bad_request(
            fmt::format("--valid-data-path: two sets are called {}. Name them: NAME=PREFIX.",
                        quote_name(name)));
      }
    }
    const DataSets set =
        open_data_sets({.prefixes = {prefix}, .weights = {}}, common.vocab_size, "model");
    sets.push_back({name, make_source(set, kWholeForValidation, common), set.sets});
  }
  return sets;
}

EvaluationPlan plan_evaluation(const ModelConfig& config, const RankSession& session,
                               std::span<const EvaluationSet> sets, int32_t batch, int64_t samples,
                               int32_t loss_chunk_tokens) {
  int64_t rows = batch;
  for (const EvaluationSet& set : sets) rows = std::min(rows, set.source->num_samples());
  EvaluationPlan plan;
  const SampleOptions& data = sets.front().source->options();
  plan.step = build_evaluation_step(config, session.state(), static_cast<int32_t>(rows),
                                    static_cast<int32_t>(data.sequence_length), loss_chunk_tokens,
                                    data.reset_attention_mask);
  plan.memory = session.plan(*plan.step.program);
  for (const EvaluationSet& set : sets) {
    const int64_t available = set.source->num_samples();
    plan.batches.push_back(std::max<int64_t>(1, std::min(samples, available) / rows));
  }
  return plan;
}

Evaluation::Evaluation(EvaluationPlan plan, RankSession& session,
                       std::span<const EvaluationSet> sets)
    : session_(session),
      sets_(sets),
      plan_(std::move(plan)),
      interpreter_(session.interpreter(*plan_.step.program, plan_.memory)) {}

std::vector<EvaluationResult> Evaluation::run(const WorkReport& report) {
  // One rank may have been writing to a slow disk; collectives wait within a limit.
  session_.barrier();
  std::vector<EvaluationResult> results;
  int64_t before = 0;
  const int64_t total = std::accumulate(plan_.batches.begin(), plan_.batches.end(), int64_t{0});
  for (size_t i = 0; i < sets_.size(); ++i) {
    results.push_back(run(sets_[i], plan_.batches[i], [&](int64_t done) {
      if (report) report(static_cast<uint64_t>(before + done), static_cast<uint64_t>(total));
    }));
    before += plan_.batches[i];
  }
  return results;
}

EvaluationResult Evaluation::run(const EvaluationSet& set, int64_t batches,
                                 const std::function<void(int64_t)>& report) {
  const BatchValues& batch = plan_.step.batch;
  const DensePlace place = session_.part().dense();
  const bool counts_tokens = place.tp == 0 && place.cp == 0 && place.pp == 0;
  const int32_t replicas = session_.layout().dp();
  BatchFeed feed(*set.source);
  std::vector<double> losses;  // what this rank adds to that of its batch in each round
  int64_t tokens = 0;
  for (int64_t first = 0; first < batches; first += replicas) {
    // Experts may be spread over replicas: one that has no batch left runs with the others.
    const bool has_batch = first + place.dp < batches;
    const int64_t number = has_batch ? first + place.dp : 0;
    const int64_t counted = feed.write(*interpreter_, batch, number * batch.batch);
    interpreter_->run();
    const bool adds_loss = has_batch && plan_.step.loss.valid();
    losses.push_back(adds_loss ? *interpreter_->view(plan_.step.loss).as<double>() *
                                     static_cast<double>(counted)
                               : 0.0);
    if (has_batch && counts_tokens) tokens += counted;
    report(std::min(first + replicas, batches));
  }
  double sum = 0;
  for (const double own : losses) {
    std::vector<double> of_batch(static_cast<size_t>(replicas), 0.0);
    const std::vector<double> all = of_ranks(own);
    for (size_t rank = 0; rank < all.size(); ++rank) {
      const DensePlace of_rank = session_.layout().dense_place(static_cast<int32_t>(rank));
      of_batch[static_cast<size_t>(of_rank.dp)] += all[rank];
    }
    for (const double loss : of_batch) sum += loss;
  }
  double all_tokens = 0;  // exact below 2^53
  for (const double each : of_ranks(static_cast<double>(tokens))) all_tokens += each;
  return {set.name, all_tokens > 0 ? sum / all_tokens : 0.0, static_cast<int64_t>(all_tokens)};
}

std::vector<double> Evaluation::of_ranks(double own) const {
  std::vector<double> all;
  for (const uint64_t bits : session_.exchange(std::bit_cast<uint64_t>(own))) {
    all.push_back(std::bit_cast<double>(bits));
  }
  return all;
}

}  // namespace troupe
