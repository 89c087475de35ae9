#include "options/man_page.h"

#include <fmt/format.h>
#include <string_view>

#include "options/option_text.h"
#include "options/options.h"

namespace troupe {
namespace {

// Text as roff takes it literally: a hyphen that is a minus, nothing that begins a request.
std::string roff(std::string_view text) {
  std::string out;
  if (text.starts_with('.') || text.starts_with('\'')) out += "\\&";
  for (const char c : text) {
    if (c == '\\') {
      out += "\\e";
    } else if (c == '-') {
      out += "\\-";
    } else if (c == '\'') {
      out += "\\(aq";
    } else {
      out += c;
    }
  }
  return out;
}

// The first command that takes the option, for which it is explained.
Command command_of(const OptionSpec& spec) {
  for (const CommandInfo& info : command_table()) {
    if (takes(info.command, spec)) return info.command;
  }
  return Command::help;
}

std::string commands_of(const OptionSpec& spec) {
  std::string names;
  for (const CommandInfo& info : command_table()) {
    if (!takes(info.command, spec)) continue;
    names += fmt::format("{}{}", names.empty() ? "" : ", ", info.name);
  }
  return names;
}

}  // namespace

std::string man_page() {
  std::string out = fmt::format(
      ".TH TROUPE 1 \"\" \"troupe {}\" \"User Commands\"\n"
      ".SH NAME\n"
      "troupe \\- train Mixture\\-of\\-Experts language models\n"
      ".SH SYNOPSIS\n"
      ".B troupe\n"
      ".I COMMAND\n"
      ".RI [ FLAGS ]\n"
      ".SH DESCRIPTION\n"
      "Troupe trains Mixture\\-of\\-Experts language models on CPUs and GPUs. Flags are written\n"
      ".B \\-\\-name VALUE\n"
      "or\n"
      ".BR \\-\\-name=VALUE ,\n"
      "and a TOML file of options\n"
      ".RB ( \\-\\-config )\n"
      "uses the same names without the dashes. Each flag below is followed by the commands that\n"
      "take it.\n"
      ".SH COMMANDS\n",
      kVersion);
  for (const CommandInfo& info : command_table()) {
    out += fmt::format(".TP\n.B {}\n{}.\n.br\n{}\n", roff(usage_line(info.command)),
                       roff(info.summary), roff(info.example));
  }
  out += ".SH OPTIONS\n";
  std::string_view group;
  for (const OptionSpec& spec : option_table()) {
    if (spec.group != group) {
      group = spec.group;
      out += fmt::format(".SS {}\n", roff(group));
    }
    out += fmt::format(".TP\n.B {}\n{}\n", roff(usage_of(spec)),
                       roff(explanation_of(spec, command_of(spec))));
    if (!is_global(spec)) out += fmt::format("({})\n", roff(commands_of(spec)));
  }
  out += ".SH EXIT STATUS\n";
  for (const ExitStatusText& entry : exit_status_texts()) {
    out += fmt::format(".TP\n.B {}\n{}\n", static_cast<int>(entry.status), roff(entry.text));
  }
  return out;
}

}  // namespace troupe
