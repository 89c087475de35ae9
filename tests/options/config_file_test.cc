// --config: a TOML file and the command line give the same options, and mistakes in the file are
// named with their line.
#include "options/config_file.h"

#include <gtest/gtest.h>
#include <string>
#include <vector>

#include "options/command_line.h"
#include "support/errors.h"
#include "support/files.h"

namespace troupe {
namespace {

using testing::message_of;
using testing::put_file;
using testing::TempFolder;

using Arguments = std::vector<std::string>;

class ConfigFile : public ::testing::Test {
 protected:
  void write(const std::string& text) const { put_file(path, text); }
  Options parse(Arguments arguments) const {
    arguments.push_back("--config");
    arguments.push_back(path);
    return parse_command_line(arguments).options;
  }
  std::string refusal(const std::string& text) const {
    write(text);
    return message_of(ExitStatus::bad_request, [&] { parse({"train"}); });
  }

  TempFolder folder;
  std::string path = folder / "config.toml";
};

constexpr const char* kRun = R"(
# a run
data-path = "data/x"
train_samples = 1_000   # underscores are hyphens
lr = 1e-3
min-lr = 0
lr-decay-style = "WSD"
lr-wsd-decay-samples = 100
global-batch-size = 8
rampup-batch-size = [2, 2, 100]
qk-layernorm = true
valid-data-path = ["a=b/c", "d"]
bf16 = true
)";

TEST_F(ConfigFile, SetsEveryKindOfOption) {
  write(kRun);
  const Options options = parse({"train"});
  EXPECT_EQ(options.data_path, Arguments{"data/x"});
  EXPECT_EQ(options.train_samples, 1000);
  EXPECT_EQ(options.lr, 1e-3);
  EXPECT_EQ(options.min_lr, 0);
  EXPECT_EQ(options.lr_decay_style, LrDecayStyle::wsd);
  EXPECT_EQ(options.rampup_batch_size, "2 2 100");
  EXPECT_EQ(options.qk_layernorm, true);
  EXPECT_EQ(options.valid_data_path, (Arguments{"a=b/c", "d"}));
  EXPECT_EQ(options.compute_dtype, DType::bf16);
}

TEST_F(ConfigFile, TheCommandLineWins) {
  write(kRun);
  const Options options = parse({"train", "--lr", "0.5", "--compute-dtype", "fp64",
                                 "--valid-data-path", "e", "--rampup-batch-size", "4", "4", "50"});
  EXPECT_EQ(options.lr, 0.5);
  EXPECT_EQ(options.compute_dtype, DType::f64) << "also over a shorthand";
  EXPECT_EQ(options.valid_data_path, Arguments{"e"}) << "lists are not mixed";
  EXPECT_EQ(options.rampup_batch_size, "4 4 50");
  EXPECT_EQ(options.train_samples, 1000);
}

TEST_F(ConfigFile, MixesDataAndMayBeGivenOtherData) {
  write("data-path = [0.7, \"a\", 0.3, \"b\"]\nlr = 1\ntrain-iters = 1\nmoe-aux-loss-coeff = 0.01");
  const Options options = parse({"train"});
  EXPECT_EQ(options.data_path, (Arguments{"0.7", "a", "0.3", "b"}));
  EXPECT_EQ(options.moe_aux_loss_coeff, Arguments{"0.01"});
  const Options other = parse({"train", "--data-args-path", "args"});
  EXPECT_EQ(other.data_args_path, "args");
  EXPECT_TRUE(other.data_path.empty()) << "--data-args-path stands for --data-path";
}

TEST_F(ConfigFile, ServesSeveralCommands) {
  write(kRun);
  EXPECT_EQ(parse({"plan"}).global_batch_size, 8);
  const Options eval = parse({"eval", "--load", "run"});
  EXPECT_EQ(eval.data_path, Arguments{"data/x"});
  EXPECT_EQ(eval.lr, std::nullopt) << "not an option of eval";
}

TEST_F(ConfigFile, MistakesAreNamedWithTheirLine) {
  const auto expect = [&](const std::string& text, const std::string& line,
                          const std::string& part) {
    const std::string message = refusal(text);
    EXPECT_TRUE(message.starts_with(path + ":" + line + ": ")) << message;
    EXPECT_NE(message.find(part), std::string::npos) << message;
  };
  expect("\nlr-decay-stile = \"cosine\"", "2", "Did you mean lr-decay-style?");
  expect("xyzzy = 1", "1", "no option");
  expect("use_torch_fsdp2 = true", "1", "say --use-megatron-fsdp");
  expect("lr = \"fast\"", "1", "lr takes no text");
  expect("lr = -1", "1", "--lr takes a number, at least 0, not '-1'");
  expect("seed = 1.5", "1", "--seed takes a whole number");
  expect("save = 3", "1", "save takes text");
  expect("lr = [1, 2]", "1", "lr takes one value");
  expect("lr = 1979-05-27", "1", "another kind of value");
  expect("[training]\nlr = 1", "1", "no option");
  expect("lr = 1\nlr = 2", "2", "");
  expect("train-iters = 1\ntrain_iters = 2", "2", "set twice");
  expect("bf16 = true\ncompute-dtype = \"fp32\"", "2", "set twice");
  expect("lr = ", "1", "");
  expect("config = \"other.toml\"", "1", "cannot name another");
  EXPECT_EQ(refusal("lr = 1\ntrain-iters = 5"), "train needs --data-path PREFIX.");
  write("");
  EXPECT_NE(message_of(ExitStatus::bad_request,
                       [&] {
                         parse_command_line(Arguments{"plan", "--config", "/nowhere/x.toml"});
                       })
                .find("/nowhere/x.toml"),
            std::string::npos);
}

// Without a bound the library's recursion runs out of stack.
TEST_F(ConfigFile, DepthHasABound) {
  const auto times = [](int count, const std::string& part) {
    std::string text;
    for (int i = 0; i < count; ++i) text += part;
    return text;
  };
  const std::string deep = "stand in each other more than 32 deep";
  for (const std::string& text :
       {times(200'000, "a.") + "a = 1", "[" + times(200'000, "a.") + "a]", times(200'000, "["),
        "a = " + times(200'000, "{a = "), "a = " + times(200'000, "["),
        "a." + times(200'000, "'b'.") + "c = 1"}) {
    EXPECT_EQ(refusal("lr = 1\n" + text).find(path + ":2: tables"), 0U);
    EXPECT_NE(refusal("lr = 1\n" + text).find(deep), std::string::npos);
  }
  // What stands in quotes or after # is no depth, nor are the dots of many numbers.
  write("lr = 1 # " + times(100, "[") + "\ntrain-iters = 1\nsave = \"\\\"" + times(100, "a.") +
        "\"\nload = '''\n" + times(100, "{.") + "'''\nmoe-aux-loss-coeff = [" + times(40, "0.5, ") +
        "0.5]\ndata-path = 'x'");
  EXPECT_EQ(parse({"train"}).moe_aux_loss_coeff.size(), 41U);
}

TEST_F(ConfigFile, CharactersBeyondAsciiAreReadInQuotesAndRefusedElsewhere) {
  for (const std::string& text :
       {std::string("min-lr = \xcd\x98 \"5\""), std::string("\xc3\xa4 = 1"),
        std::string("save = \"\"\xc3\xa4"), std::string("save = 3e\"\"\"1e30\xef\xb3\xbf\x17")}) {
    EXPECT_TRUE(refusal(text).starts_with(path + ":1: ")) << refusal(text);
  }
  write(
      "\xef\xbb\xbf# \xc3\xa4 \"\nsave = \"\\\"\xc3\xa4\" # '\xc3\xa4\nload = '\xc3\xa4'\n"
      "tokenizer-model = \"\"\"\n\xc3\xa4\\\n x\"\"\"\ndata-path = '''\xc3\xa4'''\n");
  const Options options = parse({"train", "--lr", "1", "--train-iters", "1"});
  EXPECT_EQ(options.save, "\"\xc3\xa4");
  EXPECT_EQ(options.load, "\xc3\xa4");
  EXPECT_EQ(options.tokenizer_model, "\xc3\xa4x");
  EXPECT_EQ(options.data_path, Arguments{"\xc3\xa4"});
}

TEST_F(ConfigFile, MessagesOfTheLibraryAreCleaned) {
  const std::string message = refusal("lr = t\x0b");
  EXPECT_TRUE(message.starts_with(path + ":1: ")) << message;
  EXPECT_EQ(message.find('\x0b'), std::string::npos) << message;
}

TEST_F(ConfigFile, SavedOptionsAreTheSameOptions) {
  const Arguments arguments = {"train",
                               "--data-path",
                               "data/with \"quotes\" and \\ and \t tabs",
                               "--train-samples",
                               "1000",
                               "--exit-interval",
                               "9007199254740993",
                               "--lr",
                               "0.30000000000000004",
                               "--adam-eps",
                               "4.9406564584124654e-324",
                               "--global-batch-size",
                               "8",
                               "--rampup-batch-size",
                               "2",
                               "2",
                               "100",
                               "--valid-data-path",
                               "a=b",
                               "--valid-data-path",
                               "c",
                               "--moe-router-pre-softmax=false",
                               "--eod-mask-loss",
                               "--reset-attention-mask",
                               "--bf16"};
  const Options before = parse_command_line(arguments).options;
  write(to_toml(before));
  Options after = parse({"train"});
  after.config.clear();
  for (const OptionDifference& difference : differences(before, after)) {
    ADD_FAILURE() << difference.spec->name << " was '" << difference.before << "', came back as '"
                  << difference.after << "'";
  }
}

TEST_F(ConfigFile, AFlagThatIsOffIsAsIfItWasNotThere) {
  write("mock-data = false\ndata-path = \"data/x\"\nlr = 1\ntrain-iters = 1\nno-save = false");
  const Options options = parse({"train"});
  EXPECT_FALSE(was_given(options, "no-save"));
  EXPECT_TRUE(was_given(options, "lr"));
  EXPECT_EQ(refusal("mock-data = false\nlr = 1\ntrain-iters = 1"),
            "train needs --data-path PREFIX.");
}

}  // namespace
}  // namespace troupe
