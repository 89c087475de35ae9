// Command lines and what becomes of them; help texts.
#include <fstream>
#include <gtest/gtest.h>
#include <iterator>
#include <string>
#include <vector>

#include "options/command_line.h"
#include "options/man_page.h"
#include "options/shell_completion.h"
#include "options/suggest.h"
#include "runtime/device_memory.h"
#include "support/errors.h"

namespace troupe {
namespace {

using testing::message_of;

using Arguments = std::vector<std::string>;

Options parse(const Arguments& arguments) {
  const CommandLine command_line = parse_command_line(arguments);
  EXPECT_EQ(command_line.text, "") << "options were expected, not help";
  return command_line.options;
}

std::string refusal(const Arguments& arguments) {
  return message_of(ExitStatus::bad_request, [&] { parse_command_line(arguments); });
}

std::vector<std::string> notes(const Arguments& arguments) {
  return parse_command_line(arguments).notes;
}

const Arguments kTrain = {"train", "--data-path", "data/x", "--train-iters", "10", "--lr", "1e-3"};

Arguments train_with(const Arguments& more) {
  Arguments arguments = kTrain;
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

TEST(Parse, ReadsEveryKindOfValue) {
  const Options options =
      parse(train_with({"--num-layers=4", "--qk-layernorm", "--bf16", "--json", "--seed", "7",
                        "--save", "runs/a b", "--min-lr=1e-5", "--moe-router-pre-softmax=false"}));
  EXPECT_EQ(options.command, Command::train);
  EXPECT_EQ(options.data_path, Arguments{"data/x"});
  EXPECT_EQ(options.train_iters, 10);
  EXPECT_EQ(options.lr, 1e-3);
  EXPECT_EQ(options.num_layers, 4);
  EXPECT_EQ(options.qk_layernorm, true);
  EXPECT_EQ(options.moe_router_pre_softmax, false);
  EXPECT_EQ(options.untie_embeddings_and_output_weights, std::nullopt);
  EXPECT_EQ(options.compute_dtype, DType::bf16);
  EXPECT_TRUE(options.json);
  EXPECT_FALSE(options.quiet);
  EXPECT_EQ(options.seed, 7);
  EXPECT_EQ(options.save, "runs/a b");
  EXPECT_EQ(options.min_lr, 1e-5);
}

TEST(Parse, ListsTakeSeveralValuesAndPositionalsStandAnywhere) {
  const Options blend = parse(
      {"train", "--train-iters", "10", "--data-path", "0.7", "a", "-0.3", "b", "--lr", "1e-3"});
  EXPECT_EQ(blend.data_path, (Arguments{"0.7", "a", "-0.3", "b"}));
  EXPECT_EQ(blend.lr, 1e-3);
  EXPECT_EQ(parse({"verify", "model", "--oracle"}).hf_dir, "model");
  EXPECT_EQ(parse({"verify", "--oracle", "model"}).hf_dir, "model");
  EXPECT_EQ(parse({"verify", "--oracle", "--", "model"}).hf_dir, "model");
}

TEST(Parse, ThreeNumbersAreOneValue) {
  const Arguments train = {"train", "--data-path",         "x", "--lr", "1", "--train-samples",
                           "500",   "--global-batch-size", "8"};
  const auto ramp = [&](const Arguments& more) {
    Arguments arguments = train;
    arguments.insert(arguments.end(), more.begin(), more.end());
    return parse(arguments).rampup_batch_size;
  };
  EXPECT_EQ(ramp({"--rampup-batch-size", "2", "2", "100", "--seed", "3"}), "2 2 100");
  EXPECT_EQ(ramp({"--rampup-batch-size", "2 2 100"}), "2 2 100");
  EXPECT_EQ(ramp({"--rampup-batch-size=2 2 100"}), "2 2 100");
  EXPECT_EQ(ramp({}), "");
}

TEST(Parse, MegatronsFlagsGetAnAnswer) {
  EXPECT_EQ(parse_command_line(train_with({"--no-masked-softmax-fusion"})).notes,
            Arguments{"--no-masked-softmax-fusion is accepted and changes nothing: it chooses "
                      "between kernels of Megatron; here there is one of each."});
  EXPECT_TRUE(refusal(train_with({"--mtp-hsm"})).starts_with("--mtp-hsm: each depth "));
  EXPECT_EQ(parse(train_with({"--exit-signal-handler"})).exit_signal_handler, true);
}

TEST(Parse, GlobalFlagsMayStandBeforeTheCommand) {
  const Options options = parse({"--json", "--threads", "3", "verify", "model"});
  EXPECT_EQ(options.command, Command::verify);
  EXPECT_EQ(options.threads, 3);
  EXPECT_TRUE(options.json);
}

TEST(Parse, TextMayLookLikeAnything) {
  const Arguments generate = {"generate", "--load", "run"};
  const auto prompt = [&](const Arguments& more) {
    Arguments arguments = generate;
    arguments.insert(arguments.end(), more.begin(), more.end());
    return parse(arguments).prompt;
  };
  EXPECT_EQ(prompt({"--prompt", "-1 = x, [a, b] 'q' \"r\""}), "-1 = x, [a, b] 'q' \"r\"");
  EXPECT_EQ(prompt({"--prompt=--json"}), "--json");
  EXPECT_EQ(prompt({"--prompt", ""}), "");
  EXPECT_EQ(prompt({"--prompt", "[]"}), "[]");
  EXPECT_EQ(prompt({"--prompt", "two\nlines"}), "two\nlines");
}

TEST(Parse, UnknownFlags) {
  EXPECT_EQ(refusal({"train", "--hiden-size", "64"}),
            "Unknown flag --hiden-size. Did you mean --hidden-size?");
  EXPECT_EQ(refusal({"train", "--hidden_size=64"}),
            "Unknown flag --hidden_size. Did you mean --hidden-size?");
  EXPECT_EQ(refusal({"train", "--eod-mask", "3"}),
            "Unknown flag --eod-mask. Did you mean --eod-mask-loss?");
  EXPECT_EQ(refusal({"doctor", "--xyzzy"}),
            "Unknown flag --xyzzy. `troupe doctor --help` lists the flags.");
  EXPECT_EQ(refusal({"doctor", "-x"}), "Unknown flag -x. `troupe doctor --help` lists the flags.");
  EXPECT_EQ(refusal({"eval", "--min-lr", "3"}),
            "troupe eval does not take --min-lr; it is a flag of train, inspect, plan, bench.");
  EXPECT_EQ(refusal({"doctor", "now"}),
            "Unexpected argument 'now'. `troupe doctor --help` shows what doctor takes.");
}

TEST(Parse, MessagesAreOneLineWhateverWasGiven) {
  EXPECT_EQ(refusal({"doctor", "a\n\x1b[31m"}),
            "Unexpected argument 'a??[31m'. `troupe doctor --help` shows what doctor takes.");
  EXPECT_EQ(refusal({"a\nb"}).find("Unknown command a?b. "), 0U);
  EXPECT_EQ(refusal({"doctor", "--x\ny"}),
            "Unknown flag --x?y. `troupe doctor --help` lists the flags.");
  EXPECT_EQ(refusal({"doctor", "--ranks", "1\n2"}).find("--ranks takes a whole number"), 0U);
  EXPECT_LT(refusal({"doctor", std::string(100'000, 'x')}).size(), 400U);
}

TEST(Parse, Commands) {
  EXPECT_EQ(refusal({"trian"}), "Unknown command trian. Did you mean train?");
  EXPECT_TRUE(refusal({"fly"}).starts_with("Unknown command fly. The commands are train, eval"));
  EXPECT_TRUE(refusal({}).starts_with("Name a command: train, eval"));
  EXPECT_TRUE(refusal({"--json"}).starts_with("Name a command: train, eval"));
  EXPECT_EQ(refusal({"help", "trian"}), "Unknown command trian. Did you mean train?");
}

TEST(Parse, MissingValues) {
  EXPECT_EQ(refusal({"train", "--lr"}), "--lr needs a value.");
  EXPECT_EQ(refusal({"train", "--bf16", "--seed", "3", "--lr"}), "--lr needs a value.");
  EXPECT_EQ(refusal({"train", "--lr=", "3"}), "--lr needs a value.");
  EXPECT_EQ(refusal({"train", "--save", "--lr", "3"}),
            "--save needs a value, but --lr follows (to mean that text: --save=--lr).");
  EXPECT_EQ(refusal({"doctor", "--json=maybe"}),
            "--json takes no value, or =true or =false, not 'maybe'.");
  EXPECT_EQ(refusal({"verify"}), "verify needs HF_DIR.");
  EXPECT_EQ(refusal({"train", "--data-path", "x", "--lr", "1"}),
            "train needs --train-iters N or --train-samples N.");
}

TEST(Parse, AFileMayStandForTheDataPath) {
  const Arguments rest = {"--train-iters", "10", "--lr", "1e-3"};
  const auto train = [&](Arguments arguments) {
    arguments.insert(arguments.begin(), "train");
    arguments.insert(arguments.end(), rest.begin(), rest.end());
    return arguments;
  };
  EXPECT_EQ(parse(train({"--data-args-path", "f"})).data_args_path, "f");
  EXPECT_EQ(refusal(train({})), "train needs --data-path PREFIX.");
  EXPECT_EQ(refusal(train({"--data-path", "a", "--data-args-path", "f"})),
            "--data-path and --data-args-path exclude each other; give one of them.");
}

TEST(Parse, DataAreNamedInOneWay) {
  const auto train = [](Arguments more) {
    Arguments arguments = {"train", "--train-iters", "1", "--lr", "1"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return arguments;
  };
  EXPECT_TRUE(parse(train({"--mock-data"})).mock_data);
  EXPECT_EQ(parse(train({"--train-data-path", "0.5", "a", "0.5", "b"})).train_data_path.size(), 4U);
  EXPECT_EQ(refusal(train({"--data-args-path", "f", "--train-data-path", "a"})),
            "--data-args-path and --train-data-path exclude each other; give one of them.");
  EXPECT_EQ(notes(train({"--mock-data", "--train-data-path", "a"})),
            Arguments{"The data that are named are not read: --mock-data stands for them."});
  EXPECT_EQ(notes(train({"--train-data-path", "a", "--test-data-path", "b"})).size(), 0U);
}

// A search shares them among ranks.
TEST(Parse, CopiesOfExpertsNeedRanksThatShareThem) {
  const auto notes_of = [](Arguments more) {
    Arguments arguments = {
        "plan", "--gpus", "8xh100", "--global-batch-size", "8", "--moe-expert-clones", "2"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return notes(arguments);
  };
  const Arguments said = {
      "--moe-expert-clones 2 changes nothing: it copies experts between the ranks of "
      "--expert-model-parallel-size, and there is one. Give more of them, or leave it out."};
  EXPECT_EQ(notes_of({}), said);
  EXPECT_EQ(notes_of({"--search", "--expert-model-parallel-size", "1"}), said);
  EXPECT_EQ(notes_of({"--search"}), Arguments{});
  EXPECT_EQ(notes_of({"--expert-model-parallel-size", "2"}), Arguments{});
  EXPECT_EQ(notes_of({"--moe-expert-clones", "0"}).size(), 1U) << "given more than once";
}

TEST(Parse, FlagsThatWouldNotDoWhatTheySayAreExplained) {
  EXPECT_EQ(parse_command_line(train_with({"--reset-position-ids"})).notes.size(), 1U);
  EXPECT_EQ(refusal(train_with({"--dataloader-inter-document-masking"})),
            "--dataloader-inter-document-masking: give --reset-attention-mask: it keeps attention "
            "within documents.");
}

TEST(Parse, WrongValuesAreNamedBeforeMissingOnes) {
  EXPECT_EQ(refusal({"train", "--lr", "fast"}), "--lr takes a number, at least 0, not 'fast'.");
  EXPECT_EQ(refusal({"train", "--lr", "-1"}), "--lr takes a number, at least 0, not '-1'.");
  EXPECT_EQ(refusal({"train", "--threads", "1.5"}),
            "--threads takes a whole number, 0 to 4096, not '1.5'.");
  EXPECT_EQ(refusal({"train", "--device", "gpu"}), "--device takes cpu or cuda, not 'gpu'.");
}

TEST(Parse, TheLastOfRepeatedFlagsCounts) {
  const Arguments more = {"--seed", "1", "--lr=3", "--seed", "2", "--json", "--json", "--lr", "4"};
  const Options options = parse(train_with(more));
  EXPECT_EQ(options.seed, 2);
  EXPECT_EQ(options.lr, 4);
  EXPECT_TRUE(options.json);
  EXPECT_EQ(notes(train_with(more)),
            Arguments{"Given more than once, the last counts: --lr 4, --seed 2."});
  EXPECT_TRUE(notes(train_with({"--seed", "1", "--seed", "1"})).empty()) << "nothing changed";
  EXPECT_EQ(parse(train_with({"--moe-router-pre-softmax=false", "--moe-router-pre-softmax"}))
                .moe_router_pre_softmax,
            true);
  const auto formats = notes(train_with({"--ckpt-format", "torch", "--ckpt-format=torch_dist"}));
  ASSERT_EQ(formats.size(), 1U);
  EXPECT_EQ(formats[0].find("--ckpt-format torch_dist is accepted"), 0U);
}

TEST(Parse, RepeatedListsAreReplacedAsInArgparse) {
  const Arguments arguments = {"train",
                               "--data-path",
                               "a",
                               "b",
                               "--lr",
                               "1",
                               "--data-path=c",
                               "--profile-ranks",
                               "0",
                               "1",
                               "--rampup-batch-size",
                               "2",
                               "2",
                               "100",
                               "--profile-ranks",
                               "2",
                               "3",
                               "--data-path",
                               "0.7",
                               "d",
                               "0.3",
                               "e",
                               "--rampup-batch-size=4 4 200",
                               "--train-samples",
                               "500",
                               "--global-batch-size",
                               "8"};
  const Options options = parse(arguments);
  EXPECT_EQ(options.data_path, (Arguments{"0.7", "d", "0.3", "e"}));
  EXPECT_EQ(options.profile_ranks, (Arguments{"2", "3"}));
  EXPECT_EQ(options.rampup_batch_size, "4 4 200");
  ASSERT_EQ(notes(arguments).size(), 1U);
  EXPECT_NE(notes(arguments)[0].find("--data-path 0.7 d 0.3 e"), std::string::npos);
}

TEST(Parse, FlagsThatAreRepeatedForMoreCollect) {
  const Arguments tokenize = {"tokenize", "--input", "a", "--output-prefix", "p", "--input=b"};
  EXPECT_EQ(parse(tokenize).input, (Arguments{"a", "b"}));
  EXPECT_TRUE(notes(tokenize).empty());
  EXPECT_EQ(parse(train_with({"--valid-data-path", "a", "--valid-data-path", "b"})).valid_data_path,
            (Arguments{"a", "b"}));
}

TEST(Parse, ValuesThatAreReplacedAreLookedAtToo) {
  EXPECT_EQ(refusal(train_with({"--seed", "x", "--seed", "1"})),
            "--seed takes a whole number, at least 0, not 'x'.");
  EXPECT_EQ(refusal(train_with({"--bf16", "--compute-dtype", "fp32"})),
            "--compute-dtype and --bf16 set the same option; give one of them.");
}

TEST(Parse, OtherNamesOfMegatronMeanTheSame) {
  const Options options = parse(train_with(
      {"--override-opt-param-scheduler", "--moe-router-padding-for-fp8", "--openai-gelu"}));
  EXPECT_TRUE(options.override_opt_param_scheduler);
  EXPECT_TRUE(options.moe_router_padding_for_quantization);
  EXPECT_EQ(value_text(options, "activation"), "gelu-tanh");
  EXPECT_TRUE(parse({"plan", "--fake-init-process-group"}).fake_process_group);
  for (const char* flag :
       {"--moe-flex-dispatcher-num-sms", "--moe-deepep-num-sms", "--moe-hybridep-num-sms"}) {
    EXPECT_EQ(parse({"plan", flag, "20"}).moe_flex_dispatcher_num_sms, 20) << flag;
    EXPECT_EQ(refusal({"plan", std::string(flag) + "="}),
              "--moe-flex-dispatcher-num-sms needs a value.")
        << flag;
  }
}

TEST(Parse, ContradictionsAreRefused) {
  if (!has_cuda()) {
    EXPECT_EQ(refusal({"doctor", "--device", "cuda"}),
              "--device cuda: this build has no CUDA. Use --device cpu.");
    EXPECT_EQ(parse({"plan", "--device", "cuda"}).device, Device::cuda) << "runs nothing";
  }
  EXPECT_TRUE(
      refusal({"doctor", "--ranks", "2"}).starts_with("--ranks 2: troupe doctor works with one"));
  EXPECT_TRUE(refusal(train_with({"--finetune"})).starts_with("--finetune takes its weights"));
}

// Of a launcher that has started four.
TEST(Parse, RanksThatAreProcessesAreAsManyAsWereStarted) {
  const auto parse_as_four = [](const Arguments& arguments) {
    return parse_command_line(arguments, 4).options.ranks;
  };
  const auto refusal_as_four = [](const Arguments& arguments) {
    return message_of(ExitStatus::bad_request, [&] { parse_command_line(arguments, 4); });
  };
  const Arguments eval = {"eval", "--load", "x", "--data-path", "y"};
  EXPECT_EQ(parse_as_four(kTrain), 4);
  EXPECT_EQ(parse_as_four(train_with({"--ranks", "4"})), 4);
  EXPECT_EQ(parse_as_four(eval), 4);
  EXPECT_EQ(
      refusal_as_four(train_with({"--ranks", "2"})),
      "--ranks 2: a launcher has started 4 processes, one for each rank. Leave the flag out.");
  EXPECT_EQ(refusal_as_four(train_with({"--fake-process-group"})),
            "A launcher has started 4 processes, but troupe train --fake-process-group works in "
            "one. Start it without the launcher.");
  for (const char* command : {"plan", "inspect", "doctor"}) {
    EXPECT_EQ(refusal_as_four({command}), std::string("A launcher has started 4 processes, but "
                                                      "troupe ") +
                                              command +
                                              " works in one. Start it without the launcher.");
  }
  EXPECT_EQ(parse_command_line(kTrain, 1).options.ranks, 1);
}

// The largest that is allowed, and the next.
TEST(Parse, NumbersOfRanksHaveLimits) {
  const Arguments shape = {"--model", "mixtral-tiny"};
  const auto with = [&](Arguments arguments) {
    arguments.insert(arguments.end(), shape.begin(), shape.end());
    return arguments;
  };
  EXPECT_EQ(parse(with({"bench", "--ranks", "1024"})).ranks, 1024);
  EXPECT_EQ(refusal(with({"bench", "--ranks", "1025"})),
            "--ranks 1025: at most 1024 ranks run as threads of one process.");
  EXPECT_EQ(parse(with({"plan", "--ranks", "1025"})).ranks, 1025);
  EXPECT_EQ(parse(with({"plan", "--micro-batch-size", "2147483647"})).micro_batch_size, INT32_MAX);
  EXPECT_EQ(refusal(with({"plan", "--micro-batch-size", "1073741824", "--ranks", "2"})),
            "--micro-batch-size 1073741824 times --ranks 2 is more than a step holds.");
  EXPECT_EQ(parse(with({"inspect", "--ranks", "3", "--rank", "2"})).rank, 2);
  EXPECT_EQ(refusal(with({"inspect", "--ranks", "3", "--rank", "3"})),
            "--rank 3: there are the ranks 0 to 2 (--ranks).");
}

TEST(Help, IsShownWhereverItIsAskedFor) {
  const auto text = [](const Arguments& arguments) { return parse_command_line(arguments).text; };
  EXPECT_EQ(text({"--help"}), overview_help());
  EXPECT_EQ(text({"-h"}), overview_help());
  EXPECT_EQ(text({"help"}), overview_help());
  EXPECT_EQ(text({"train", "--help"}), command_help(Command::train));
  EXPECT_EQ(text({"train", "-h", "--seed", "1"}), command_help(Command::train));
  EXPECT_EQ(text({"--help", "train"}), command_help(Command::train));
  EXPECT_EQ(text({"help", "train"}), command_help(Command::train));
  EXPECT_EQ(text({"help", "--markdown"}), options_markdown());
  EXPECT_EQ(text({"--version"}), version_text());
  EXPECT_TRUE(version_text().starts_with("troupe " + std::string(kVersion) + "\ncommit "));
  EXPECT_EQ(text({"help", "--man"}), man_page());
  EXPECT_EQ(text({"help", "--completion", "fish"}), shell_completion(Shell::fish));
}

// How each shell is told of a value among choices, of another, of none, and of a quote.
TEST(Help, ShellsAreToldWhatFollowsAFlag) {
  struct Case {
    Shell shell;
    const char* line;
  };
  const Case cases[] = {
      {Shell::bash,
       "      --lr-decay-style) COMPREPLY=($(compgen -W 'constant linear cosine "
       "inverse-square-root WSD' -- \"$word\")); return ;;"},
      {Shell::zsh, "    _describe command commands"},
      {Shell::zsh, "  case $words[2] in"},
      {Shell::zsh, "    'verify:Compare a Hugging Face model'\\''s numbers with its reference'"},
      {Shell::zsh, "        '*--quiet[Print results, warnings and errors only.]' \\"},
      {Shell::zsh,
       "        '*--lr[Largest learning rate, reached at the end of the warm-up.]:X:_files' \\"},
      {Shell::zsh,
       "        '*--lr-decay-style[How the learning rate falls after the warm-up]:STYLE:(constant "
       "linear cosine inverse-square-root WSD)' \\"},
      {Shell::zsh,
       "        '*--config[Read options from this TOML file\\: the flags'\\'' names without "
       "dashes, "
       "and their values]:FILE:_files' \\"},
      {Shell::fish, "complete -c troupe -n __fish_use_subcommand -f -a train -d 'Train a model'"},
      {Shell::fish,
       "complete -c troupe -n '__fish_seen_subcommand_from train inspect plan bench' -l lr -d "
       "'Largest learning rate, reached at the end of the warm-up.' -r"},
      {Shell::fish,
       "complete -c troupe -n '__fish_seen_subcommand_from train inspect plan bench' -l "
       "lr-decay-style -d 'How the learning rate falls after the warm-up' -x -a 'constant linear "
       "cosine inverse-square-root WSD'"}};
  for (const Case& each : cases) {
    const std::string text = "\n" + shell_completion(each.shell);
    EXPECT_NE(text.find(std::string("\n") + each.line + "\n"), std::string::npos) << each.line;
  }
  for (const Shell shell : {Shell::bash, Shell::zsh, Shell::fish}) {
    const std::string text = shell_completion(shell);
    for (const OptionSpec& spec : option_table()) {
      if (spec.positional) continue;
      EXPECT_NE(text.find(spec.name), std::string::npos) << spec.name;
    }
  }
}

TEST(Help, IsCompleteAndFitsTheScreen) {
  for (const CommandInfo& info : command_table()) {
    EXPECT_NE(overview_help().find(info.summary), std::string::npos) << info.name;
    const std::string help = command_help(info.command);
    for (const OptionSpec& spec : option_table()) {
      if (!takes(info.command, spec)) continue;
      bool listed = false;
      for (const char* end : {" ", "\n", "["}) {
        listed = listed || help.find("\n  " + flag_of(spec) + end) != std::string::npos;
      }
      EXPECT_TRUE(listed) << info.name << ": " << spec.name;
    }
    size_t start = 0;
    while (start < help.size()) {
      const size_t end = help.find('\n', start);
      EXPECT_LE(end - start, 100U) << help.substr(start, end - start);
      EXPECT_NE(help[end - 1], ' ') << "blank at the end of: " << help.substr(start, end - start);
      start = end + 1;
    }
  }
}

TEST(Help, CommittedPageIsCurrent) {
  const std::string path = TROUPE_SOURCE_DIR "/docs/options.md";
  std::ifstream file(path);
  ASSERT_TRUE(file) << path;
  const std::string page((std::istreambuf_iterator<char>(file)), {});
  EXPECT_EQ(page, options_markdown())
      << "Write it again: build/troupe help --markdown > docs/options.md";
}

TEST(Suggest, FindsWhatWasMeant) {
  const std::vector<std::string_view> names = {
      "hidden-size", "ffn-hidden-size", "lr", "min-lr", "lr-warmup-iters", "seed", "save"};
  EXPECT_EQ(closest("hidden-size", names), "hidden-size");
  EXPECT_EQ(closest("hidden_size", names), "hidden-size");
  EXPECT_EQ(closest("hdiden-size", names), "hidden-size");
  EXPECT_EQ(closest("hiddensize", names), "hidden-size");
  EXPECT_EQ(closest("lr-warm", names), "lr-warmup-iters");
  EXPECT_EQ(closest("sead", names), "seed");
  EXPECT_EQ(closest("s", names), "") << "begins two names";
  EXPECT_EQ(closest("zebra-crossing", names), "");
  EXPECT_EQ(closest("xy", names), "") << "shares no letter with lr";
  const std::vector<std::string_view> one_letter = {"k"};
  EXPECT_EQ(closest("q", one_letter), "") << "no letter is left";
  EXPECT_EQ(closest("", names), "");
  EXPECT_EQ(closest("seed", {}), "");
}

// Without a bound on the work this would take 10^12 steps and more.
TEST(Suggest, NamesOfAnyLengthAreAnswered) {
  std::vector<std::string_view> names;
  for (const OptionSpec& spec : option_table()) names.push_back(spec.name);
  EXPECT_EQ(closest(std::string(100'000'000, 'h'), names), "");
}

}  // namespace
}  // namespace troupe
