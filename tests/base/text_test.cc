#include "base/text.h"

#include <gtest/gtest.h>
#include <string>

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

// The first and the last of each range, and what is beside them.
TEST(Text, WhatControlsATerminalEndsWhereItEnds) {
  EXPECT_EQ(printable("\x1f \x7e\x7f"), "? ~?");
  // Bytes that are no UTF-8, of which terminals of 8 bits take some as controls.
  EXPECT_EQ(printable("\x80|\x9b|\x9f|\xa0|\xe9"), "?|?|?|\xa0|\xe9");
  EXPECT_EQ(printable("\xe2\x82\xac\x80|\xf0\x9f\x98\x80\x9b|\xe9\x9b\x9b\x9b|\xe9\x7f"),
            "\xe2\x82\xac?|\xf0\x9f\x98\x80?|\xe9\x9b\x9b?|\xe9?");
  EXPECT_EQ(printable("\xc2\x80|\xc2\x9f|\xc2\xa0"), "?|?|\xc2\xa0");
  EXPECT_EQ(printable("\xe2\x80\xa9|\xe2\x80\xaa|\xe2\x80\xae|\xe2\x80\xaf"),
            "\xe2\x80\xa9|?|?|\xe2\x80\xaf");
  EXPECT_EQ(printable("\xe2\x81\xa5|\xe2\x81\xa6|\xe2\x81\xa9|\xe2\x81\xaa"),
            "\xe2\x81\xa5|?|?|\xe2\x81\xaa");
}

TEST(Text, NamesAreQuoted) {
  EXPECT_EQ(quote_name("a\nb\x1b"), "\"a?b?\"");
  EXPECT_EQ(quote_name(std::string(1000, 'x')), "\"" + std::string(160, 'x') + "...\"");
}

}  // namespace
}  // namespace troupe
