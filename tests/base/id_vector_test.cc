// Tables by id: elements, sizes, and what has none.
#include "base/id_vector.h"

#include <gtest/gtest.h>
#include <numeric>

namespace troupe {
namespace {

struct TestId {
  int32_t index = -1;
};

TEST(IdVector, ElementsBelongToIds) {
  IdVector<TestId, int> table(3, 7);
  table[TestId{1}] = 5;
  EXPECT_EQ(table[TestId{0}], 7);
  EXPECT_EQ(table[TestId{1}], 5);
  EXPECT_EQ(table.size(), 3);
  EXPECT_EQ(std::accumulate(table.begin(), table.end(), 0), 19);
}

TEST(IdVector, KnowsWhatItHas) {
  IdVector<TestId, bool> table;
  EXPECT_TRUE(table.empty());
  EXPECT_FALSE(table.has(TestId{0}));
  table.resize(2, true);
  EXPECT_TRUE(table.has(TestId{1}));
  EXPECT_FALSE(table.has(TestId{2}));
  EXPECT_FALSE(table.has(TestId{})) << "an invalid id";
  EXPECT_TRUE(table[TestId{1}]);
}

TEST(IdVector, OperationsAreNumbers) {
  OpVector<int> table(2);
  for (int32_t op = 0; op < table.size(); ++op) table[op] = 10 * op;
  EXPECT_EQ(table[1], 10);
}

}  // namespace
}  // namespace troupe
