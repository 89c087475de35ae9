#include "train/evaluation.h"

#include <algorithm>
#include <bit>
#include <fmt/format.h>
#include <string_view>
#include <utility>

#include "base/error.h"
#include "base/text.h"
#include "io/json.h"
#include "parallel/rank_communicators.h"
#include "program/verify.h"
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
    throw_bad_request(fmt::format(
        "--valid-data-path {}: a data set PREFIX or NAME=PREFIX is wanted.", quote_name(text)));
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
  if (options.valid_data_path.empty()) {
    DataSets opened;
    if (data == nullptr) {
      opened = open_data_sets(data_path_of(options), common.vocab_size, "model");
      data = &opened;
    }
    sets.push_back({{}, make_source(*data, options.split, common)});
    return sets;
  }
  for (const std::string& text : options.valid_data_path) {
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
    sets.push_back({name, make_source(set, kWholeForValidation, common)});
  }
  return sets;
}

EvaluationPlan plan_evaluation(const ModelConfig& config, const ModelState& state,
                               std::span<const EvaluationSet> sets, int32_t batch, int64_t samples,
                               int32_t loss_chunk_tokens, int threads, Device device) {
  int64_t rows = batch;
  for (const EvaluationSet& set : sets) rows = std::min(rows, set.source->num_samples());
  EvaluationPlan plan;
  plan.step = build_evaluation_step(
      config, state, static_cast<int32_t>(rows),
      static_cast<int32_t>(sets.front().source->options().sequence_length), loss_chunk_tokens);
  verify_program(*plan.step.program);
  plan.memory = plan_memory(*plan.step.program, threads, device);
  for (const EvaluationSet& set : sets) {
    const int64_t available = set.source->num_samples();
    plan.batches.push_back(std::max<int64_t>(1, std::min(samples, available) / rows));
  }
  return plan;
}

Evaluation::Evaluation(EvaluationPlan plan, const StateStorage& storage, ThreadPool& pool,
                       std::span<const EvaluationSet> sets, const ModelPart& part,
                       ProcessGroup* group, const InterpreterOptions& options)
    : sets_(sets),
      part_(part),
      group_(group),
      plan_(std::move(plan)),
      interpreter_(make_interpreter(*plan_.step.program, plan_.memory, storage, pool,
                                    communicators_of(group, part.layout(), part.rank), options)) {}

std::vector<EvaluationResult> Evaluation::run() {
  // One rank may have been writing to a slow disk; collectives wait within a limit.
  over_ranks<uint64_t>(0);
  std::vector<EvaluationResult> results;
  for (size_t i = 0; i < sets_.size(); ++i) results.push_back(run(sets_[i], plan_.batches[i]));
  return results;
}

EvaluationResult Evaluation::run(const EvaluationSet& set, int64_t batches) {
  const BatchValues& batch = plan_.step.batch;
  const DensePlace place = part_.dense();
  const bool counts_tokens = place.tp == 0 && place.cp == 0 && place.pp == 0;
  const int32_t replicas = part_.layout().dp();
  BatchFeed feed(*set.source);
  double sum = 0;
  int64_t tokens = 0;
  for (int64_t first = 0; first < batches; first += replicas) {
    // Experts may be spread over replicas: one that has no batch left runs with the others.
    const bool has_batch = first + place.dp < batches;
    const int64_t number = has_batch ? first + place.dp : 0;
    const int64_t counted = feed.write(*interpreter_, batch, number * batch.batch);
    interpreter_->run();
    if (!has_batch) continue;
    if (plan_.step.loss.valid()) {
      sum += *interpreter_->view(plan_.step.loss).as<double>() * static_cast<double>(counted);
    }
    if (counts_tokens) tokens += counted;
  }
  sum = over_ranks(sum);
  tokens = over_ranks(tokens);
  return {set.name, tokens > 0 ? sum / static_cast<double>(tokens) : 0.0, tokens};
}

template <class T>
T Evaluation::over_ranks(T own) {
  if (group_ == nullptr) return own;
  T sum = 0;
  for (const uint64_t bits : group_->exchange(part_.rank, std::bit_cast<uint64_t>(own))) {
    sum += std::bit_cast<T>(bits);
  }
  return sum;
}

}  // namespace troupe
