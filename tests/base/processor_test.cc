#include "base/processor.h"

#include <gtest/gtest.h>
#include <string>

namespace troupe {
namespace {

TEST(Processor, NamesWhatIsMissing) {
  char names[64];
  EXPECT_FALSE(name_missing_instructions(0b1011, 0b1111, names, sizeof(names)));
  EXPECT_STREQ(names, "");
  EXPECT_TRUE(name_missing_instructions(0b101100, 0b000111, names, sizeof(names)));
  EXPECT_STREQ(names, "avx2 fma");
}

TEST(Processor, CutsNamesOffWhereThereIsNoRoom) {
  char names[8];
  EXPECT_TRUE(name_missing_instructions(0b11, 0, names, sizeof(names)));
  EXPECT_STREQ(names, "popcnt ");
}

// This test was compiled as the program is, and runs.
TEST(Processor, HasWhatThisProgramNeeds) {
  char names[128];
  EXPECT_FALSE(name_missing_instructions(kNeededInstructions, processor_instructions(), names,
                                         sizeof(names)))
      << names;
#ifdef __AVX2__
  EXPECT_TRUE(name_missing_instructions(kNeededInstructions, 0, names, sizeof(names)));
  EXPECT_NE(std::string(names).find("avx2"), std::string::npos);
#endif
}

}  // namespace
}  // namespace troupe
