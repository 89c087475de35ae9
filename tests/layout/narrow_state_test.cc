// Main gradients in bf16 and moments in 8 bits under layouts: gradients are those of the same
// layout in f32 except for the roundings of their sums; sharding moments changes no bit; a layout's
// moments are one rank's; a checkpoint of one layout is loaded by another; what would cut a block
// is refused.
#include <algorithm>
#include <array>
#include <cmath>
#include <gtest/gtest.h>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "model/parameter_layout.h"
#include "ops/optimizer/adamw/moment_blocks.h"
#include "options/refusals.h"
#include "program/test_models.h"
#include "support/adamw_state.h"
#include "support/files.h"
#include "support/layout_run.h"
#include "support/slice_elements.h"
#include "train/training_checkpoint.h"

namespace troupe::testing {
namespace {

// Rows of several blocks, of which two ranks can have halves; biases of experts; a dense layer; a
// shared expert. One row of the norm's vectors is no multiple of a block.
ModelConfig model_of_blocks() {
  ModelConfig config = moe_model(2);
  config.hidden_size = 72;
  config.kv_channels = 32;
  config.moe_ffn_hidden_size = 64;
  config.moe_shared_expert_intermediate_size = 64;
  config.moe_layers[0] = false;  // first dense
  config.ffn_hidden_size = 128;
  config.qk_layernorm = true;
  return config;
}

struct Sizes {
  int32_t dp = 1;
  int32_t tp = 1;
  int32_t cp = 1;
  int32_t pp = 1;
  int32_t ep = 1;
  int32_t etp = 1;
  StateSharding sharding = StateSharding::none;
};

LayoutCase make_case(const std::string& name, const Sizes& sizes) {
  LayoutCase each;
  each.name = name;
  each.model = model_of_blocks();
  each.layout.world_size = sizes.dp * sizes.tp * sizes.cp * sizes.pp;
  each.layout.tensor_parallel = sizes.tp;
  each.layout.context_parallel = sizes.cp;
  each.layout.pipeline_parallel = sizes.pp;
  each.layout.expert_parallel = sizes.ep;
  each.layout.expert_tensor_parallel = sizes.etp;
  each.layout.sequence_parallel = true;
  each.micro_batches = 2;
  each.sharding = sizes.sharding;
  return each;
}

std::vector<LayoutCase> cases() {
  constexpr auto kOptimizer = StateSharding::optimizer;
  constexpr auto kParameters = StateSharding::parameters;
  return {
      make_case("one_rank", {}),
      make_case("dp2", {.dp = 2}),
      make_case("dp3_optimizer", {.dp = 3, .sharding = kOptimizer}),
      make_case("dp3_parameters", {.dp = 3, .sharding = kParameters}),
      make_case("tp2", {.tp = 2}),
      make_case("tp2_dp2_optimizer", {.dp = 2, .tp = 2, .sharding = kOptimizer}),
      make_case("ep2_edp2_parameters", {.dp = 4, .ep = 2, .sharding = kParameters}),
      make_case("etp2", {.dp = 2, .etp = 2}),
      make_case("cp2", {.cp = 2}),
      make_case("pp2_dp2", {.dp = 2, .pp = 2}),
  };
}

class NarrowState : public ::testing::TestWithParam<LayoutCase> {};

// The first step is the same up to its gradients. Each stands as the sum of its terms, rounded to 8
// bits where a micro-batch stores it or adds to it, and where ranks sum it: at most twice, among
// those of tp and among those of dp and cp. A rounding is 2^-9 of the sum so far, which may exceed
// the last one; twice the largest element of the tensor bounds it.
TEST_P(NarrowState, GradientsInBf16AreThoseInF32RoundedAsTheyAreSummed) {
  LayoutCase layout = GetParam();
  layout.dtype = DType::bf16;
  const Outcome wide = run_layout(layout);
  layout.main_gradients = DType::bf16;
  const Outcome narrow = run_layout(layout);
  const double tolerance = (layout.micro_batches + 2) * 0x1p-9 * 2;
  ASSERT_EQ(wide.size(), narrow.size());
  EXPECT_EQ(narrow.at("step 1 loss"), wide.at("step 1 loss"));
  EXPECT_NEAR(narrow.at("step 1 grad_norm")[0] / wide.at("step 1 grad_norm")[0], 1, 0x1p-8);
  bool rounded = false;
  for (const auto& [name, expected] : wide) {
    if (name.rfind("step 1 gradient of ", 0) != 0) continue;
    const std::vector<double>& found = narrow.at(name);
    const bool is_norm = name.find("norm") != std::string::npos;
    double largest = 0;
    for (const double value : expected) largest = std::max(largest, std::abs(value));
    for (size_t i = 0; i < expected.size(); ++i) {
      if (is_norm) {
        ASSERT_EQ(found[i], expected[i]) << name << " is of an f32 parameter";
        continue;
      }
      ASSERT_EQ(found[i], static_cast<double>(bf16(found[i]))) << name;
      ASSERT_NEAR(found[i], expected[i], tolerance * largest) << name << " element " << i;
      rounded = rounded || found[i] != expected[i];
    }
  }
  EXPECT_TRUE(rounded);
  EXPECT_EQ(run_layout(layout), narrow) << "the same layout is the same bits";
}

LayoutCase with_eight_bits(LayoutCase layout, DType dtype) {
  layout.dtype = dtype;
  layout.exp_avg = DType::f8e4m3;
  layout.exp_avg_sq = DType::f8e4m3;
  return layout;
}

// How far apart the first moments of two runs may be whose draws differ. Where one is drawn to the
// next code, it moves by at most 1/8 of what it is at that time, and 0.9 of that remains after a
// further step, when the moment itself may have become small: gradients of other signs cancel.
// `gradients`: of the element, in the steps so far.
double first_moment_tolerance(std::span<const double> gradients) {
  constexpr double kDraw = 1.0 / 8;
  constexpr double kBeta1 = 0.9;  // AdamW's, as run_layout has it
  double largest = 0;             // that the moment can be
  double tolerance = 0;
  for (const double gradient : gradients) {
    largest = (1 + kDraw) * (kBeta1 * largest + (1 - kBeta1) * std::abs(gradient));
    tolerance = kBeta1 * tolerance + kDraw * largest;
  }
  return tolerance;
}

// The ranks' gradients are those of one rank except for the order of sums, some 1e-6 of them in
// f32. So what is drawn is the same, but where an element lies that close to where its draw
// changes: of a million some. It becomes the next code then, at most 1/8 away, in each of three
// steps, and the weights that follow move with it: 2^-8 of the largest moment is allowed for that.
// Gradients of the next steps move with the weights, some 1e-4 of them, and so do draws: on one
// processor less than 5, on another 6 elements of a thousand are others in the end. If each rank
// drew by itself it would be a third of them: 2 f (1 - f) of those at f between two codes. 2 % are
// allowed.
TEST_P(NarrowState, MomentsInEightBitsAreThoseOfOneRank) {
  const LayoutCase layout = with_eight_bits(GetParam(), DType::f32);
  const Outcome one = run_one_rank(layout);
  const Outcome ranks = run_layout(layout);
  ASSERT_EQ(one.size(), ranks.size());
  int64_t elements = 0;
  int64_t others = 0;
  const std::string first_moment = "after it, exp_avg of ";
  for (const auto& [name, expected] : one) {
    if (name.find("exp_avg") == std::string::npos) continue;
    const bool is_first = name.rfind(first_moment, 0) == 0;
    const auto tolerance_of = [&, parameter =
                                      name.substr(is_first ? first_moment.size() : 0)](size_t i) {
      // Roots of mean squares do not become small again.
      if (!is_first) return (std::pow(1.125, 3) - 1) * std::abs(expected[i]);
      std::array<double, 3> gradients{};
      for (size_t step = 0; step < gradients.size(); ++step) {
        gradients[step] =
            one.at("step " + std::to_string(step + 1) + " gradient of " + parameter)[i];
      }
      return first_moment_tolerance(gradients);
    };
    const std::vector<double>& found = ranks.at(name);
    ASSERT_EQ(found.size(), expected.size()) << name;
    double largest = 0;
    for (const double value : expected) largest = std::max(largest, std::abs(value));
    for (size_t i = 0; i < expected.size(); ++i) {
      ++elements;
      if (std::abs(found[i] - expected[i]) <= 1e-3 * std::abs(expected[i]) + 1e-6 * largest) {
        continue;
      }
      ++others;
      ASSERT_NEAR(found[i], expected[i], tolerance_of(i) + 0x1p-8 * largest)
          << name << " element " << i;
    }
  }
  EXPECT_LE(others, elements / 50);
  EXPECT_EQ(run_layout(layout), ranks) << "the same layout is the same bits";
}

INSTANTIATE_TEST_SUITE_P(Layouts, NarrowState, ::testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param.name; });

// The sums of gradients are the same bits however state is sharded, so moments must be, too: a
// shard draws for its elements what the whole tensor draws for them.
TEST(NarrowSharding, ChangesNoBitOfMomentsInEightBits) {
  LayoutCase layout = with_eight_bits(make_case("dp3", {.dp = 3}), DType::f32);
  layout.micro_batches = 1;
  const Outcome expected = run_layout(layout);
  for (const StateSharding sharding : {StateSharding::optimizer, StateSharding::parameters}) {
    layout.sharding = sharding;
    const Outcome found = run_layout(layout);
    for (const auto& [name, values] : expected) {
      if (name.find("exp_avg") == std::string::npos) continue;
      EXPECT_EQ(found.at(name), values) << name;
    }
  }
}

// ---- Checkpoints ----

using NamedBytes = std::map<std::string, std::vector<int>>;

// What the rank has of moments and scales, by name and number in the whole tensor.
void collect(const ModelState& state, const StateStorage& storage, NamedBytes& all) {
  for (const Parameter& parameter : state.parameters) {
    if (!exp_avg_of(parameter).scales.valid()) continue;
    const int64_t whole_columns = parameter.whole_shape.back();
    const int64_t columns = (*state.table)[exp_avg_of(parameter).values].shape.back();
    for (const auto& [codes, scales] :
         {std::pair(exp_avg_of(parameter).values, exp_avg_of(parameter).scales),
          std::pair(exp_avg_sq_of(parameter).values, exp_avg_sq_of(parameter).scales)}) {
      std::vector<int>& bytes = all[(*state.table)[codes].name];
      std::vector<int>& exponents = all[(*state.table)[scales].name];
      bytes.resize(static_cast<size_t>(parameter.whole_shape.elements()), -1);
      exponents.resize(static_cast<size_t>(moment_scales_shape(parameter.whole_shape).elements()),
                       -1);
      for_each_element(parameter, [&](int64_t own, int64_t element) {
        if (own < parameter.shard.begin || own >= parameter.shard.end) return;
        const int64_t at = own - parameter.shard.begin;
        bytes[static_cast<size_t>(element)] = storage.view(codes).as<f8e4m3>()[at].bits;
        exponents[static_cast<size_t>(element / whole_columns * moment_blocks(whole_columns) +
                                      element % whole_columns / kMomentBlock)] =
            storage.view(scales)
                .as<uint8_t>()[at / columns * moment_blocks(columns) + at % columns / kMomentBlock];
      });
    }
  }
}

TEST(NarrowCheckpoint, OfOneRankIsLoadedByAnyLayout) {
  const ModelConfig config = model_of_blocks();
  RunLayout one = layout_of_one_rank(config.num_layers);
  one.optimizer = adamw_of(DType::f8e4m3, DType::f8e4m3);
  const ModelState state =
      declare_model_state(config, DType::bf16, true,
                          {.run = std::make_shared<const RunLayout>(std::move(one)), .rank = 0});
  const StateStorage storage(state.table);
  int32_t next = 0;
  for (const Parameter& parameter : state.parameters) {
    for (const StateId id : {parameter.value, parameter.master, exp_avg_of(parameter).values,
                             exp_avg_sq_of(parameter).values, exp_avg_of(parameter).scales,
                             exp_avg_sq_of(parameter).scales}) {
      if (!id.valid()) continue;
      const TensorView view = storage.view(id);
      auto* bytes = static_cast<uint8_t*>(view.data);
      const auto size = static_cast<size_t>(view.shape.elements()) * size_of(view.dtype);
      for (size_t i = 0; i < size; ++i) bytes[i] = static_cast<uint8_t>(++next * 37 % 61);
    }
  }
  NamedBytes expected;
  collect(state, storage, expected);

  const TempFolder folder;
  RunIdentity identity;
  identity.model = config;
  identity.compute_dtype = DType::bf16;
  identity.sequence = 12;
  identity.ordered_samples = 1;
  identity.options_json = "{}";
  const CheckpointInfo info =
      save_training_checkpoint(folder.path(), identity, {.step = 1}, state, storage);
  const Checkpoint checkpoint = Checkpoint::open(info.path);
  for (const LayoutCase& each : cases()) {
    SCOPED_TRACE(each.name);
    const auto run = run_layout_of(with_eight_bits(each, DType::bf16));
    NamedBytes found;
    for (int32_t rank = 0; rank < run->layout.world_size(); ++rank) {
      const ModelState own =
          declare_model_state(config, DType::bf16, true, {.run = run, .rank = rank});
      const StateStorage own_storage(own.table);
      load_training_state(checkpoint, config, own, own_storage);
      collect(own, own_storage, found);
    }
    EXPECT_EQ(found, expected);
  }

  // As with other dtypes, nothing is converted.
  const ModelState wide = declare_model_state(config, DType::bf16, true);
  const StateStorage wide_storage(wide.table);
  EXPECT_THROW(load_training_state(checkpoint, config, wide, wide_storage), UserError);
}

// ---- What cannot be ----

std::string refusal(const ModelConfig& config, const Sizes& sizes) {
  LayoutCase each = make_case("refused", sizes);
  each.model = config;
  const std::optional<Refusal> found =
      check_moment_blocks(config, run_layout_of(each)->layout, Setting::exp_avg_dtype);
  return found ? text_of(*found) : "";
}

TEST(NarrowLayouts, ThatCutABlockAreRefused) {
  const ModelConfig config = model_of_blocks();
  EXPECT_EQ(refusal(config, {.tp = 2}), "");
  EXPECT_EQ(
      refusal(config, {.tp = 4}),
      "--exp-avg-dtype fp8: --tensor-model-parallel-size 4 cuts the shared expert's inner "
      "size, 64, into pieces of 16, which must be a multiple of 32: that many moments share a "
      "scale. Use bf16 moments, or another --tensor-model-parallel-size.");
  EXPECT_NE(refusal(config, {.dp = 4, .etp = 4})
                .find("--expert-tensor-parallel-size 4 cuts the "
                      "experts' inner size, 64"),
            std::string::npos);
  ModelConfig small = config;
  small.kv_channels = 8;  // 4 heads
  EXPECT_NE(refusal(small, {.tp = 2}).find("the size of all query heads, 32, into pieces of 16"),
            std::string::npos);
}

}  // namespace
}  // namespace troupe::testing
