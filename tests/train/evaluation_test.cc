// Evaluations: how many samples of each set they take, what they report on the way, and that the
// loss of a set depends neither on the sets beside it nor on the replicas that share its batches.
#include "train/evaluation.h"

#include <chrono>
#include <gtest/gtest.h>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/thread_group.h"
#include "data/data_test_support.h"
#include "train/initialize.h"
#include "train/train_test_support.h"

namespace troupe::testing {
namespace {

constexpr int64_t kLength = 8;
using Reports = std::vector<std::pair<uint64_t, uint64_t>>;

class EvaluationTest : public ::testing::Test {
 protected:
  // As many samples as asked for, of tokens that differ from set to set.
  EvaluationSet set_of(const std::string& name, int64_t samples, bool is_test = false) const {
    std::vector<std::vector<int32_t>> documents;
    for (int64_t i = 0; i < samples; ++i) {
      std::vector<int32_t>& document = documents.emplace_back();
      for (int64_t j = 0; j < kLength; ++j) {
        document.push_back(static_cast<int32_t>((samples * 7 + i * 13 + j * j) % 90));
      }
    }
    documents.back().push_back(1);  // the last label
    const std::string prefix = folder_ / ("set" + std::to_string(sets_++));
    write_dataset(prefix, documents);
    const auto data = std::make_shared<IndexedDataset>(prefix);
    SampleOptions options;
    options.sequence_length = kLength;
    options.vocab_size = 96;
    options.eod = 95;
    auto source = std::make_unique<SampleSource>(
        std::vector<SourceMember>{{.dataset = data, .sequences = {0, data->num_sequences()}}},
        std::vector<double>{}, options);
    return {.name = name, .source = std::move(source), .is_test = is_test};
  }

  // Of 7, 4 and 3 samples, the last for the end of the run.
  std::vector<EvaluationSet> three_sets() const {
    std::vector<EvaluationSet> sets;
    sets.push_back(set_of("", 7));
    sets.push_back(set_of("books", 4));
    sets.push_back(set_of("", 3, /*is_test=*/true));
    return sets;
  }

  struct Evaluated {
    std::vector<EvaluationResult> results;
    Reports reports;
    std::vector<int64_t> samples;  // of each set
    bool has_test = false;
  };

  // What rank 0 of that many replicas has.
  static Evaluated evaluate(const std::vector<EvaluationSet>& sets, int32_t batch, int64_t samples,
                            bool test = false, int32_t replicas = 1) {
    const ModelConfig config = trained_model();
    LayoutOptions layout;
    layout.world_size = replicas;
    const auto run = std::make_shared<const RunLayout>(RunLayout{
        Layout(layout), even_partition(config.num_layers, 1, 1, StagePlacement::loop).value(), {}});
    Evaluated evaluated;
    ThreadGroup group(replicas, std::chrono::seconds(60));
    run_ranks(group, [&](int rank) {
      RankSession session({.ranks = replicas, .threads = replicas}, rank, &group);
      session.declare(config, DType::f64, /*trained=*/false, run);
      EvaluationPlan plan =
          plan_evaluation(config, session, sets, batch, samples, /*loss_chunk_tokens=*/0, {});
      session.allocate();
      initialize_parameters(session.state(), session.storage(), 3, session.pool());
      Evaluation evaluation(std::move(plan), session, sets);
      Reports reports;
      const std::vector<EvaluationResult> results = evaluation.run(
          [&](uint64_t done, uint64_t total) { reports.emplace_back(done, total); }, test);
      if (rank != 0) return;
      evaluated.results = results;
      evaluated.reports = reports;
      evaluated.has_test = evaluation.has_test();
      for (size_t i = 0; i < sets.size(); ++i) {
        evaluated.samples.push_back(evaluation.num_samples(i));
      }
    });
    return evaluated;
  }

  TempFolder folder_;
  mutable int sets_ = 0;
};

// Whole batches, of no more than the smallest set has: at least one, and none that a set lacks.
TEST_F(EvaluationTest, TakesWholeBatchesOfWhatThereIs) {
  const std::vector<EvaluationSet> sets = three_sets();
  struct Case {
    int32_t batch;
    int64_t samples;
    std::vector<int64_t> taken;
  };
  for (const Case& c : std::vector<Case>{{1, 1, {1, 1, 1}},
                                         {1, 4, {4, 4, 3}},
                                         {1, 100, {7, 4, 3}},
                                         {2, 1, {2, 2, 2}},
                                         {2, 5, {4, 4, 2}},
                                         {2, 6, {6, 4, 2}},
                                         {3, 7, {6, 3, 3}},
                                         {4, 7, {6, 3, 3}}}) {
    EXPECT_EQ(evaluate(sets, c.batch, c.samples).samples, c.taken)
        << c.samples << " in batches of " << c.batch;
  }
}

TEST_F(EvaluationTest, ReportsTheBatchesOfAllSetsOfItsKind) {
  const std::vector<EvaluationSet> sets = three_sets();
  EXPECT_EQ(evaluate(sets, 2, 6).reports, (Reports{{1, 5}, {2, 5}, {3, 5}, {4, 5}, {5, 5}}));
  EXPECT_EQ(evaluate(sets, 1, 2, /*test=*/true).reports, (Reports{{1, 2}, {2, 2}}));
  // Two replicas take two batches at once, and the first alone the third.
  EXPECT_EQ(evaluate(sets, 2, 6, /*test=*/false, 2).reports, (Reports{{2, 5}, {3, 5}, {5, 5}}));
  EXPECT_TRUE(evaluate(sets, 1, 1).has_test);
  std::vector<EvaluationSet> without;
  without.push_back(set_of("", 7));
  EXPECT_FALSE(evaluate(without, 1, 1).has_test);
}

TEST_F(EvaluationTest, ALossIsThatOfItsSetAlone) {
  const std::vector<EvaluationSet> sets = three_sets();
  const auto text_of = [](const std::vector<EvaluationResult>& results) {
    std::string text;
    for (const EvaluationResult& each : results) {
      text +=
          each.name + " " + std::to_string(each.loss) + " " + std::to_string(each.tokens) + "\n";
    }
    return text;
  };
  const auto alone = [&](const std::string& name, int64_t samples, int64_t taken) {
    std::vector<EvaluationSet> one;
    one.push_back(set_of(name, samples));
    return text_of(evaluate(one, 1, taken).results);
  };
  const std::string expected = alone("", 7, 6) + alone("books", 4, 4);
  EXPECT_NE(alone("", 7, 6), alone("", 7, 7)) << "a sample more is another loss";
  for (const int32_t replicas : {1, 2, 3}) {
    EXPECT_EQ(text_of(evaluate(sets, 2, 6, /*test=*/false, replicas).results), expected);
    EXPECT_EQ(text_of(evaluate(sets, 1, 3, /*test=*/true, replicas).results), alone("", 3, 3));
  }
}

}  // namespace
}  // namespace troupe::testing
