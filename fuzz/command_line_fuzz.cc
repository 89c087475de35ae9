// Command lines: one argument per line of the input.
#include "harness.h"
#include "options/command_line.h"

namespace troupe::fuzz {

void parse(std::string_view input) {
  std::vector<std::string> arguments;
  while (!input.empty()) {
    const size_t end = input.find('\n');
    arguments.emplace_back(input.substr(0, end));
    input.remove_prefix(end == std::string_view::npos ? input.size() : end + 1);
  }
  const CommandLine command_line = parse_command_line(arguments);
  if (command_line.text.empty()) describe(command_line.options);
}

std::vector<std::string> seeds() {
  std::vector<std::string> lines = {"--help", "train\n--help", "--version", "verify\nDIR\n--json"};
  for (const CommandInfo& info : command_table()) {
    std::string line(info.example);
    for (char& c : line) c = c == ' ' ? '\n' : c;
    // The program's own name.
    lines.push_back(line.substr(line.find('\n') + 1));
  }
  lines.emplace_back("train\n--model=m\n--data-path=d\n--train-iters=3\n--lr=1e-3\n--seed=-1");
  return lines;
}

}  // namespace troupe::fuzz
