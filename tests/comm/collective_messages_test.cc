// What is said of ranks that do not come to a collective, or to another one, to the letter.
#include "comm/collective_messages.h"

#include <array>
#include <chrono>
#include <gtest/gtest.h>
#include <vector>

namespace troupe {
namespace {

using std::chrono::milliseconds;
using State = AbsentRank::State;

constexpr CallSite kFirst{.operation = "sum", .index = 0, .layer = 0, .micro_batch = 0};
constexpr CallSite kNoLayer{.operation = "sum", .index = 3, .layer = -1, .micro_batch = -1};

TEST(CollectiveMessages, NameBothCallsThatDiffer) {
  const std::array tensors = {TensorView{nullptr, DType::f32, {2, 3}, nullptr},
                              TensorView{nullptr, DType::i32, {1}, nullptr}};
  EXPECT_EQ(mismatch_message({0, kFirst, tensors, {}}, {2, kNoLayer, {}, "node1, process 7"}),
            "The ranks do not run the same collective: rank 0 is in operation 0 (sum), layer 0, "
            "micro-batch 0 of f32 [2, 3], i32 [1], rank 2 [node1, process 7] in operation 3 (sum). "
            "All ranks end.");
  EXPECT_EQ(wrong_type_message({1, kFirst, tensors, {}}, {0, {}, {&tensors[1], 1}, "a, process 1"}),
            "Rank 1 sends f32 [2, 3] in operation 0 (sum), layer 0, micro-batch 0, but rank 0 [a, "
            "process 1] receives i32 [1] in no operation. All ranks end.");
}

TEST(CollectiveMessages, NameTheRanksThatAreMissing) {
  const std::vector<AbsentRank> late = {
      {.rank = 1, .state = State::is_missing, .last_seen = kFirst, .process = "b, process 2"},
      {.rank = 2, .state = State::waits, .last_seen = kNoLayer, .waits_for = {1, 3}, .process = {}},
      {.rank = 3, .state = State::is_silent, .last_seen = CallSite{}, .process = {}}};
  EXPECT_EQ(
      missing_message(0, "a, process 1", kNoLayer, milliseconds(1500), late),
      "Rank 0 [a, process 1] timed out (1.5 s) in operation 3 (sum), waiting for: rank 1 [b, "
      "process 2] (is missing, last seen in operation 0 (sum), layer 0, micro-batch 0), rank 2 "
      "(waits itself in operation 3 (sum), for rank 1, 3), rank 3 (does not answer, last seen "
      "in no operation). All ranks end.");
  const std::vector<AbsentRank> over = {
      {.rank = 1, .state = State::has_ended, .last_seen = kFirst, .process = {}}};
  EXPECT_EQ(
      missing_message(0, {}, kNoLayer, milliseconds(1500), over),
      "Rank 0 cannot go on in operation 3 (sum), waiting for: rank 1 (has ended, last seen in "
      "operation 0 (sum), layer 0, micro-batch 0). All ranks end.");
  EXPECT_EQ(lost_message(4, {}, kNoLayer),
            "Rank 4 has ended without a word, last seen in operation 3 (sum): its process was "
            "killed, or its machine is gone. All ranks end.");
}

}  // namespace
}  // namespace troupe
