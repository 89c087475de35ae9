// Options in a TOML file.
#include "harness.h"
#include "options/check_options.h"
#include "options/config_file.h"

namespace troupe::fuzz {

void parse(std::string_view input) {
  Options options;
  options.command = Command::train;
  std::set<const OptionSpec*> given;
  std::vector<std::string> notes;
  read_config_file(put_file("config.toml", input), options, given, notes);
  check_options(options);
}

std::vector<std::string> seeds() {
  return {"lr = 3e-3\ntrain-iters = 450\n", "data-path = [0.7, \"a\", 0.3, \"b\"]\nbf16 = true\n",
          "# comment\nmodel = 'quickstart'\nlr_warmup_iters = 30\nsplit = \"95,5,0\"\n"};
}

}  // namespace troupe::fuzz
