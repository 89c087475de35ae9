// What is said of the choices that a run leaves to its GPUs.
#include "train/gpu_choices.h"

#include <gtest/gtest.h>
#include <string>
#include <vector>

#include "options/command_line.h"
#include "options/model_options.h"

namespace troupe {
namespace {

Options options_of(const std::vector<std::string>& more) {
  std::vector<std::string> words = {"plan", "--model", "mixtral-tiny", "--bf16"};
  words.insert(words.end(), more.begin(), more.end());
  return parse_command_line(words).options;
}

TEST(GpuChoices, AreSaidOneAfterTheOther) {
  const Options asked = options_of({"--gpus", "2xh100", "--fp8-format", "e4m3"});
  EXPECT_TRUE(notes_on_gpu_choices(asked, asked).empty());
  Options chosen = asked;
  chosen.moe_paged_stash = true;
  chosen.moe_paged_stash_buffer_size_factor_cuda = 1.25;
  EXPECT_EQ(notes_on_gpu_choices(asked, chosen).size(), 1U);
  chosen.fp8_modules = {"none"};
  const std::vector<std::string> notes = notes_on_gpu_choices(asked, chosen);
  ASSERT_EQ(notes.size(), 2U);
  EXPECT_TRUE(notes[0].starts_with("Note: no product is in 8 bits")) << notes[0];
  EXPECT_TRUE(notes[1].starts_with("Note: --moe-paged-stash is on")) << notes[1];
}

TEST(GpuChoices, AreMadeWhereTheyAreOpen) {
  const std::vector<std::string> flags = {"--gpus", "2xh100",       "--expert-model-parallel-size",
                                          "2",      "--fp8-format", "e4m3"};
  const Options asked = options_of(flags);
  const Options chosen = with_gpu_choices(asked, load_model_config(asked), uint64_t{1} << 40);
  EXPECT_FALSE(chosen.fp8_modules.empty()) << "by the figures of the GPU";
  const Options on_cpu = options_of({});
  const Options same = with_gpu_choices(on_cpu, load_model_config(on_cpu), 0);
  EXPECT_EQ(same.fp8_modules, on_cpu.fp8_modules);
  EXPECT_EQ(same.moe_expert_rank_capacity_factor, on_cpu.moe_expert_rank_capacity_factor);
}

}  // namespace
}  // namespace troupe
