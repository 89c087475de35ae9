#include "base/text.h"

#include <gtest/gtest.h>

namespace troupe {
namespace {

TEST(Text, IsMadeFitForAMessage) {
  EXPECT_EQ(printable("a\nb\x1b\x7f \xc3\xa9"), "a?b?? \xc3\xa9");
  EXPECT_EQ(printable(std::string(160, 'x')), std::string(160, 'x'));
  EXPECT_EQ(printable(std::string(161, 'x')), std::string(160, 'x') + "...");
  EXPECT_EQ(printable("abcd", 3), "abc...");
  // Control characters above ASCII, and changes of direction.
  EXPECT_EQ(printable("\xc2\x9b\x33\xc2\x9d|\xe2\x80\xae|\xe2\x81\xa6|"), "?3?|?|?|");
  EXPECT_EQ(printable("\xc2\xa0\xe2\x80\xaf\xe2\x82\xac\xf0\x9f\x98\x80"),
            "\xc2\xa0\xe2\x80\xaf\xe2\x82\xac\xf0\x9f\x98\x80");
}

TEST(Text, NamesAreQuoted) {
  EXPECT_EQ(quote_name("a\nb\x1b"), "\"a?b?\"");
  EXPECT_EQ(quote_name(std::string(1000, 'x')), "\"" + std::string(160, 'x') + "...\"");
}

}  // namespace
}  // namespace troupe
