// The program of a command line's training step. Any thread.
#pragma once

#include <iterator>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "options/command_line.h"
#include "options/model_options.h"
#include "options/step_spec.h"
#include "passes/step_programs.h"

namespace troupe::testing {

// Of a rank, for the flags that `troupe plan` takes.
inline std::unique_ptr<Program> program_of(const std::string& flags, int32_t rank = 0) {
  std::istringstream stream("plan " + flags);
  const std::vector<std::string> words{std::istream_iterator<std::string>(stream), {}};
  const Options options = parse_command_line(words).options;
  const StepSpec spec = step_spec_of(options, load_model_config(options));
  return build_training_step(spec.model, spec.state_of(rank), spec.options).program;
}

}  // namespace troupe::testing
