// Shapes: products of extents, and how they print.
#include "base/shape.h"

#include <gtest/gtest.h>

namespace troupe {
namespace {

TEST(Shape, Scalar) {
  const Shape scalar;
  EXPECT_EQ(scalar.rank(), 0);
  EXPECT_EQ(scalar.elements(), 1);
  EXPECT_EQ(scalar.row_elements(), 1);
  EXPECT_EQ(scalar.back(), 1);
  EXPECT_EQ(scalar.vectors(), 1);
  EXPECT_EQ(scalar.to_string(), "[]");
}

TEST(Shape, Products) {
  const Shape shape = {2, 3, 4, 5};
  EXPECT_EQ(shape.rank(), 4);
  EXPECT_EQ(shape[0], 2);
  EXPECT_EQ(shape[3], 5);
  EXPECT_EQ(shape.back(), 5);
  EXPECT_EQ(shape.elements(), 120);
  EXPECT_EQ(shape.row_elements(), 60);
  EXPECT_EQ(shape.vectors(), 24);
  EXPECT_EQ((Shape{7}).row_elements(), 1);
  EXPECT_EQ((Shape{7}).vectors(), 1);
}

TEST(Shape, LargeProducts) {
  EXPECT_EQ((Shape{128, 1 << 20, 1 << 20}).elements(), int64_t{1} << 47);
}

TEST(Shape, EmptyExtents) {
  EXPECT_EQ((Shape{0, 4}).elements(), 0);
  EXPECT_EQ((Shape{0, 4}).row_elements(), 4);
  EXPECT_EQ((Shape{4, 0}).vectors(), 0);
}

TEST(Shape, Equality) {
  EXPECT_EQ((Shape{2, 3}), (Shape{2, 3}));
  EXPECT_NE((Shape{2, 3}), (Shape{3, 2}));
  EXPECT_NE((Shape{2, 3}), (Shape{2, 3, 1}));
  EXPECT_NE((Shape{}), (Shape{0}));
}

TEST(Shape, Prints) {
  EXPECT_EQ((Shape{96, 48}).to_string(), "[96, 48]");
  EXPECT_EQ((Shape{1}).to_string(), "[1]");
}

TEST(ShapeDeathTest, RefusesImpossibleShapes) {
  EXPECT_DEATH((Shape{1, 2, 3, 4, 5}), "at most four dimensions");
  EXPECT_DEATH((Shape{2, -1}), "negative extent");
}

}  // namespace
}  // namespace troupe
