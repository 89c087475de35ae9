// The options that a checkpoint holds. What is accepted comes back from its own text.
#include "harness.h"
#include "options/check_options.h"
#include "options/options.h"

namespace troupe::fuzz {

void parse(std::string_view input) {
  Options options;
  from_json(options, input, "index.json");
  const std::string text = to_json(options);
  Options again;
  from_json(again, text, "written");
  if (!differences(options, again).empty()) {
    report_finding("written back, the options differ: " + text);
  }
  describe(options);
  check_options(options);
}

std::vector<std::string> seeds() {
  std::vector<std::string> texts;
  for (const CommandInfo& info : command_table()) {
    Options options;
    options.command = info.command;
    texts.push_back(to_json(options));
  }
  return texts;
}

}  // namespace troupe::fuzz
