#include "base/text.h"

#include <gtest/gtest.h>

namespace troupe {
namespace {

TEST(Text, IsMadeFitForAMessage) {
  EXPECT_EQ(printable("a\nb\x1b\x7f \xc3\xa9"), "a?b?? \xc3\xa9");
  EXPECT_EQ(printable(std::string(160, 'x')), std::string(160, 'x'));
  EXPECT_EQ(printable(std::string(161, 'x')), std::string(160, 'x') + "...");
  EXPECT_EQ(printable("abcd", 3), "abc...");
}

TEST(Text, NamesAreQuoted) {
  EXPECT_EQ(quote_name("a\nb\x1b"), "\"a?b?\"");
  EXPECT_EQ(quote_name(std::string(1000, 'x')), "\"" + std::string(160, 'x') + "...\"");
}

}  // namespace
}  // namespace troupe
