#include "train/evaluation.h"

#include <algorithm>
#include <bit>
#include <string_view>
#include <utility>

#include "train/batch_feed.h"

namespace troupe {
namespace {

// --split that leaves no sequence to other splits.
constexpr std::string_view kWholeForValidation = "0,1,0";

}  // namespace

std::vector<EvaluationSet> open_evaluation_sets(const ValidationSpec& spec, SampleOptions common,
                                                const DataSets& data, std::string_view split) {
  common.split = Split::validation;
  common.num_samples.reset();
  common.keep_partial = spec.keep_partial;
  std::vector<EvaluationSet> sets;
  const auto add_whole = [&](const std::string& name, const DataPath& path, bool is_test = false) {
    const DataSets whole = open_data_sets(path, common.vocab_size, "model");
    sets.push_back({name, make_source(whole, kWholeForValidation, common), whole.sets, is_test});
  };
  if (spec.is_share()) sets.push_back({{}, make_source(data, split, common)});
  if (spec.mixture) add_whole({}, *spec.mixture);
  for (const ValidationSpec::Set& set : spec.sets) {
    add_whole(set.name, {.prefixes = {set.prefix}, .weights = {}});
  }
  if (spec.test) add_whole({}, *spec.test, /*is_test=*/true);
  common.split = Split::test;
  if (spec.test_share > 0 && has_samples(data, split, common)) {
    auto source = make_source(data, split, common);
    if (source->num_samples() >= spec.test_share) {
      sets.push_back({{}, std::move(source), {}, /*is_test=*/true});
    }
  }
  return sets;
}

EvaluationPlan plan_evaluation(const ModelConfig& config, const RankSession& session,
                               std::span<const EvaluationSet> sets, int32_t batch, int64_t samples,
                               int32_t loss_chunk_tokens, const PrecisionOptions& precision) {
  int64_t rows = batch;
  for (const EvaluationSet& set : sets) rows = std::min(rows, set.source->num_samples());
  EvaluationPlan plan;
  const SampleOptions& data = sets.front().source->options();
  plan.step = build_evaluation_step(config, session.state(), static_cast<int32_t>(rows),
                                    static_cast<int32_t>(data.sequence_length), loss_chunk_tokens,
                                    data.reset_attention_mask, precision);
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

std::vector<EvaluationResult> Evaluation::run(const WorkReport& report, bool test) {
  // One rank may have been writing to a slow disk; collectives wait within a limit.
  session_.barrier();
  std::vector<EvaluationResult> results;
  int64_t before = 0;
  int64_t total = 0;
  for (size_t i = 0; i < sets_.size(); ++i) {
    if (sets_[i].is_test == test) total += plan_.batches[i];
  }
  for (size_t i = 0; i < sets_.size(); ++i) {
    if (sets_[i].is_test != test) continue;
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
