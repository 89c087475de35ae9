// Copies of hot experts: over many drawn loads, placements keep all rows, never raise the largest
// load, and bring it near the mean where there are places enough; choices go to slots as the
// placement divides them.
#include "ops/routing/clone_placement/clone_placement.h"

#include <algorithm>
#include <gtest/gtest.h>
#include <map>
#include <numeric>
#include <string>
#include <vector>

#include "ops/value_test_support.h"

namespace troupe::testing {
namespace {

using Counts = std::vector<int32_t>;

struct Placed {
  Counts experts;
  Counts slot_loads;
};

Counts to_counts(const std::vector<double>& values) {
  return {values.begin(), values.end()};
}

Placed place(const Counts& loads, const ClonePlacementAttributes& attributes) {
  const auto results = run_sample([&](SampleBuilder& sample) {
    const ValueId counts = sample.integers("loads", {static_cast<int64_t>(loads.size())}, loads);
    const ClonePlacement placement = place_clones(sample.builder(), counts, attributes, "p");
    sample.result_without_gradient(placement.experts);
    sample.result_without_gradient(placement.slot_loads);
  });
  return {to_counts(results[0]), to_counts(results[1])};
}

// The largest sum of `count` successive numbers, from a multiple of it on.
int64_t largest_part(const Counts& counts, int64_t count) {
  int64_t largest = 0;
  for (auto at = counts.begin(); at != counts.end(); at += count) {
    largest = std::max(largest, std::accumulate(at, at + count, int64_t{0}));
  }
  return largest;
}

int64_t mean_of(const Counts& loads, int32_t parts) {
  return (std::accumulate(loads.begin(), loads.end(), int64_t{0}) + parts - 1) / parts;
}

struct Drawn {
  ClonePlacementAttributes attributes;
  Counts loads;
};

// Loads of which some experts have many times those of others, and some none.
Drawn draw(uint32_t number) {
  uint64_t next = 0;
  const auto below = [&](int64_t bound) {
    return static_cast<int32_t>(
        random_below(static_cast<uint64_t>(bound), 3, RandomStream::test, number, next++));
  };
  Drawn drawn{.attributes = {.parts = 1 + below(9), .clones = 1 + below(4)}, .loads = {}};
  const int32_t own = 1 + below(6);
  for (int32_t expert = 0; expert < drawn.attributes.parts * own; ++expert) {
    const int32_t scale = below(5) == 0 ? 4000 : 100;
    drawn.loads.push_back(below(6) == 0 ? 0 : below(scale));
  }
  return drawn;
}

TEST(PlaceClones, KeepsAllRowsAndNeverRaisesTheLargestLoad) {
  int64_t copies = 0;
  for (uint32_t number = 0; number < 400; ++number) {
    SCOPED_TRACE(number);
    const Drawn drawn = draw(number);
    const auto [parts, clones] = drawn.attributes;
    const auto own = static_cast<int32_t>(drawn.loads.size()) / parts;
    const int32_t slots = own + clones;
    const Placed placed = place(drawn.loads, drawn.attributes);

    Counts rows(drawn.loads.size(), 0);
    for (int32_t rank = 0; rank < parts; ++rank) {
      Counts copied;
      for (int32_t slot = 0; slot < slots; ++slot) {
        const int32_t load = placed.slot_loads[static_cast<size_t>(rank * slots + slot)];
        int32_t expert = rank * own + slot;
        if (slot >= own) {
          expert = placed.experts[static_cast<size_t>(rank * clones + slot - own)];
          if (expert < 0) {
            EXPECT_EQ(load, 0);
            continue;
          }
          EXPECT_GT(load, 0);
          EXPECT_NE(expert / own, rank) << "a copy of an own expert";
          copied.push_back(expert);
          ++copies;
        }
        EXPECT_GE(load, 0);
        rows[static_cast<size_t>(expert)] += load;
      }
      std::sort(copied.begin(), copied.end());
      EXPECT_EQ(std::adjacent_find(copied.begin(), copied.end()), copied.end());
    }
    EXPECT_EQ(rows, drawn.loads);
    EXPECT_LE(largest_part(placed.slot_loads, slots), largest_part(drawn.loads, own));
  }
  EXPECT_GT(copies, 1000);
}

// As many places as other ranks may fill with one expert are enough for one that is hot.
TEST(PlaceClones, EvensOutOneHotExpert) {
  for (const int32_t parts : {2, 4, 8, 64}) {
    for (const int32_t own : {1, 2, 8}) {
      Counts loads(static_cast<size_t>(parts * own), 500);
      loads[static_cast<size_t>(parts / 2 * own)] += 500 * parts * own;
      const Placed placed = place(loads, {.parts = parts, .clones = 1});
      const int64_t mean = mean_of(loads, parts);
      EXPECT_LE(largest_part(placed.slot_loads, own + 1), mean + mean / kLeastShareOfMean);
    }
  }
}

// A rank with two and a half times the mean: whether one expert or all of it are hot.
TEST(PlaceClones, BringsTwoAndAHalfTimesTheMeanToLessThanThirteenTenths) {
  for (const int32_t parts : {4, 8}) {
    for (const int32_t hot : {1, 2, 4}) {
      SCOPED_TRACE(std::to_string(parts) + " ranks, hot experts: " + std::to_string(hot));
      // The mean of the ranks is 4000 rows.
      Counts loads;
      for (int32_t expert = 0; expert < 4 * parts; ++expert) {
        loads.push_back(expert / 4 == 1 ? 0 : 4 * (parts * 1000 - 2500) / (4 * parts - 4));
      }
      for (int32_t expert = 0; expert < hot; ++expert) {
        loads[static_cast<size_t>(4 + expert)] = 10000 / hot;
      }
      const int64_t mean = mean_of(loads, parts);
      ASSERT_GE(largest_part(loads, 4), 249 * mean / 100);
      const Placed placed =
          place(loads, {.parts = parts, .clones = hot == 4 && parts == 4 ? 2 : 1});
      EXPECT_LE(largest_part(placed.slot_loads, 5 + (hot == 4 && parts == 4 ? 1 : 0)),
                13 * mean / 10);
    }
  }
}

TEST(PlaceClones, LeavesPlacesEmptyForFewRows) {
  // A rank of 1030 rows where the mean is 1000: 30 are less than a thirty-second.
  const Placed placed = place({1030, 1000, 990, 980}, {.parts = 4, .clones = 2});
  EXPECT_EQ(placed.experts, Counts(8, -1));
}

// The rule by hand: three ranks of two experts. Mean 40; rank 0 has 80, of them 70 of expert 1.
TEST(PlaceClones, GoesByTheRule) {
  const Placed placed = place({10, 70, 20, 10, 5, 5}, {.parts = 3, .clones = 1});
  EXPECT_EQ(placed.experts, Counts({-1, 1, 1}));
  EXPECT_EQ(placed.slot_loads, Counts({10, 30, 0, 20, 10, 10, 5, 5, 30}));
}

// All ranks' choices, one after the other, against the intervals that the placement promises.
TEST(SpreadOverClones, SendsRowsAsThePlacementDividesThem) {
  constexpr int64_t kTokens = 12000;  // of each rank: several chunks
  constexpr int64_t kTopK = 2;
  constexpr int32_t kExperts = 12;
  const ClonePlacementAttributes attributes{.parts = 4, .clones = 2};
  std::vector<Counts> chosen(4);
  Counts loads(kExperts, 0);
  for (uint32_t rank = 0; rank < 4; ++rank) {
    for (uint64_t i = 0; i < kTokens * kTopK; ++i) {
      const auto draw = static_cast<int32_t>(random_below(20, 5, RandomStream::test, rank, i)) - 1;
      const int32_t expert = draw < kExperts ? draw : draw % 2;  // 0 and 1 are hot, -1 is none
      chosen[rank].push_back(expert);
      if (expert >= 0) ++loads[static_cast<size_t>(expert)];
    }
  }
  const Placed placed = place(loads, attributes);
  const int32_t own = kExperts / attributes.parts;
  std::map<int32_t, Counts> slots_of;  // of an expert, in order
  const auto slot_of_clone = [&](int32_t clone) {
    return clone / attributes.clones * (own + attributes.clones) + own + clone % attributes.clones;
  };
  for (int32_t expert = 0; expert < kExperts; ++expert) {
    slots_of[expert].push_back(expert / own * (own + attributes.clones) + expert % own);
    for (int32_t clone = 0; clone < attributes.parts * attributes.clones; ++clone) {
      if (placed.experts[static_cast<size_t>(clone)] != expert) continue;
      slots_of[expert].push_back(slot_of_clone(clone));
    }
  }
  EXPECT_GT(slots_of[0].size(), 1U);

  Counts running(kExperts, 0);
  Counts taken(placed.slot_loads.size(), 0);
  for (uint32_t rank = 0; rank < 4; ++rank) {
    const Counts before = running;
    for (const int32_t expert : chosen[rank]) {
      if (expert >= 0) ++running[static_cast<size_t>(expert)];
    }
    const auto results = run_sample(
        [&](SampleBuilder& sample) {
          const ValueId indices = sample.integers("indices", {kTokens, kTopK}, chosen[rank]);
          const ValueId counts = sample.integers("running", {kExperts}, running);
          const ValueId all = sample.integers("loads", {kExperts}, loads);
          const ClonePlacement placement =
              place_clones(sample.builder(), all, attributes, "placement");
          sample.result_without_gradient(
              spread_over_clones(sample.builder(), indices, counts, placement, "slots"));
        },
        DType::f64, 3);
    Counts next = before;
    for (size_t i = 0; i < chosen[rank].size(); ++i) {
      const int32_t expert = chosen[rank][i];
      const auto slot = static_cast<int32_t>(results[0][i]);
      if (expert < 0) {
        ASSERT_EQ(slot, -1);
        continue;
      }
      int32_t row = next[static_cast<size_t>(expert)]++;
      size_t place = 0;
      const Counts& slots = slots_of[expert];
      while (row >= placed.slot_loads[static_cast<size_t>(slots[place])]) {
        row -= placed.slot_loads[static_cast<size_t>(slots[place++])];
      }
      ASSERT_EQ(slot, slots[place]) << "rank " << rank << ", choice " << i;
      ++taken[static_cast<size_t>(slot)];
    }
  }
  EXPECT_EQ(taken, placed.slot_loads);
}

}  // namespace
}  // namespace troupe::testing
