// Which modules have products in 8 bits where that is left open: plans alone, so no GPU is needed.
#include "train/fp8_module_choice.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <gtest/gtest.h>
#include <string>
#include <vector>

#include "options/cluster_options.h"
#include "options/model_options.h"
#include "options/options.h"
#include "options/precision_options.h"

namespace troupe {
namespace {

using Names = std::vector<std::string>;

Options step_of(const std::string& model, int32_t global_batch) {
  Options options;
  options.command = Command::plan;
  options.model = model;
  options.num_layers = 2;
  options.seq_length = 4096;
  options.micro_batch_size = 1;
  options.global_batch_size = global_batch;
  options.device = Device::cuda;
  options.compute_dtype = DType::bf16;
  options.fp8_format = Fp8Format::hybrid;
  return options;
}

Names chosen_of(const Options& options) {
  return with_fp8_modules(options, load_model_config(options), hardware_of("h100")).fp8_modules;
}

double of(const std::array<double, kProductGroupCount>& times, ProductGroup group) {
  return times[static_cast<size_t>(group)];
}

// Many rows for each expert, or few of small ones for which weights are quantised:
// docs/low_precision.md, "Where it gains".
TEST(Fp8ModuleChoice, IsWhatIsFaster) {
  EXPECT_EQ(chosen_of(step_of("mixtral-8x7b", 8)), Names{"all"});
  EXPECT_EQ(chosen_of(step_of("qwen3-30b-a3b", 1)), Names{"attention"});
  const Options options = step_of("qwen3-30b-a3b", 1);
  const ProductTimes times =
      time_products(options, load_model_config(options), hardware_of("h100"));
  EXPECT_LT(of(times.in_8_bits, ProductGroup::attention), of(times.plain, ProductGroup::attention));
  EXPECT_GE(of(times.in_8_bits, ProductGroup::experts), of(times.plain, ProductGroup::experts));
  EXPECT_EQ(of(times.plain, ProductGroup::mlp), 0);
}

// Weights are quantised once a step, so more micro-batches make 8 bits worth more; each further one
// takes the same time.
TEST(Fp8ModuleChoice, CountsWeightsOnceAStep) {
  struct ExpertTimes {
    double plain;
    double in_8_bits;
  };
  const auto times_of = [](int32_t global_batch) {
    const Options options = step_of("qwen3-30b-a3b", global_batch);
    const ProductTimes times =
        time_products(options, load_model_config(options), hardware_of("h100"));
    return ExpertTimes{of(times.plain, ProductGroup::experts),
                       of(times.in_8_bits, ProductGroup::experts)};
  };
  const ExpertTimes one = times_of(1);
  const ExpertTimes two = times_of(2);
  const ExpertTimes three = times_of(3);
  const ExpertTimes many = times_of(64);
  EXPECT_LT(one.plain, two.plain);
  EXPECT_LT(one.in_8_bits, two.in_8_bits);
  EXPECT_NEAR(many.plain - two.plain, 62 * (three.plain - two.plain), 1e-9);
  EXPECT_NEAR(many.in_8_bits - two.in_8_bits, 62 * (three.in_8_bits - two.in_8_bits), 1e-9);
  EXPECT_LT(many.in_8_bits / many.plain, 0.95 * two.in_8_bits / two.plain);
}

// Two places with a layer each take together what one with both of them does.
TEST(Fp8ModuleChoice, CountsThePlacesOfThePipeline) {
  Options options = step_of("mixtral-8x7b", 8);
  const ModelConfig config = load_model_config(options);
  const ProductTimes one = time_products(options, config, hardware_of("h100"));
  options.ranks = options.pipeline_model_parallel_size = 2;
  const ProductTimes two = time_products(options, config, hardware_of("h100"));
  for (const ProductGroup group : {ProductGroup::attention, ProductGroup::experts}) {
    EXPECT_NEAR(of(two.plain, group), of(one.plain, group), 1e-6 * of(one.plain, group));
    EXPECT_NEAR(of(two.in_8_bits, group), of(one.in_8_bits, group),
                1e-6 * of(one.in_8_bits, group));
  }
}

TEST(Fp8ModuleChoice, LeavesWhatIsGivenOrCannotBeKnown) {
  Options options = step_of("qwen3-30b-a3b", 1);
  options.fp8_modules = {"auto"};
  EXPECT_EQ(chosen_of(options), Names{"attention"});
  options.fp8_modules = {"experts"};
  EXPECT_EQ(chosen_of(options), Names{"experts"});
  options.fp8_modules = {};
  const ModelConfig config = load_model_config(options);
  EXPECT_EQ(with_fp8_modules(options, config, {}).fp8_modules, Names{});
  options.fp8_format.reset();
  EXPECT_EQ(chosen_of(options), Names{});
}

TEST(Fp8ModuleChoice, IsTold) {
  const Options asked = step_of("qwen3-30b-a3b", 8);
  Options chosen = asked;
  EXPECT_EQ(note_on_fp8_modules(asked, chosen), "");
  chosen.fp8_modules = {"all"};
  EXPECT_EQ(note_on_fp8_modules(asked, chosen), "");
  chosen.fp8_modules = {"attention", "mlp"};
  EXPECT_EQ(note_on_fp8_modules(asked, chosen),
            "Note: products in 8 bits: attention, mlp. By the plan of this step all others are "
            "faster in bf16 (--fp8-modules).");
  chosen.fp8_modules = {"none"};
  EXPECT_EQ(note_on_fp8_modules(asked, chosen),
            "Note: no product is in 8 bits: by the plan of this step all are faster in bf16 "
            "(--fp8-modules).");
  EXPECT_EQ(note_on_fp8_modules(chosen, chosen), "");
}

TEST(Fp8ModuleChoice, GoesByTheFiguresThatAreNamed) {
  Options options = step_of("qwen3-30b-a3b", 8);
  options.gpus = "1xh200";
  EXPECT_EQ(figures_of_gpu(options)->name, hardware_of("h200").name);
  options.gpus.clear();
  options.hardware = "h100";
  EXPECT_EQ(figures_of_gpu(options)->name, hardware_of("h100").name);
  options.hardware = "none";
  EXPECT_FALSE(figures_of_gpu(options));
  options.hardware = "h100";
  options.device = Device::cpu;
  EXPECT_FALSE(figures_of_gpu(options));
}

}  // namespace
}  // namespace troupe
