#include "options/refusals.h"

#include <algorithm>
#include <gtest/gtest.h>

#include "options/options.h"
#include "parallel/layout.h"
#include "support/errors.h"

namespace troupe::testing {
namespace {

TEST(Refusals, EverySettingIsThatOfOneOption) {
  for (int i = 0; i < kSettingCount; ++i) {
    const auto setting = static_cast<Setting>(i);
    const auto has_it = [&](const OptionSpec& spec) { return spec.setting == setting; };
    EXPECT_EQ(std::ranges::count_if(option_table(), has_it), 1) << "setting " << i;
  }
}

TEST(Refusals, AreWordedWithTheFlagsOfTheirSettings) {
  const Refusal refusal{.setting = Setting::tensor_parallel,
                        .message = {Setting::tensor_parallel, " 3: it goes with ",
                                    Setting::no_linear_bias, " alone."}};
  EXPECT_EQ(text_of(refusal),
            "--tensor-model-parallel-size 3: it goes with --disable-bias-linear alone.");
  EXPECT_EQ(message_of(ExitStatus::bad_request, [&] { require_accepted(refusal); }),
            text_of(refusal));
  EXPECT_NO_THROW(require_accepted(std::nullopt));
}

// A search reads which setting to change, and to what.
TEST(Refusals, OfLayoutsNameTheSettingAndItsNearestValues) {
  const OrRefusal<Layout> answer = try_layout({.world_size = 12, .tensor_parallel = 8});
  ASSERT_NE(answer.refusal(), nullptr);
  EXPECT_EQ(answer.refusal()->setting, Setting::ranks);
  EXPECT_EQ(answer.refusal()->nearest, (std::vector<int64_t>{8, 16}));
  LayoutOptions nearest{.world_size = 16, .tensor_parallel = 8};
  EXPECT_EQ(try_layout(nearest).value().dp(), 2);
}

}  // namespace
}  // namespace troupe::testing
