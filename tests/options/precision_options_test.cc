// --fp8-format and what goes with it.
#include "options/precision_options.h"

#include <filesystem>
#include <functional>
#include <gtest/gtest.h>
#include <set>
#include <string>
#include <vector>

#include "ops/precision/quantize/quantize.h"
#include "options/command_line.h"
#include "options/model_options.h"
#include "options/options.h"
#include "options/shipped_files.h"
#include "options/step_spec.h"
#include "passes/step_programs.h"
#include "program/test_models.h"
#include "support/errors.h"

namespace troupe::testing {
namespace {

PrecisionOptions chosen_with(const std::function<void(Options&)>& change) {
  Options options;
  change(options);
  return precision_options_of(options, moe_model(4));
}

std::string refusal_with(const std::function<void(Options&)>& change) {
  return message_of(ExitStatus::bad_request, [&] { chosen_with(change); });
}

// Whose products keep their precision: "LAYER:GROUP+GROUP ", or "LAYER:all ".
std::string kept_of(const PrecisionOptions& chosen) {
  std::string text;
  for (size_t layer = 0; layer < chosen.kept.size(); ++layer) {
    const auto& kept = chosen.kept[layer];
    std::string groups;
    for (const ProductGroup group : kProductGroups) {
      if (!kept[static_cast<size_t>(group)]) continue;
      groups += (groups.empty() ? "" : "+") + std::string(name_of(group));
    }
    if (kept[static_cast<size_t>(ProductGroup::none)]) groups = "all";
    if (!groups.empty()) text += std::to_string(layer) + ":" + groups + " ";
  }
  return text;
}

TEST(PrecisionOptionsOf, KeepsTheLayersAtTheEnds) {
  EXPECT_FALSE(chosen_with([](Options&) {}).any());
  const PrecisionOptions all = chosen_with([](Options& o) {
    o.fp8_format = Fp8Format::hybrid;
    o.fp8_recipe = Fp8Recipe::tensorwise;
  });
  EXPECT_EQ(all,
            (PrecisionOptions{
                .recipe = Fp8Recipe::tensorwise, .format = Fp8Format::hybrid, .kept = all.kept}));
  EXPECT_EQ(kept_of(all), "");
  const auto ends = [](int32_t first, int32_t last) {
    return [=](Options& o) {
      o.fp8_format = Fp8Format::e4m3;
      o.fp8_recipe = Fp8Recipe::blockwise;
      o.first_last_layers_bf16 = true;
      if (first >= 0) o.num_layers_at_start_in_bf16 = first;
      if (last >= 0) o.num_layers_at_end_in_bf16 = last;
    };
  };
  EXPECT_EQ(kept_of(chosen_with(ends(-1, -1))), "0:all 3:all ");
  EXPECT_EQ(kept_of(chosen_with(ends(3, 0))), "0:all 1:all 2:all ");
  EXPECT_EQ(kept_of(chosen_with(ends(0, 4))), "0:all 1:all 2:all 3:all ");
  EXPECT_EQ(refusal_with(ends(3, 2)),
            "--first-last-layers-bf16: 3 layers at the start and 2 at the end are more than the 4 "
            "that the model has. Give fewer with --num-layers-at-start-in-bf16 and "
            "--num-layers-at-end-in-bf16.");
}

TEST(PrecisionOptionsOf, FlagsThatGoTogether) {
  expect_phrase(refusal_with([](Options& o) { o.fp8_recipe = Fp8Recipe::mxfp8; }),
                "--fp8-recipe: it belongs to --fp8-format.");
  expect_phrase(refusal_with([](Options& o) { o.first_last_layers_bf16 = true; }),
                "--first-last-layers-bf16: it belongs to --fp8-format.");
  for (const Fp8Recipe recipe : {Fp8Recipe::blockwise, Fp8Recipe::mxfp8}) {
    expect_phrase(refusal_with([=](Options& o) {
                    o.fp8_format = Fp8Format::hybrid;
                    o.fp8_recipe = recipe;
                  }),
                  "--fp8-format hybrid: scales of blocks are for e4m3");
  }
  const auto fp4_with = [](bool Options::*flag) {
    return [=](Options& o) {
      o.fp4_format = Fp4Format::e2m1;
      o.*flag = true;
    };
  };
  EXPECT_EQ(chosen_with(fp4_with(&Options::no_fp8_wgrad)).weight_gradients, false);
  expect_phrase(refusal_with(fp4_with(&Options::fp8_param_gather)),
                "--fp8-param-gather: it belongs to --fp8-format.");
  expect_phrase(refusal_with(fp4_with(&Options::log_fp8_saturation)),
                "--log-fp8-saturation: it belongs to --fp8-format.");
  expect_phrase(refusal_with([](Options& o) { o.fp4_recipe = Fp4Recipe::nvfp4; }),
                "--fp4-recipe: it belongs to --fp4-format.");
  EXPECT_EQ(refusal_with([](Options& o) {
              o.fp8_format = Fp8Format::e4m3;
              o.fp4_format = Fp4Format::e2m1;
            }),
            "--fp4-format and --fp8-format exclude each other; give one of them.");
  const auto with_layers = [](std::optional<int32_t> Options::*layers) {
    return [=](Options& o) {
      o.fp8_format = Fp8Format::e4m3;
      o.fp8_recipe = Fp8Recipe::tensorwise;
      o.*layers = 1;
    };
  };
  expect_phrase(refusal_with(with_layers(&Options::num_layers_at_start_in_bf16)),
                "--num-layers-at-start-in-bf16: it belongs to --first-last-layers-bf16.");
  expect_phrase(refusal_with(with_layers(&Options::num_layers_at_end_in_bf16)),
                "--num-layers-at-end-in-bf16: it belongs to --first-last-layers-bf16.");
}

TEST(PrecisionOptionsOf, ModulesAreNamedAllOrNone) {
  const auto kept_with = [](const std::vector<std::string>& names) {
    return kept_of(chosen_with([&](Options& o) {
      o.fp8_format = Fp8Format::e4m3;
      o.fp8_modules = names;
    }));
  };
  for (const char* every : {"all", "auto"}) EXPECT_EQ(kept_with({every}), "");
  EXPECT_EQ(kept_with({}), "");
  const auto in_every_layer = [](const std::string& kept) {
    std::string text;
    for (const char* layer : {"0", "1", "2", "3"}) text += layer + (":" + kept) + " ";
    return text;
  };
  EXPECT_EQ(kept_with({"none"}), in_every_layer("attention+mlp+shared_experts+experts"));
  EXPECT_EQ(kept_with({"experts"}), in_every_layer("attention+mlp+shared_experts"));
  EXPECT_EQ(kept_with({"shared_experts", "attention", "mlp"}), in_every_layer("experts"));
  EXPECT_EQ(kept_with({"all:1-2"}),
            "0:attention+mlp+shared_experts+experts 3:attention+mlp+shared_experts+experts ");
  EXPECT_EQ(kept_with({"attention", "mlp", "shared_experts", "experts:0", "experts:3-"}),
            "1:experts 2:experts ");
  const auto refused = [&](const std::vector<std::string>& names) {
    return message_of(ExitStatus::bad_request, [&] { kept_with(names); });
  };
  EXPECT_EQ(refused({"attention", "router"}),
            "--fp8-modules 'router': choose among attention, mlp, shared_experts, experts and all, "
            "each with layers after a colon if not in all of them; or give none or auto alone.");
  expect_phrase(refused({"attention", "none"}), "--fp8-modules 'none': choose among");
  EXPECT_EQ(refused({"experts:2-4"}),
            "--fp8-modules 'experts:2-4': the layers are 0 to 3; give one, or FIRST-LAST as in "
            "experts:2-5, or FIRST- for all from there on.");
  for (const char* layers : {"", "-", "-2", "2-1", "4", "1.5", "1-2-3", "a"}) {
    expect_phrase(refused({"experts:" + std::string(layers)}), "the layers are 0 to 3");
  }
  expect_phrase(refusal_with([](Options& o) { o.fp8_modules = {"all"}; }),
                "--fp8-modules: it belongs to --fp8-format.");
}

TEST(PrecisionOptionsOf, RowsOnTheirWayHaveWholeBlocks) {
  EXPECT_FALSE(chosen_with([](Options&) {}).messages.any());
  const auto messages_of = [](int64_t hidden, const std::function<void(Options&)>& change) {
    Options options;
    change(options);
    ModelConfig model = moe_model(4);
    model.hidden_size = hidden;
    return precision_options_of(options, model).messages;
  };
  const auto dispatched = [](Options& o) { o.moe_dispatch_fwd_dtype = MessageDtype::mxfp8; };
  const auto combined = [](Options& o) { o.moe_combine_bwd_dtype = MessageDtype::mxfp8; };
  EXPECT_EQ(messages_of(96, dispatched), (MessageRounding{.dispatched = true}));
  EXPECT_EQ(messages_of(96, combined), (MessageRounding{.combine_gradients = true}));
  EXPECT_EQ(message_of(ExitStatus::bad_request, [&] { messages_of(80, dispatched); }),
            "--moe-dispatch-fwd-dtype mxfp8: 32 elements share a scale, and the hidden size 80 is "
            "no multiple of that. Leave it out.");
  expect_phrase(message_of(ExitStatus::bad_request, [&] { messages_of(80, combined); }),
                "--moe-combine-bwd-dtype mxfp8: 32 elements");
}

TEST(PrecisionOptionsOf, StoredInputsOfActivationsHaveWholeBlocksOnEachRank) {
  const auto stores = [](int64_t dense, int64_t experts, int64_t shared,
                         const std::function<void(Options&)>& change) {
    Options options;
    options.activation_func_fp8_input_store = true;
    change(options);
    ModelConfig model = moe_model(4);
    model.ffn_hidden_size = static_cast<int32_t>(dense);
    model.moe_ffn_hidden_size = static_cast<int32_t>(experts);
    model.moe_shared_expert_intermediate_size = static_cast<int32_t>(shared);
    return precision_options_of(options, model).stores_activation_inputs;
  };
  const auto plain = [](Options&) {};
  const auto tp2 = [](Options& o) { o.tensor_model_parallel_size = 2; };
  const auto etp1 = [](Options& o) {
    o.tensor_model_parallel_size = 2;
    o.expert_tensor_parallel_size = 1;
  };
  EXPECT_FALSE(chosen_with([](Options&) {}).stores_activation_inputs);
  EXPECT_TRUE(stores(0, 32, 0, plain));
  EXPECT_TRUE(stores(64, 64, 64, tp2));
  EXPECT_TRUE(stores(64, 32, 64, etp1));
  const auto refusal = [&](int64_t dense, int64_t experts, int64_t shared, const auto& change) {
    return message_of(ExitStatus::bad_request, [&] { stores(dense, experts, shared, change); });
  };
  EXPECT_EQ(refusal(0, 80, 0, plain),
            "--activation-func-fp8-input-store: 32 elements share a scale, and of the experts' "
            "inner size, 80, each rank has no multiple of that. Leave it out.");
  expect_phrase(refusal(0, 32, 0, tp2), "the experts' inner size, 32");
  expect_phrase(refusal(32, 64, 0, tp2), "the dense layers' inner size, 32");
  expect_phrase(refusal(0, 64, 96, tp2), "the shared experts' inner size, 96");
  expect_phrase(refusal(0, 64, 0, [](Options& o) { o.recompute_modules = {"moe_act"}; }),
                "--recompute-modules moe_act is about the whole input");
  expect_phrase(refusal(0, 64, 0, [](Options& o) { o.offload_modules = {"moe_act"}; }),
                "--offload-modules moe_act is about the whole input");
}

// Of each model that is shipped: weights are kept as masters alone where codes of them are all that
// the step reads. (That it reads nothing else of these, the pass checks.)
TEST(PrecisionOptionsOf, WeightsInCodesAreThoseOfProductsInEightBits) {
  int models = 0;
  for (const std::filesystem::path& file : shipped_files("", ".json")) {
    SCOPED_TRACE(file.string());
    const std::vector<std::string> arguments = {"inspect",
                                                "--model",
                                                file.string(),
                                                "--num-layers",
                                                "4",
                                                "--bf16",
                                                "--seq-length",
                                                "16",
                                                "--micro-batch-size",
                                                "1",
                                                "--global-batch-size",
                                                "1",
                                                "--fp8-format",
                                                "hybrid",
                                                "--fp8-param-gather"};
    const Options options = parse_command_line(arguments).options;
    const ModelConfig config = load_model_config(options);
    const StepSpec spec = step_spec_of(options, config);
    const ModelState state = spec.state_of(0);
    std::set<std::string> masters;
    for (const Parameter& parameter : state.parameters) {
      if ((*state.table)[parameter.value].is_stored) continue;
      masters.insert((*state.table)[parameter.master].name);
    }
    std::set<std::string> quantized;
    const TrainingStep step = build_training_step(config, state, spec.options);
    for (int32_t index = 0; index < step.program->op_count(); ++index) {
      const Op& op = step.program->op(index);
      if (op.spec != &kQuantize) continue;
      const Value& read = step.program->value(step.program->inputs(op)[0]);
      if (is_state(read.role)) quantized.insert(read.name);
    }
    EXPECT_EQ(masters, quantized);
    EXPECT_GE(masters.size(), 8U);
    ++models;
  }
  EXPECT_GT(models, 15);
}

}  // namespace
}  // namespace troupe::testing
