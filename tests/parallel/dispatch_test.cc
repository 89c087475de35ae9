// Rows that go to other ranks and come back, exchanged or pushed: every row is where it is
// promised, sums are in the order of ranks, derivatives are the way back, and what no rank sent is
// not read.
#include <array>
#include <gtest/gtest.h>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "base/random.h"
#include "comm/thread_group.h"
#include "ops/exchange/exchange_rows/exchange_rows.h"
#include "ops/exchange/push_rows/push_rows.h"
#include "passes/autodiff.h"
#include "program/verify.h"
#include "runtime/cpu/cpu_interpreter.h"

namespace troupe {
namespace {

constexpr std::chrono::milliseconds kPatient{60'000};
constexpr int64_t kTokens = 7;
constexpr int64_t kWidth = 2500;  // so that rows are sent in several pieces of 64 KiB
constexpr int32_t kTopK = 2;

// Of rank `rank`, 0: its token rows, 1: the rows that it returns.
double draw(int rank, uint32_t what, int64_t i) {
  return random_normal(7, RandomStream::test, static_cast<uint32_t>(rank) * 2 + what,
                       static_cast<uint64_t>(i));
}

struct Case {
  int32_t parts;
  int32_t slices;
  bool slices_first;
  bool idle;  // no token chooses experts of the last part

  int32_t ranks() const { return parts * slices; }
  int32_t experts() const { return 2 * parts; }
  DispatchPlanAttributes plan() const {
    return {.experts = experts(),
            .parts = parts,
            .slices = slices,
            .part_stride = slices_first ? slices : 1,
            .slice_stride = slices_first ? 1 : parts};
  }
  int32_t part_of(int rank) const { return slices_first ? rank / slices : rank % parts; }
  // Some slots are dropped, and so are all of some tokens.
  int32_t choice(int rank, int64_t token, int32_t slot) const {
    const auto number = static_cast<int32_t>((rank + 2) * (token + 1) * (slot + 3) % 11);
    if (number % 4 == 0) return -1;
    return number % (idle ? experts() - 2 : experts());
  }
  bool goes(int from, int64_t token, int to) const {
    for (int32_t slot = 0; slot < kTopK; ++slot) {
      const int32_t expert = choice(from, token, slot);
      if (expert >= 0 && expert / 2 == part_of(to)) return true;
    }
    return false;
  }
  // The tokens of `from` that go to `to`.
  std::vector<int64_t> sent(int from, int to) const {
    std::vector<int64_t> tokens;
    for (int64_t token = 0; token < kTokens; ++token) {
      if (goes(from, token, to)) tokens.push_back(token);
    }
    return tokens;
  }
};

// What the kinds promise, for one rank.
struct Expected {
  std::vector<int32_t> received;          // by source
  std::vector<std::vector<double>> rows;  // received, by source and token
  std::vector<double> returned;           // [tokens, width]
};

// `pushed`: rows lie in places of their source's, otherwise one after the other.
Expected expected_of(const Case& c, int rank, bool pushed) {
  Expected expected;
  for (int from = 0; from < c.ranks(); ++from) {
    const auto tokens = c.sent(from, rank);
    expected.received.push_back(static_cast<int32_t>(tokens.size()));
    for (const int64_t token : tokens) {
      std::vector<double> row;
      for (int64_t i = 0; i < kWidth; ++i) row.push_back(draw(from, 0, token * kWidth + i));
      expected.rows.push_back(row);
    }
  }
  for (int64_t token = 0; token < kTokens; ++token) {
    for (int64_t i = 0; i < kWidth; ++i) {
      double sum = 0;
      for (int to = 0; to < c.ranks(); ++to) {
        if (!c.goes(rank, token, to)) continue;
        int64_t row = pushed ? rank * kTokens : 0;
        for (int from = 0; from < rank && !pushed; ++from) {
          row += static_cast<int64_t>(c.sent(from, to).size());
        }
        for (int64_t before = 0; before < token; ++before) row += c.goes(rank, before, to) ? 1 : 0;
        sum += draw(to, 1, row * kWidth + i);
      }
      expected.returned.push_back(sum);
    }
  }
  return expected;
}

std::vector<double> row_at(const TensorView& view, int64_t row) {
  const double* data = view.as<double>() + row * kWidth;
  return {data, data + kWidth};
}

class Dispatch : public ::testing::TestWithParam<Case> {};

TEST_P(Dispatch, BringsRowsThereAndBack) {
  const Case& c = GetParam();
  const int32_t ranks = c.ranks();
  ThreadGroup group(ranks, kPatient);
  run_ranks(group, [&](int rank) {
    const auto table = std::make_shared<const StateTable>();
    Program program(table);
    Builder builder(program);
    const ValueId indices = builder.input("indices", DType::i32, {kTokens, kTopK});
    const ValueId x = builder.input("x", DType::f64, {kTokens, kWidth});
    const ValueId y = builder.input("y", DType::f64, {ranks * kTokens, kWidth});
    const DispatchPlan plan = dispatch_plan(builder, indices, c.plan(), "plan");

    const RowExchange exchange =
        exchange_counts(builder, plan, {.copies = std::min(ranks, kTopK * c.slices)}, "offsets");
    const ValueId sent = send_rows(builder, x, exchange, "sent");
    const ValueId chosen = send_rows(builder, indices, exchange, "chosen");
    const ValueId returned = return_rows(builder, y, exchange, "returned");

    const std::array both = {x, indices};
    const PushedRows pushed = push_rows(builder, both, plan, {}, "pushed");
    const ValueId pushed_back = push_rows_back(builder, y, plan, pushed.received, {}, "back");

    const int32_t forward = program.op_count();
    const std::vector<ValueId> wanted = {x, y};
    std::vector<ValueId> gradients;
    for (const auto& [output, seed] :
         {std::pair{sent, y}, {returned, x}, {pushed.rows[0], y}, {pushed_back, x}}) {
      MainGradients main_gradients(*table);
      const std::vector<GradientSeed> seeds = {{output, seed}};
      const auto found = append_backward(builder, 0, forward, seeds, wanted, main_gradients);
      const ValueId input = seed == y ? x : y;
      gradients.push_back(found[input]);
    }
    for (const ValueId id : {exchange.offsets, sent, chosen, returned, pushed.received,
                             pushed.rows[0], pushed.rows[1], pushed_back}) {
      program.add_result(id);
    }
    for (const ValueId id : gradients) program.add_result(id);
    verify_program(program);

    Communicators communicators;
    communicators.of(RankGroup::etp_ep) = &group.member(rank);
    const StateStorage storage(table);
    ThreadPool pool(1 + rank % 2);
    CpuInterpreter interpreter(program, plan_memory(program, 1 + rank % 2), storage, pool,
                               communicators);
    for (int64_t token = 0; token < kTokens; ++token) {
      for (int32_t slot = 0; slot < kTopK; ++slot) {
        interpreter.view(indices).as<int32_t>()[token * kTopK + slot] = c.choice(rank, token, slot);
      }
    }
    for (int64_t i = 0; i < kTokens * kWidth; ++i) {
      interpreter.view(x).as<double>()[i] = draw(rank, 0, i);
    }

    // Rows that no rank sent hold NaN: a sum that read one would show it.
    for (const bool push : {false, true}) {
      SCOPED_TRACE((push ? "pushed, rank " : "exchanged, rank ") + std::to_string(rank));
      const Expected expected = expected_of(c, rank, push);
      auto* rows = interpreter.view(y).as<double>();
      std::fill_n(rows, ranks * kTokens * kWidth, std::numeric_limits<double>::quiet_NaN());
      std::vector<int64_t> places;  // of the received rows
      int64_t next = 0;
      for (int from = 0; from < ranks; ++from) {
        for (int32_t i = 0; i < expected.received[static_cast<size_t>(from)]; ++i) {
          places.push_back(push ? from * kTokens + i : next++);
        }
      }
      for (const int64_t place : places) {
        for (int64_t i = place * kWidth; i < (place + 1) * kWidth; ++i) rows[i] = draw(rank, 1, i);
      }
      interpreter.run();

      int32_t total = 0;
      for (int from = 0; from < ranks; ++from) {
        const int32_t count = expected.received[static_cast<size_t>(from)];
        EXPECT_EQ(interpreter.view(exchange.offsets).as<int32_t>()[from], total);
        EXPECT_EQ(interpreter.view(pushed.received).as<int32_t>()[from], count);
        total += count;
      }
      EXPECT_EQ(interpreter.view(exchange.offsets).as<int32_t>()[ranks], total);
      const size_t first = push ? 2 : 0;  // of the gradients
      for (size_t i = 0; i < places.size(); ++i) {
        EXPECT_EQ(row_at(interpreter.view(push ? pushed.rows[0] : sent), places[i]),
                  expected.rows[i]);
        EXPECT_EQ(row_at(interpreter.view(gradients[first + 1]), places[i]), expected.rows[i]);
      }
      size_t row = 0;
      for (int from = 0; from < ranks; ++from) {
        for (const int64_t token : c.sent(from, rank)) {
          const TensorView view = interpreter.view(push ? pushed.rows[1] : chosen);
          for (int32_t slot = 0; slot < kTopK; ++slot) {
            EXPECT_EQ(view.as<int32_t>()[places[row] * kTopK + slot], c.choice(from, token, slot));
          }
          ++row;
        }
      }
      for (int64_t token = 0; token < kTokens; ++token) {
        const auto at = expected.returned.begin() + token * kWidth;
        const std::vector<double> sums(at, at + kWidth);
        EXPECT_EQ(row_at(interpreter.view(push ? pushed_back : returned), token), sums);
        EXPECT_EQ(row_at(interpreter.view(gradients[first]), token), sums);
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Groups, Dispatch,
                         ::testing::Values(Case{1, 1, false, false}, Case{2, 1, false, false},
                                           Case{3, 1, false, false}, Case{4, 1, false, true},
                                           Case{1, 2, true, false}, Case{2, 2, true, false},
                                           Case{2, 2, false, true}, Case{1, 3, false, false}),
                         [](const auto& info) {
                           const Case& c = info.param;
                           return std::to_string(c.parts) + "_parts_" + std::to_string(c.slices) +
                                  "_slices" + (c.slices_first ? "_first" : "") +
                                  (c.idle ? "_idle" : "");
                         });

}  // namespace
}  // namespace troupe
