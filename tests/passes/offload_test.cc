// Where copies of activations to the host and back are put: after the last use before, and a
// layer's gradients ahead of the reader, in programs written by hand. What is copied in programs of
// models is in tests/golden/texts/program_offload.txt and tests/options/model_options_test.cc.
#include "passes/offload.h"

#include <gtest/gtest.h>
#include <memory>
#include <string>
#include <utility>

#include "ops/elementwise/add/add.h"
#include "ops/elementwise/fill/fill.h"
#include "ops/exchange/offload/offload.h"
#include "program/builder.h"

namespace troupe {
namespace {

class OrderCopies : public ::testing::Test {
 protected:
  OrderCopies() : program(std::make_shared<StateTable>()), builder(program) {}

  // An operation at a place that reads `x`, or nothing.
  ValueId work(const std::string& name, const Place& place, ValueId x = {}) {
    const PlaceScope scope(builder, place);
    return x.valid() ? add(builder, x, x, name) : fill(builder, 1, DType::f64, {2}, name);
  }

  ValueId gradient(const std::string& name, int16_t layer, ValueId x = {}) {
    return work(name, {.phase = Phase::data_gradient, .layer = layer, .micro_batch = 0}, x);
  }

  // To the host and back; `place` of the pass that reads it again.
  ValueId copies(ValueId x, const Place& place = {.micro_batch = 0}) {
    const PlaceScope scope(builder, place);
    builder.place.phase = Phase::forward;
    const ValueId host = offload(builder, x, "out");
    builder.place.phase = Phase::data_gradient;
    return reload(builder, host, "in");
  }

  // The names of what the operations compute, in their new order.
  std::string ordered() const {
    std::string text;
    for (const int32_t index : order_copies(program)) {
      text += (text.empty() ? "" : " ") + program.value(program.outputs(program.op(index))[0]).name;
    }
    return text;
  }

  Program program;
  Builder builder;
};

TEST_F(OrderCopies, WithoutCopiesNothingMoves) {
  gradient("b", 1, work("a", {}));
  EXPECT_EQ(ordered(), "a b");
}

// The reader is the n-th of five gradients: of layer 2, of layer 1 twice, and of layer 0 twice.
TEST_F(OrderCopies, AreALayerAheadOfTheReader) {
  const std::string expected[] = {
      "x use out other in 2 1a 1b 0a 0b", "x use out other in 2 1a 1b 0a 0b",
      "x use out other in 2 1a 1b 0a 0b", "x use out other 2 in 1a 1b 0a 0b",
      "x use out other 2 in 1a 1b 0a 0b"};
  const std::pair<const char*, int16_t> gradients[] = {
      {"2", 2}, {"1a", 1}, {"1b", 1}, {"0a", 0}, {"0b", 0}};
  for (size_t reader = 0; reader < 5; ++reader) {
    program = Program(std::make_shared<StateTable>());
    const ValueId x = work("x", {.layer = 0});
    const ValueId use = work("use", {.layer = 1}, x);
    work("other", {.layer = 2}, use);
    for (size_t i = 0; i < 5; ++i) {
      gradient(gradients[i].first, gradients[i].second, i == reader ? copies(x) : ValueId{});
    }
    EXPECT_EQ(ordered(), expected[reader]) << "read by " << gradients[reader].first;
  }
}

// A gradient of a weight comes after all that of its pass.
TEST_F(OrderCopies, AreALayerAheadOfAReaderAfterTheLastGradient) {
  const ValueId x = work("x", {.layer = 0});
  for (const auto& [name, layer] : {std::pair("1a", 1), {"1b", 1}, {"0a", 0}, {"0b", 0}}) {
    gradient(name, static_cast<int16_t>(layer));
  }
  work("weight", {.phase = Phase::weight_gradient, .layer = 0, .micro_batch = 0}, copies(x));
  EXPECT_EQ(ordered(), "x out in 1a 1b 0a 0b weight");
}

TEST_F(OrderCopies, OfOneLayerStayWithinIt) {
  const ValueId x = work("x", {.layer = 0});
  gradient("0a", 0);
  gradient("0b", 0);
  work("weight", {.phase = Phase::weight_gradient, .layer = 0, .micro_batch = 0}, copies(x));
  EXPECT_EQ(ordered(), "x out in 0a 0b weight");
}

// Of another micro-batch, of another chunk, and on another queue.
TEST_F(OrderCopies, OnlyGradientsOfTheirPassCount) {
  const ValueId x = work("x", {.layer = 0});
  constexpr Phase kGradient = Phase::data_gradient;
  work("1", {.phase = kGradient, .layer = 1, .micro_batch = 1});
  work("2", {.phase = kGradient, .layer = 1, .chunk = 1, .micro_batch = 0});
  work("3", {.phase = kGradient, .queue = Queue::communication, .layer = 1, .micro_batch = 0});
  work("4", {.phase = Phase::recompute, .layer = 1, .micro_batch = 0});
  gradient("0", 0, copies(x));
  EXPECT_EQ(ordered(), "x out 1 2 3 4 in 0");
}

TEST_F(OrderCopies, InAPassWithoutGradientsStayWhereTheyAre) {
  const ValueId x = work("x", {.layer = 0});
  gradient("1", 1);
  gradient("0", 0);
  work("other", {.micro_batch = 1}, copies(x, {.micro_batch = 1}));
  EXPECT_EQ(ordered(), "x out 1 0 in other");
}

// What reads the reload, or the copy on the host, is no use of the original.
TEST_F(OrderCopies, OfTwoTensorsKeepTheirOrder) {
  const ValueId x = work("x", {.layer = 0});
  const ValueId y = work("y", {.layer = 0});
  work("use", {.layer = 1}, y);
  gradient("1", 1);
  const ValueId first = copies(x);
  const ValueId second = copies(y);
  gradient("0a", 0, first);
  gradient("0b", 0, second);
  EXPECT_EQ(ordered(), "x out y use out in in 1 0a 0b");
}

}  // namespace
}  // namespace troupe
