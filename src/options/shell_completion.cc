#include "options/shell_completion.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <string_view>
#include <vector>

namespace troupe {
namespace {

// What follows the flag in the script: nothing, one of its choices, or something else, for which
// files are offered.
bool has_choices(const OptionSpec& spec) {
  return needs_value(spec) && spec.shorthand.empty() && !choices_of(spec).empty();
}

std::vector<const OptionSpec*> flags_of(Command command) {
  std::vector<const OptionSpec*> flags;
  for (const OptionSpec& spec : option_table()) {
    if (takes(command, spec) && !spec.positional) flags.push_back(&spec);
  }
  return flags;
}

std::string all_command_names() {
  std::vector<std::string_view> names;
  for (const CommandInfo& info : command_table()) names.push_back(info.name);
  return fmt::format("{}", fmt::join(names, " "));
}

// In single quotes of any shell of the three.
std::string shell_quoted(std::string_view text) {
  std::string out = "'";
  for (const char c : text) {
    if (c == '\'') {
      out += R"('\'')";
    } else {
      out += c;
    }
  }
  return out + "'";
}

// The first sentence of the help.
std::string_view brief(const OptionSpec& spec) {
  return spec.help.substr(0, spec.help.find(". "));
}

std::string bash() {
  std::string out = fmt::format(
      R"(# Completes the command line of troupe in bash. Written by `troupe help --completion bash`.
_troupe() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} flag=${{COMP_WORDS[COMP_CWORD - 1]}} command= each flags
  # --flag=value is three words.
  if [[ $word == = ]]; then word=; fi
  if [[ $flag == = ]]; then flag=${{COMP_WORDS[COMP_CWORD - 2]}}; fi
  for each in "${{COMP_WORDS[@]:1:COMP_CWORD - 1}}"; do
    case $each in
      {}) command=$each; break ;;
    esac
  done
  if [[ $word != -* ]]; then
    case $flag in
)",
      [&] {
        std::vector<std::string_view> names;
        for (const CommandInfo& info : command_table()) names.push_back(info.name);
        return fmt::format("{}", fmt::join(names, " | "));
      }());
  for (const OptionSpec& spec : option_table()) {
    if (spec.positional || !has_choices(spec)) continue;
    out += fmt::format("      {}) COMPREPLY=($(compgen -W {} -- \"$word\")); return ;;\n",
                       flag_of(spec),
                       shell_quoted(fmt::format("{}", fmt::join(choices_of(spec), " "))));
  }
  out += fmt::format(
      R"(    esac
  fi
  if [[ -z $command || $flag == help ]]; then
    COMPREPLY=($(compgen -W '{} --help --version' -- "$word"))
    return
  fi
  if [[ $word != -* ]]; then
    COMPREPLY=($(compgen -f -- "$word"))
    return
  fi
  case $command in
)",
      all_command_names());
  for (const CommandInfo& info : command_table()) {
    std::vector<std::string> flags = {"--help"};
    for (const OptionSpec* spec : flags_of(info.command)) flags.push_back(flag_of(*spec));
    out += fmt::format("    {}) flags='{}' ;;\n", info.name, fmt::join(flags, " "));
  }
  return out + R"(  esac
  COMPREPLY=($(compgen -W "$flags" -- "$word"))
}
complete -o filenames -F _troupe troupe
)";
}

// Text inside a description of zsh's _arguments.
std::string zsh_text(std::string_view text) {
  std::string out;
  for (const char c : text) {
    if (c == '[' || c == ']' || c == ':' || c == '\\') out += '\\';
    out += c;
  }
  return out;
}

std::string zsh() {
  std::string out =
      "#compdef troupe\n"
      "# Completes the command line of troupe in zsh. Written by `troupe help --completion zsh`.\n"
      "_troupe() {\n"
      "  local -a commands=(\n";
  for (const CommandInfo& info : command_table()) {
    out += fmt::format("    {}\n",
                       shell_quoted(fmt::format("{}:{}", info.name, zsh_text(info.summary))));
  }
  out +=
      "  )\n"
      "  if ((CURRENT == 2)); then\n"
      "    _describe command commands\n"
      "    return\n"
      "  fi\n"
      "  case $words[2] in\n";
  for (const CommandInfo& info : command_table()) {
    out += fmt::format("    {})\n      _arguments \\\n", info.name);
    for (const OptionSpec* spec : flags_of(info.command)) {
      std::string line = fmt::format("*{}[{}]", flag_of(*spec), zsh_text(brief(*spec)));
      if (needs_value(*spec)) {
        line += fmt::format(":{}:", zsh_text(spec->metavar));
        line +=
            has_choices(*spec) ? fmt::format("({})", fmt::join(choices_of(*spec), " ")) : "_files";
      }
      out += fmt::format("        {} \\\n", shell_quoted(line));
    }
    out += info.command == Command::help
               ? fmt::format("        '1:command:({})'\n", all_command_names())
               : "        '*:file:_files'\n";
    out += "      ;;\n";
  }
  return out + "  esac\n}\n_troupe \"$@\"\n";
}

std::string fish() {
  std::string out =
      "# Completes the command line of troupe in fish. Written by `troupe help --completion "
      "fish`.\n";
  for (const CommandInfo& info : command_table()) {
    out += fmt::format("complete -c troupe -n __fish_use_subcommand -f -a {} -d {}\n", info.name,
                       shell_quoted(info.summary));
  }
  for (const OptionSpec& spec : option_table()) {
    if (spec.positional) continue;
    std::vector<std::string_view> names;
    for (const CommandInfo& info : command_table()) {
      if (takes(info.command, spec)) names.push_back(info.name);
    }
    out += fmt::format("complete -c troupe -n '__fish_seen_subcommand_from {}' -l {} -d {}",
                       fmt::join(names, " "), spec.name, shell_quoted(brief(spec)));
    if (has_choices(spec)) {
      out += fmt::format(" -x -a {}",
                         shell_quoted(fmt::format("{}", fmt::join(choices_of(spec), " "))));
    } else if (needs_value(spec)) {
      out += " -r";
    }
    out += '\n';
  }
  return out + fmt::format("complete -c troupe -n '__fish_seen_subcommand_from help' -f -a {}\n",
                           shell_quoted(all_command_names()));
}

}  // namespace

std::string shell_completion(Shell shell) {
  switch (shell) {
    case Shell::bash:
      return bash();
    case Shell::zsh:
      return zsh();
    case Shell::fish:
      return fish();
  }
  return {};
}

}  // namespace troupe
