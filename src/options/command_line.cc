#include "options/command_line.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

#include "base/build_info.h"
#include "base/commit.h"
#include "base/error.h"
#include "base/text.h"
#include "ops/kernel_level.h"
#include "options/check_options.h"
#include "options/cluster_options.h"
#include "options/config_file.h"
#include "options/flag_model.h"
#include "options/foreign_flags.h"
#include "options/man_page.h"
#include "options/option_text.h"
#include "options/shell_completion.h"
#include "options/suggest.h"
#include "options/tokenizer_options.h"

namespace troupe {
namespace {

constexpr size_t kTextWidth = 79;   // columns of the help
constexpr size_t kHelpColumn = 28;  // where the explanations start

constexpr OptionMember kMockData = &Options::mock_data;

std::string_view name_without_value(std::string_view argument) {
  return argument.substr(0, argument.find('='));
}

// ---- Parsing ----

std::vector<std::string_view> command_names() {
  std::vector<std::string_view> names;
  for (const CommandInfo& info : command_table()) names.push_back(info.name);
  return names;
}

Command find_command(std::string_view name) {
  for (const CommandInfo& info : command_table()) {
    if (info.name == name) return info.command;
  }
  const std::vector<std::string_view> names = command_names();
  const std::string_view guess = closest(name, names);
  if (!guess.empty()) {
    throw_bad_request(fmt::format("Unknown command {}. Did you mean {}?", printable(name), guess));
  }
  throw_bad_request(fmt::format("Unknown command {}. The commands are {}.", printable(name),
                                fmt::join(names, ", ")));
}

// Commands that look at a training run take its whole command line: what they do not use is checked
// and left out.
bool is_left_out(Command command, const OptionSpec& spec) {
  const bool looks =
      command == Command::inspect || command == Command::plan || command == Command::bench;
  return looks && !takes(command, spec) && takes(Command::train, spec);
}

[[noreturn]] void refuse_unknown(std::string_view argument, Command command) {
  const std::string_view command_name = info_of(command).name;
  if (argument.size() < 2 || argument[0] != '-') {
    throw_bad_request(
        fmt::format("Unexpected argument '{0}'. `troupe {1} --help` shows what {1} "
                    "takes.",
                    printable(argument), command_name));
  }
  const std::string flag = printable(name_without_value(argument));
  const std::string_view whole = name_without_value(argument);
  const std::string_view name = whole.substr(std::min(whole.find_first_not_of('-'), whole.size()));
  const ForeignFlag* foreign = find_foreign_flag(name);
  // One that is accepted is here for another way to spell it.
  const bool misspelt = foreign != nullptr && foreign->accepted && takes_foreign_flags(command);
  if (foreign != nullptr && !misspelt) {
    throw_bad_request(fmt::format("{}: {}", flag, foreign->reason));
  }
  std::vector<std::string_view> others;
  std::vector<std::string_view> candidates = {"help"};
  for (const OptionSpec& spec : option_table()) {
    if (spec.positional) continue;
    if (takes(command, spec) || is_left_out(command, spec)) {
      any_name(spec, [&](std::string_view each) {
        candidates.push_back(each);
        return false;
      });
    }
    if (spec.name != name) continue;
    for (const CommandInfo& info : command_table()) {
      if (takes(info.command, spec)) others.push_back(info.name);
    }
  }
  if (takes_foreign_flags(command)) {
    for (const ForeignFlag& known : foreign_flags()) {
      if (known.accepted) candidates.push_back(known.name);
    }
  }
  const std::string_view guess = closest(name, candidates);
  if (!others.empty() && flag.starts_with("--")) {
    throw_bad_request(fmt::format("troupe {} does not take {}; it is a flag of {}.{}", command_name,
                                  flag, fmt::join(others, ", "),
                                  guess.empty() ? "" : fmt::format(" Did you mean --{}?", guess)));
  }
  if (!guess.empty()) {
    throw_bad_request(fmt::format("Unknown flag {}. Did you mean --{}?", flag, guess));
  }
  throw_bad_request(
      fmt::format("Unknown flag {}. `troupe {} --help` lists the flags.", flag, command_name));
}

[[noreturn]] void refuse_missing_value(const std::string& flag, std::string_view found) {
  std::string message = fmt::format("{} needs a value", flag);
  if (!found.empty()) {
    message +=
        fmt::format(", but {1} follows (to mean that text: {0}={1})", flag, printable(found));
  }
  throw_bad_request(message + ".");
}

// One option of the table as CLI11 knows it.
struct BoundOption {
  const OptionSpec* spec;
  CLI::Option* option;
};

// A flag of Megatron as CLI11 knows it.
struct BoundForeignFlag {
  const ForeignFlag* flag;
  CLI::Option* option;
};

// As CLI11 takes them: "--a" or "--a,--b".
std::string names_of(const OptionSpec& spec) {
  std::string names = flag_of(spec);
  any_name(spec, [&](std::string_view each) {
    if (each != spec.name) names += fmt::format(",--{}", each);
    return false;
  });
  return names;
}

// `flag` with its dashes.
bool is_flag_of(const OptionSpec& spec, std::string_view flag) {
  return !spec.positional &&
         any_name(spec, [&](std::string_view each) { return flag == fmt::format("--{}", each); });
}

// CLI11 cuts the arguments into flags and values; what they mean is decided by set_option, so that
// files and the command line follow the same rules and messages.
std::vector<BoundOption> bind_options(CLI::App& app, Command command) {
  std::vector<BoundOption> bound;
  const auto accept = [](const CLI::results_t&) { return true; };
  for (const OptionSpec& spec : option_table()) {
    if (!takes(command, spec) && !is_left_out(command, spec)) continue;
    CLI::Option* option = nullptr;
    if (needs_value(spec)) {
      option = app.add_option(names_of(spec), CLI::callback_t(accept));
    } else {
      option = app.add_flag_callback(names_of(spec), [] {});
    }
    option->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
    if (spec.values > 1) option->expected(1, spec.values);
    if (is_list(spec)) {
      option->expected(1, CLI::detail::expected_max_vector_size)->allow_extra_args();
    }
    bound.push_back({&spec, option});
  }
  return bound;
}

std::vector<BoundForeignFlag> bind_foreign_flags(CLI::App& app, Command command) {
  std::vector<BoundForeignFlag> bound;
  if (!takes_foreign_flags(command)) return bound;
  for (const ForeignFlag& flag : foreign_flags()) {
    if (!flag.accepted) continue;
    const std::string name = fmt::format("--{}", flag.name);
    CLI::Option* option = nullptr;
    if (flag.values == ForeignValues::none) {
      option = app.add_flag_callback(name, [] {});
    } else {
      option = app.add_option(name, CLI::callback_t([](const CLI::results_t&) { return true; }));
    }
    option->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
    if (flag.values == ForeignValues::many) {
      option->expected(1, CLI::detail::expected_max_vector_size)->allow_extra_args();
    }
    bound.push_back({&flag, option});
  }
  return bound;
}

// A flag that stands where a value should: the value is missing.
void refuse_swallowed_flags(const std::string& flag, const CLI::Option& option,
                            const std::vector<std::string>& arguments) {
  for (const std::string& value : option.results()) {
    const bool stands_alone =
        std::find(arguments.begin(), arguments.end(), value) != arguments.end();
    if (value.size() > 2 && value.starts_with("--") && stands_alone) {
      refuse_missing_value(flag, value);
    }
  }
}

// Where the same member is set by two flags, of which one is a shorthand.
void refuse_two_flags_of_one_option(const std::vector<BoundOption>& bound) {
  for (const BoundOption& first : bound) {
    if (first.option->count() == 0) continue;
    for (const BoundOption& second : bound) {
      if (&second == &first) break;
      if (second.option->count() > 0 && second.spec->member == first.spec->member) {
        throw_bad_request(fmt::format("{} and {} set the same option; give one of them.",
                                      flag_of(*second.spec), flag_of(*first.spec)));
      }
    }
  }
}

// Where flag `spec` last stands among the arguments. No value looks like a flag that stands alone
// (refuse_swallowed_flags).
size_t last_position(const OptionSpec& spec, const std::vector<std::string>& arguments) {
  size_t last = 0;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const std::string_view name = name_without_value(arguments[i]);
    if (is_flag_of(spec, name)) last = i;
  }
  return last;
}

// How many values a list had before its flag stood there for the last time.
size_t values_before_last(const OptionSpec& spec, Command command,
                          const std::vector<std::string>& arguments) {
  CLI::App app;
  app.set_help_flag();
  app.allow_extras();
  const std::vector<BoundOption> bound = bind_options(app, command);
  bind_foreign_flags(app, command);
  const auto last = arguments.begin() + static_cast<std::ptrdiff_t>(last_position(spec, arguments));
  app.parse(std::vector<std::string>(std::make_reverse_iterator(last), arguments.rend()));
  for (const BoundOption& each : bound) {
    if (each.spec == &spec) return each.option->results().size();
  }
  return 0;
}

// What a flag means that may stand there several times: the last one counts, as in argparse,
// except for those that collect. Those that replaced another value are named in `replaced`. All
// values are looked at.
std::vector<std::string> values_that_count(const BoundOption& bound, Command command,
                                           const std::vector<std::string>& arguments,
                                           std::vector<std::string>& replaced) {
  const OptionSpec& spec = *bound.spec;
  std::vector<std::string> values = bound.option->results();
  size_t before = 0;
  if ((is_list(spec) && !spec.collects) || spec.values > 1) {
    before = values_before_last(spec, command, arguments);
  } else if (!is_list(spec)) {
    before = values.size() - 1;
  }
  const auto last = values.begin() + static_cast<std::ptrdiff_t>(before);
  Options scratch;
  if (spec.values == 1) {
    for (auto value = values.begin(); value != last; ++value) set_option(scratch, spec, *value);
  }
  std::vector<std::string> counting(last, values.end());
  values.erase(last, values.end());
  const bool is_other = std::any_of(values.begin(), values.end(), [&](const std::string& value) {
    return counting.size() > 1 || value != counting.front();
  });
  if (is_other) replaced.push_back(fmt::format("{} {}", flag_of(spec), fmt::join(counting, " ")));
  return counting;
}

// One of `given` that does not go with `spec`, or null.
const OptionSpec* find_excluded(const std::set<const OptionSpec*>& given, const OptionSpec& spec) {
  const auto found = std::find_if(given.begin(), given.end(), [&](const OptionSpec* other) {
    return exclude_each_other(*other, spec);
  });
  return found == given.end() ? nullptr : *found;
}

// Of a flag that stands there several times, the last one counts.
std::vector<std::string> notes_on_foreign_flags(const std::vector<BoundForeignFlag>& bound) {
  std::vector<std::string> notes;
  for (const auto& [flag, option] : bound) {
    if (option->count() == 0) continue;
    std::string value;
    if (flag->values == ForeignValues::one) value = option->results().back();
    if (flag->values == ForeignValues::many) {
      value = fmt::format("{}", fmt::join(option->results(), " "));
    }
    notes.push_back(accept_foreign_flag(*flag, value));
  }
  return notes;
}

// Whether the model has gelu by default where Megatron would take its fused kernel of bias and
// gelu.
bool has_gelu_of_another_form(const Options& options,
                              const std::vector<BoundForeignFlag>& foreign) {
  if (!options.model.empty() || !describes_shape(options) || options.activation ||
      options.disable_bias_linear.value_or(false) || !options.add_bias_linear.value_or(true)) {
    return false;
  }
  return std::none_of(foreign.begin(), foreign.end(), [](const BoundForeignFlag& each) {
    return each.flag->name == "no-bias-gelu-fusion" && each.option->count() > 0;
  });
}

// Options that are what they are for nothing.
std::vector<std::string> notes_on_options(const Options& options,
                                          const std::vector<std::string>& left_out) {
  std::vector<std::string> notes;
  if (!left_out.empty()) {
    notes.push_back(fmt::format("troupe {} does not use {}.", info_of(options.command).name,
                                fmt::join(left_out, ", ")));
  }
  if (options.sequence_parallel && options.tensor_model_parallel_size == 1) {
    notes.emplace_back(
        "--sequence-parallel changes nothing: it shares the sequence among the ranks of "
        "--tensor-model-parallel-size, and there is one.");
  }
  const bool experts_are_shared =
      options.expert_model_parallel_size > 1 ||
      (options.search && !was_given(options, "expert-model-parallel-size"));
  if (options.moe_expert_clones > 0 && !experts_are_shared) {
    notes.push_back(fmt::format(
        "--moe-expert-clones {} changes nothing: it copies experts between the ranks of "
        "--expert-model-parallel-size, and there is one. Give more of them, or leave it out.",
        options.moe_expert_clones));
  }
  if (options.decrease_batch_size_if_needed && options.global_batch_size &&
      global_batch_size_of(options) != *options.global_batch_size) {
    notes.push_back(fmt::format(
        "--global-batch-size {} is {} here: --decrease-batch-size-if-needed makes it a multiple of "
        "--micro-batch-size {} x DP {}.",
        *options.global_batch_size, global_batch_size_of(options), options.micro_batch_size,
        data_parallel_size_of(options)));
  }
  const bool names_data = !options.data_path.empty() || !options.data_args_path.empty() ||
                          !options.train_data_path.empty() ||
                          !options.per_split_data_args_path.empty();
  if (options.mock_data && names_data) {
    notes.emplace_back("The data that are named are not read: --mock-data stands for them.");
  }
  if (options.tokenizer_type == "NullTokenizer" && !options.tokenizer_model.empty()) {
    notes.push_back(fmt::format("--tokenizer-model {} is not read: NullTokenizer has no file.",
                                printable(options.tokenizer_model)));
  }
  if (!options.test_data_path.empty() && options.command == Command::eval) {
    notes.emplace_back(
        "--test-data-path is read when a training run is over; here give --valid-data-path.");
  }
  if (const auto assumed = assumed_vocabulary(options)) {
    notes.push_back(
        fmt::format("--tokenizer-{}: its files are not here; taken to be {}'s, with {} "
                    "tokens.",
                    options.tokenizer_model.empty() ? "type " + options.tokenizer_type
                                                    : "model " + printable(options.tokenizer_model),
                    assumed->name, assumed->size));
  }
  return notes;
}

// Ranks that are processes are as many as were started.
void check_processes(const Options& options, int32_t processes) {
  const bool runs_on_several = runs_on_ranks(options.command) && !options.fake_process_group;
  if (!runs_on_several) {
    throw_bad_request(
        fmt::format("A launcher has started {} processes, but troupe {}{} works in one. Start it "
                    "without the launcher.",
                    processes, info_of(options.command).name,
                    options.fake_process_group ? " --fake-process-group" : ""));
  }
  if (options.ranks != processes) {
    throw_bad_request(
        fmt::format("--ranks {}: a launcher has started {} processes, one for each rank. Leave the "
                    "flag out.",
                    options.ranks, processes));
  }
}

Options parse_options(Command command, const std::vector<std::string>& arguments, int32_t processes,
                      bool& wants_help, std::vector<std::string>& notes) {
  CLI::App app;
  app.set_help_flag();
  app.allow_extras();
  const CLI::Option* help = app.add_flag("-h,--help");
  const std::vector<BoundOption> bound = bind_options(app, command);
  const std::vector<BoundForeignFlag> foreign = bind_foreign_flags(app, command);

  // CLI11 would take the next argument as the value of "--name=", and has words of its own for a
  // wrong value of a flag that needs none.
  for (const std::string& argument : arguments) {
    const std::string_view flag = name_without_value(argument);
    if (flag.size() == argument.size()) continue;
    const std::string_view value = std::string_view(argument).substr(flag.size() + 1);
    for (const auto& [spec, option] : bound) {
      if (!is_flag_of(*spec, flag)) continue;
      if (value.empty()) refuse_missing_value(flag_of(*spec), {});
      Options scratch;
      if (!needs_value(*spec)) set_option(scratch, *spec, value);
    }
    for (const auto& [known, option] : foreign) {
      if (known->values != ForeignValues::none || fmt::format("--{}", known->name) != flag)
        continue;
      if (value != "true") throw_bad_request(fmt::format("{} takes no value.", flag));
    }
  }
  try {
    app.parse(std::vector<std::string>(arguments.rbegin(), arguments.rend()));
  } catch (const CLI::ArgumentMismatch&) {
    // Only the last argument can lack its value: CLI11 takes whatever follows.
    throw_bad_request(fmt::format("{} needs a value.", printable(arguments.back())));
  } catch (const CLI::ParseError& error) {
    throw_bad_request(error.what());
  }

  Options options;
  options.command = command;
  options.ranks = processes;
  wants_help = help->count() > 0;
  if (wants_help) return options;

  // First, because a missing value swallows the flag after it and leaves that one's value over.
  for (const auto& [spec, option] : bound) {
    if (needs_value(*spec)) refuse_swallowed_flags(flag_of(*spec), *option, arguments);
  }
  for (const auto& [flag, option] : foreign) {
    if (flag->values == ForeignValues::none) continue;
    refuse_swallowed_flags(fmt::format("--{}", flag->name), *option, arguments);
  }
  for (const std::string& unknown : app.remaining()) {
    if (unknown != "--") refuse_unknown(unknown, command);
  }
  refuse_two_flags_of_one_option(bound);

  notes = notes_on_foreign_flags(foreign);
  std::set<const OptionSpec*> given;
  std::vector<std::string> left_out;
  std::vector<std::string> replaced;
  Options scratch;
  for (const auto& [spec, option] : bound) {
    if (option->count() == 0) continue;
    given.insert(spec);
    if (!takes(command, *spec)) left_out.push_back(flag_of(*spec));
    Options& target = takes(command, *spec) ? options : scratch;
    const std::vector<std::string> values =
        values_that_count({spec, option}, command, arguments, replaced);
    if (spec->values > 1) {
      set_option(target, *spec, fmt::format("{}", fmt::join(values, " ")));
      continue;
    }
    for (const std::string& value : values) set_option(target, *spec, value);
  }
  if (!replaced.empty()) {
    notes.push_back(fmt::format("Given more than once, the last counts: {}.",
                                printable(fmt::format("{}", fmt::join(replaced, ", ")))));
  }
  if (!options.config.empty()) read_config_file(options.config, options, given, notes);
  for (const auto& [spec, option] : bound) {
    const OptionSpec* other = find_excluded(given, *spec);
    // Made-up data win over those that are named, as in Megatron; a note says so.
    const bool either_is_mock =
        other != nullptr && (spec->member == kMockData || other->member == kMockData);
    if (other != nullptr && given.contains(spec) && !either_is_mock) {
      throw_bad_request(fmt::format("{} and {} exclude each other; give one of them.",
                                    flag_of(*spec), flag_of(*other)));
    }
    if (!given.contains(spec) && other == nullptr && requires_option(command, *spec)) {
      throw_bad_request(fmt::format("{} needs {}{}.", info_of(command).name, flag_of(*spec),
                                    spec->positional ? "" : fmt::format(" {}", spec->metavar)));
    }
  }
  for (const OptionSpec* spec : given) {
    if (takes(command, *spec)) options.given.push_back(spec->name);
  }
  apply_gpus(options);
  if (processes > 1) check_processes(options, processes);
  check_options(options);
  for (std::string& note : notes_on_options(options, left_out)) notes.push_back(std::move(note));
  if (has_gelu_of_another_form(options, foreign)) {
    notes.emplace_back(
        "The activation is gelu in its exact form; Megatron's fused kernel of bias and gelu is the "
        "tanh form. --activation gelu-tanh gives the same numbers, --no-bias-gelu-fusion says that "
        "the exact form is meant.");
  }
  return options;
}

// The position of the command: the first argument that is no global flag and no value of one.
size_t find_command_position(std::span<const std::string> arguments) {
  size_t i = 0;
  while (i < arguments.size() && arguments[i].starts_with("-")) {
    bool takes_next = false;
    for (const OptionSpec& spec : option_table()) {
      if (flag_of(spec) == arguments[i]) takes_next = needs_value(spec);
    }
    i += takes_next ? 2 : 1;
  }
  return i;
}

// ---- Help ----

// Appends `text` in lines of kTextWidth columns, each after `indent` blanks except the first,
// which begins in column `column`.
void append_wrapped(std::string& out, std::string_view text, size_t indent, size_t column) {
  while (!text.empty()) {
    const size_t end = std::min(text.find(' '), text.size());
    if (column > indent && column + end > kTextWidth) {
      while (out.ends_with(' ')) out.pop_back();
      out += '\n' + std::string(indent, ' ');
      column = indent;
    }
    out += text.substr(0, end);
    column += end;
    text.remove_prefix(std::min(end + 1, text.size()));
    if (!text.empty()) {
      out += ' ';
      ++column;
    }
  }
  out += '\n';
}

void append_option(std::string& out, const OptionSpec& spec, Command command) {
  const std::string usage = usage_of(spec);
  out += "  " + usage;
  size_t column = 2 + usage.size();
  if (column + 2 > kHelpColumn) {
    out += '\n';
    column = 0;
  }
  out.append(kHelpColumn - column, ' ');

  const std::string text = explanation_of(spec, command);
  append_wrapped(out, text, kHelpColumn, kHelpColumn);
}

void append_options(std::string& out, Command command, bool global) {
  std::string_view group;
  for (const OptionSpec& spec : option_table()) {
    if (!takes(command, spec) || is_global(spec) != global) continue;
    if (spec.group != group) {
      group = spec.group;
      out += fmt::format("\n{}:\n", group);
    }
    append_option(out, spec, command);
  }
}

// Text inside a table cell.
std::string cell(std::string_view text) {
  std::string escaped;
  for (char c : text) {
    if (c == '|') escaped += '\\';
    escaped += c;
  }
  return escaped;
}

std::string commands_cell(const OptionSpec& spec) {
  std::vector<std::string> names;
  size_t count = 0;
  for (const CommandInfo& info : command_table()) {
    if (!takes(info.command, spec)) continue;
    ++count;
    names.push_back(
        fmt::format("{}{}", info.name, requires_option(info.command, spec) ? " (required)" : ""));
  }
  // Only `help` does without the global flags.
  return count + 1 >= command_table().size() ? "all" : fmt::format("{}", fmt::join(names, ", "));
}

// What becomes of Megatron's other flags.
std::string foreign_flags_markdown() {
  std::string out =
      "\n## Flags of Megatron that are no options\n\n"
      "train, inspect, plan and bench accept those that ask for what is always so here, or choose "
      "how Megatron runs; a line on standard error says that they change nothing. The others are "
      "refused, because without them the run would not be the one that was meant "
      "([coming from Megatron](coming_from_megatron.md)).\n\n"
      "| Flag | Accepted | Why |\n|---|---|---|\n";
  for (const ForeignFlag& flag : foreign_flags()) {
    const std::string_view value = flag.values == ForeignValues::none   ? ""
                                   : flag.values == ForeignValues::many ? " X..."
                                                                        : " X";
    const std::string accepted = !flag.accepted      ? "no"
                                 : flag.only.empty() ? "yes"
                                                     : fmt::format("{} alone", flag.only);
    out += fmt::format("| `--{}{}` | {} | {} |\n", flag.name, value, accepted, cell(flag.reason));
  }
  return out;
}

}  // namespace

CommandLine parse_command_line(std::span<const std::string> arguments, int32_t processes) {
  const size_t position = find_command_position(arguments);
  if (position >= arguments.size()) {
    for (const std::string& argument : arguments) {
      if (argument == "-h" || argument == "--help")
        return {.options = {}, .notes = {}, .text = overview_help()};
      if (argument == "--version") return {.options = {}, .notes = {}, .text = version_text()};
    }
    throw_bad_request(fmt::format("Name a command: {}. `troupe --help` explains them.",
                                  fmt::join(command_names(), ", ")));
  }
  const Command command = find_command(arguments[position]);
  std::vector<std::string> rest(arguments.begin(), arguments.begin() + position);
  rest.insert(rest.end(), arguments.begin() + position + 1, arguments.end());

  CommandLine result;
  bool wants_help = false;
  result.options = parse_options(command, rest, processes, wants_help, result.notes);
  if (wants_help) {
    result.text = command_help(command);
  } else if (command == Command::help) {
    const std::string& topic = result.options.topic;
    const std::optional<Shell>& shell = result.options.completion;
    result.text = result.options.markdown ? options_markdown()
                  : result.options.man    ? man_page()
                  : shell                 ? shell_completion(*shell)
                  : topic.empty()         ? overview_help()
                                          : command_help(find_command(topic));
  }
  return result;
}

std::string version_text() {
  return fmt::format(
      "troupe {}\n"
      "commit     {}\n"
      "compiler   {}\n"
      "processor  {}\n"
      "cuda       {}\n",
      kVersion, build_commit(), build_compiler(), fmt::join(kernel_levels(), ", "),
      build_cuda().empty() ? "not in this build" : build_cuda());
}

std::string overview_help() {
  std::string out =
      "Troupe trains Mixture-of-Experts language models.\n"
      "\n"
      "Usage: troupe COMMAND [FLAGS]\n"
      "       troupe COMMAND --help     every flag of a command\n"
      "       troupe --version\n"
      "\n"
      "Commands:\n";
  for (const CommandInfo& info : command_table()) {
    out += fmt::format("  {:<10}  {}\n", info.name, info.summary);
  }
  out += "\nFlags of every command:\n";
  for (const OptionSpec& spec : option_table()) {
    if (is_global(spec)) append_option(out, spec, Command::train);
  }
  out += "\nExit status:\n";
  for (const ExitStatusText& entry : exit_status_texts()) {
    out += fmt::format("  {:<10}  {}\n", static_cast<int>(entry.status), entry.text);
  }
  return out;
}

std::string command_help(Command command) {
  const CommandInfo& info = info_of(command);
  std::string out =
      fmt::format("{}.\n\nUsage: {}\n\nExample:\n  ", info.summary, usage_line(command));
  append_wrapped(out, info.example, 6, 2);
  append_options(out, command, false);
  append_options(out, command, true);
  return out;
}

std::string options_markdown() {
  std::string out =
      "# Commands and options\n"
      "\n"
      "For people who look up a flag or a command: what each does, its default and its range. "
      "Written "
      "by `troupe help --markdown`; a test keeps the two the same.\n"
      "\n"
      "Flags are written `--name VALUE` or `--name=VALUE` and have Megatron's names where Megatron "
      "has them.\n"
      "A TOML file of options (`--config FILE`) uses the same names without the dashes, hyphens "
      "or underscores alike: `train-iters = 1000`.\n"
      "\n"
      "## Commands\n"
      "\n"
      "| Command | What it does |\n"
      "|---|---|\n";
  for (const CommandInfo& info : command_table()) {
    out += fmt::format("| `{}` | {} |\n", cell(usage_line(info.command)), cell(info.summary));
  }
  out +=
      "\n"
      "| Exit status | Meaning |\n"
      "|---|---|\n";
  for (const ExitStatusText& entry : exit_status_texts()) {
    out += fmt::format("| {} | {} |\n", static_cast<int>(entry.status), entry.text);
  }
  std::string_view group;
  for (const OptionSpec& spec : option_table()) {
    if (spec.group != group) {
      group = spec.group;
      out += fmt::format(
          "\n## {}\n\n| Option | Default | Values | Commands | Meaning |\n|---|---|---|---|---|\n",
          group);
    }
    out += fmt::format("| `{}` | {} | {} | {} | {} |\n", cell(usage_of(spec)),
                       cell(default_text(spec)), cell(range_text(spec)), commands_cell(spec),
                       cell(spec.help));
  }
  return out + foreign_flags_markdown();
}

}  // namespace troupe
