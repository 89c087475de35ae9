// What a layout is found to take, of few micro-batches: figures that continue to all of them.
#include "train/layout_trial.h"

#include <gtest/gtest.h>
#include <numeric>
#include <string>
#include <vector>

#include "model/model.h"
#include "options/cluster_options.h"
#include "options/command_line.h"
#include "options/model_options.h"

namespace troupe {
namespace {

struct TriedOut {
  Options options;
  LayoutTrial trial;
};

TriedOut trial_of(const std::vector<std::string>& more) {
  std::vector<std::string> words = {"plan",   "--model",      "quickstart", "--gpus",
                                    "8xh100", "--seq-length", "128",        "--bf16"};
  words.insert(words.end(), more.begin(), more.end());
  TriedOut tried{.options = parse_command_line(words).options, .trial = {}};
  tried.trial =
      try_out(tried.options, load_model_config(tried.options), *gpu_cluster_of(tried.options));
  return tried;
}

double sum_of_parts(const StepTime& time) {
  return std::accumulate(time.compute.begin(), time.compute.end(), 0.0) +
         std::accumulate(time.exposed.begin(), time.exposed.end(), 0.0) + time.bubble +
         time.copies + time.idle;
}

std::vector<double> parts_of(const StepTime& time) {
  std::vector<double> parts(time.compute.begin(), time.compute.end());
  parts.insert(parts.end(), time.exposed.begin(), time.exposed.end());
  for (const double part : {time.bubble, time.copies, time.idle, time.seconds})
    parts.push_back(part);
  return parts;
}

// Of 2 places and 2 replicas, 8 sequences are two rounds of micro-batches and 12 are three; what
// more take is what the third round took, once for each.
TEST(LayoutTrial, EachRoundTakesWhatTheThirdTook) {
  const auto tried = [](const std::string& batch) {
    return trial_of({"--global-batch-size", batch, "--micro-batch-size", "1",
                     "--pipeline-model-parallel-size", "2", "--tensor-model-parallel-size", "2",
                     "--expert-model-parallel-size", "2"});
  };
  const std::vector<double> two = parts_of(tried("8").trial.time);
  const std::vector<double> three = parts_of(tried("12").trial.time);
  const uint64_t bytes = tried("8").trial.bytes;
  EXPECT_GT(three.front(), two.front());
  for (const int batch : {8, 12, 16, 24, 256}) {
    const auto [options, trial] = tried(std::to_string(batch));
    ASSERT_TRUE(trial.fits);
    EXPECT_NEAR(sum_of_parts(trial.time), trial.time.seconds, 1e-9 * trial.time.seconds) << batch;
    const std::vector<double> parts = parts_of(trial.time);
    for (size_t i = 0; i < parts.size(); ++i) {
      const double expected = two[i] + (batch - 8) / 4.0 * (three[i] - two[i]);
      EXPECT_NEAR(parts[i], expected, 1e-9 * trial.time.seconds) << "part " << i << " of " << batch;
    }
    EXPECT_DOUBLE_EQ(trial.tokens_per_s, batch * 128 / (8 * trial.time.seconds)) << batch;
    const double flops = Model(load_model_config(options)).training_flops(128);
    EXPECT_DOUBLE_EQ(trial.flops_per_s, batch * flops / (8 * trial.time.seconds)) << batch;
    // Of each micro-batch the first place, which takes most, has 128 tokens of 4 bytes.
    EXPECT_EQ(trial.bytes - bytes, static_cast<uint64_t>(batch - 8) / 2 * 512) << batch;
  }
}

// The second place, which has the loss, may be what does not fit. Of 4 replicas, 16 sequences are
// the two rounds that are planned; 64 take more than those.
TEST(LayoutTrial, FitsUpToTheLastByte) {
  for (const char* batch : {"16", "64"}) {
    const auto [options, trial] = trial_of({"--micro-batch-size", "1", "--global-batch-size", batch,
                                            "--pipeline-model-parallel-size", "2"});
    ASSERT_TRUE(trial.fits);
    const ModelConfig config = load_model_config(options);
    GpuCluster cluster = *gpu_cluster_of(options);
    cluster.model.memory_bytes = trial.bytes;
    const LayoutTrial filled = try_out(options, config, cluster);
    EXPECT_TRUE(filled.fits) << batch;
    EXPECT_EQ(filled.bytes, trial.bytes) << batch;
    EXPECT_EQ(filled.tokens_per_s, trial.tokens_per_s) << batch;
    --cluster.model.memory_bytes;
    const LayoutTrial beyond = try_out(options, config, cluster);
    EXPECT_FALSE(beyond.fits) << batch;
    EXPECT_EQ(beyond.bytes, trial.bytes) << batch;
    EXPECT_EQ(beyond.tokens_per_s, 0) << batch;
  }
}

}  // namespace
}  // namespace troupe
