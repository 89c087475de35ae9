// The flags of routing and balancing: what they change in a model, and what is refused.
#include "options/moe_options.h"

#include <gtest/gtest.h>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/text.h"
#include "options/layer_pattern.h"
#include "program/test_models.h"

namespace troupe {
namespace {

using namespace testing;

std::string pattern_text(const std::string& pattern, int32_t layers) {
  std::string text;
  for (const bool moe : parse_moe_layer_freq(pattern, layers)) text += moe ? '1' : '0';
  return text;
}

template <class Body>
std::string refusal(const Body& body) {
  try {
    body();
  } catch (const UserError& error) {
    EXPECT_EQ(error.status(), ExitStatus::bad_request);
    return error.what();
  }
  ADD_FAILURE() << "nothing was refused";
  return "";
}

TEST(MoeLayerFreq, ANumberCountsFromTheFirstLayer) {
  EXPECT_EQ(pattern_text("1", 4), "1111");
  EXPECT_EQ(pattern_text("2", 5), "10101");
  EXPECT_EQ(pattern_text("3", 7), "1001001");
  EXPECT_EQ(pattern_text("9", 3), "100");
}

TEST(MoeLayerFreq, ListsAreJoinedRepeatedAndGrouped) {
  EXPECT_EQ(pattern_text("[0,1,1]", 3), "011");
  EXPECT_EQ(pattern_text("([0]*3+[1]*58)", 61), std::string(3, '0') + std::string(58, '1'));
  EXPECT_EQ(pattern_text("[0, 1] * 2 + [1]", 5), "01011");
  EXPECT_EQ(pattern_text("(([0]+[1]*2)*2+[0])", 7), "0110110");
  EXPECT_EQ(pattern_text("[1]*0+[0]", 1), "0");
  EXPECT_EQ(pattern_text("[0,1,]", 2), "01");
}

TEST(MoeLayerFreq, RefusesWhatItCannotMean) {
  const std::pair<std::string, std::string> cases[] = {
      {"", "a number is missing"},
      {"0", "a number is at least 1"},
      {"-1", "a number is missing"},
      {"x", "a number is missing"},
      {"2 3", "unexpected '3'"},
      {"10001", "the number is too large"},
      {"[0]*3", "it describes 3 layers, the model has 4"},
      {"[0]*5", "it describes 5 layers, the model has 4"},
      {"[]", "it describes 0 layers, the model has 4"},
      {"[0,2]*2", "layers are marked by 0 or 1"},
      {"[0", "a ']' is missing"},
      {"[0,", "a number is missing"},
      {"[0 1 0 1]", "a ']' is missing"},
      {"([0]*4", "a ')' is missing"},
      {"[0]*4)", "unexpected ')'"},
      {"[0]*", "a number is missing"},
      {"[0]**4", "a number is missing"},
      {"[0]+", "a '[' is missing"},
      {"3*[0]", "a '[' is missing"},
      {"[1]*99999999999999999999", "the number is too large"},
      {"[1]*10001", "the number is too large"},
      {"[1,1]*5001", "it describes too many layers"},
      {"[1]*10000+[1]", "it describes too many layers"},
      {"[1]*9999+[1]", "it describes 10000 layers, the model has 4"},
      {"[1,1]*5000", "it describes 10000 layers, the model has 4"},
      {std::string(16, '(') + "[1]" + std::string(16, ')'),
       "it describes 1 layers, the model has 4"},
      {std::string(17, '(') + "[1]" + std::string(17, ')'), "the brackets are nested too deeply"},
      {std::string(50000, '(') + "[1]", "the brackets are nested too deeply"}};
  for (const auto& [pattern, problem] : cases) {
    EXPECT_EQ(refusal([&] { parse_moe_layer_freq(pattern, 4); }),
              "--moe-layer-freq " + quote_name(pattern) + ": " + problem +
                  ". Write a number, or lists of 0 and 1 such as ([0]*3+[1]*58).");
  }
}

// The last of every N layers is the one of another kind.
TEST(LayerPatterns, OfWindowsAndDeltaNetsLeaveOutTheLast) {
  for (const auto& parse : {parse_window_attn_skip_freq, parse_linear_attention_freq}) {
    const auto text = [&](const std::string& pattern, int32_t layers) {
      std::string marks;
      for (const bool has : parse(pattern, layers)) marks += has ? '1' : '0';
      return marks;
    };
    EXPECT_EQ(text("1", 3), "000");
    EXPECT_EQ(text("2", 5), "10101");
    EXPECT_EQ(text("4", 9), "111011101");
    EXPECT_EQ(text("10000", 3), "111");
    EXPECT_EQ(text("[1,0,0]", 3), "100");
  }
}

class MoeOptions : public ::testing::Test {
 protected:
  std::string refused() {
    return refusal([this] { override_moe(options, config); });
  }
  Options options;
  ModelConfig config = moe_model(2);
};

TEST_F(MoeOptions, NothingGivenChangesNothing) {
  override_moe(options, config);
  EXPECT_EQ(config, moe_model(2));
}

TEST_F(MoeOptions, OneCoefficientIsTheAuxLoss) {
  options.moe_aux_loss_coeff = {"0.25"};
  override_moe(options, config);
  EXPECT_EQ(config.moe_aux_loss_coeff, 0.25);
}

TEST_F(MoeOptions, SeveralLossesHaveACoefficientEach) {
  options.moe_router_load_balancing_type = {LoadBalancing::global_aux_loss,
                                            LoadBalancing::seq_aux_loss};
  options.moe_aux_loss_coeff = {"1e-3", "2e-4"};
  override_moe(options, config);
  EXPECT_EQ(config.moe_aux_loss_coeff, 0);
  EXPECT_EQ(config.moe_seq_aux_loss_coeff, 2e-4);
  EXPECT_EQ(config.moe_global_aux_loss_coeff, 1e-3);
}

TEST_F(MoeOptions, ATypeAloneTakesTheModelsCoefficient) {
  options.moe_router_load_balancing_type = {LoadBalancing::seq_aux_loss};
  override_moe(options, config);
  EXPECT_EQ(config.moe_seq_aux_loss_coeff, moe_model(2).moe_aux_loss_coeff);
  EXPECT_EQ(config.moe_aux_loss_coeff, 0);
}

TEST_F(MoeOptions, SinkhornAndNoneHaveNoLoss) {
  options.moe_router_load_balancing_type = {LoadBalancing::sinkhorn};
  override_moe(options, config);
  EXPECT_TRUE(config.moe_router_sinkhorn);
  EXPECT_EQ(config.moe_aux_loss_coeff, 0);
  options.moe_router_load_balancing_type = {LoadBalancing::none};
  override_moe(options, config);
  EXPECT_FALSE(config.moe_router_sinkhorn);
  EXPECT_NO_THROW(config.validate());
}

TEST_F(MoeOptions, RefusesListsThatDoNotGoTogether) {
  options.moe_router_load_balancing_type = {LoadBalancing::aux_loss, LoadBalancing::seq_aux_loss};
  options.moe_aux_loss_coeff = {"0.1"};
  EXPECT_NE(refused().find("names 2 losses"), std::string::npos);
  options.moe_router_load_balancing_type = {LoadBalancing::aux_loss, LoadBalancing::sinkhorn};
  options.moe_aux_loss_coeff = {};
  EXPECT_NE(refused().find("(one or several of them), sinkhorn, and none"), std::string::npos);
  options.moe_router_load_balancing_type = {LoadBalancing::none};
  options.moe_aux_loss_coeff = {"0.1"};
  EXPECT_NE(refused().find("has no loss"), std::string::npos);
  options.moe_router_load_balancing_type = {};
  for (const char* coefficient : {"-1", "x", "nan", "inf", "", "1 "}) {
    options.moe_aux_loss_coeff = {coefficient};
    EXPECT_NE(refused().find("--moe-aux-loss-coeff"), std::string::npos) << coefficient;
  }
}

TEST_F(MoeOptions, ACapacityFactorOfZeroOrLessIsDropless) {
  options.moe_expert_capacity_factor = -1;
  override_moe(options, config);
  EXPECT_EQ(config.moe_expert_capacity_factor, 0);
}

TEST_F(MoeOptions, ModelsWithoutExpertsHaveNoPattern) {
  config = dense_model(2);
  options.moe_layer_freq = "1";
  EXPECT_NE(refused().find("no experts"), std::string::npos);
}

}  // namespace
}  // namespace troupe
