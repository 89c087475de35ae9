// The program of a command line's training step. Any thread.
#pragma once

#include <iterator>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "options/command_line.h"
#include "options/layout_options.h"
#include "options/model_options.h"
#include "passes/step_programs.h"

namespace troupe::testing {

// Of rank 0, for the flags that `troupe plan` takes.
inline std::unique_ptr<Program> program_of(const std::string& flags) {
  std::istringstream stream("plan " + flags);
  const std::vector<std::string> words{std::istream_iterator<std::string>(stream), {}};
  const Options options = parse_command_line(words).options;
  const ModelConfig config = load_model_config(options);
  const ModelState state = declare_model_state(
      config, options.compute_dtype, /*trained=*/true,
      {.run = std::make_shared<const RunLayout>(run_layout_of(options, config)), .rank = 0});
  return build_training_step(config, state, training_step_options(options, config)).program;
}

}  // namespace troupe::testing
