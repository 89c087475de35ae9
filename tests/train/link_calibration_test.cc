// Bandwidth and latency of links: that they are found in the times of collectives.
#include "train/link_calibration.h"

#include <cmath>
#include <gtest/gtest.h>

namespace troupe {
namespace {

constexpr double kShare = 0.5;  // of the bandwidth that collectives reach

// Times that such a link has: two kinds, one of which sends twice as much in two rounds.
LinkCalibration some(double bandwidth, double latency) {
  LinkCalibration link{.ranks = 2};
  for (const uint64_t bytes : {1U << 14, 1U << 20, 1U << 26}) {
    for (const double rounds : {1.0, 2.0}) {
      const double sent = rounds * static_cast<double>(bytes);
      link.times.push_back({.kind = rounds == 1 ? "all_gather" : "sum_over_ranks",
                            .bytes = bytes,
                            .sent_bytes = sent,
                            .rounds = rounds,
                            .seconds = sent / (kShare * bandwidth) + rounds * latency});
    }
  }
  return link;
}

TEST(LinkCalibration, FindsBandwidthAndLatency) {
  for (const double latency : {0.0, 1e-6, 2e-5}) {
    for (const double bandwidth : {1e9, 4e11}) {
      LinkCalibration link = some(bandwidth, latency);
      fit_link(kShare, link);
      // Of the largest tensors' times the latency is at most 2e-5 / 3.4e-4, and what two passes
      // leave of that is its square.
      EXPECT_NEAR(link.bandwidth, bandwidth, 4e-3 * bandwidth) << latency;
      EXPECT_NEAR(link.latency, latency, 4e-3 * latency + 1e-8) << bandwidth;
    }
  }
}

TEST(LinkCalibration, TimesThatGrowLessThanTensorsStillHaveALink) {
  LinkCalibration link = some(1e9, 1e-6);
  for (CollectiveTime& time : link.times) time.seconds = 1e-5;
  fit_link(kShare, link);
  EXPECT_TRUE(std::isfinite(link.bandwidth));
  EXPECT_GT(link.bandwidth, 0);
  EXPECT_GE(link.latency, 0);
}

}  // namespace
}  // namespace troupe
