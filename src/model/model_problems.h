// Everything that is wrong with a model's shape, where ModelConfig::validate() says the first of
// it.
//
// A pure function; any thread.
#pragma once

#include <string>
#include <vector>

namespace troupe {

struct ModelConfig;

// The messages with which validate() refuses the shape, as far as none follows from another; empty:
// it is possible.
std::vector<std::string> problems_of(const ModelConfig& config);

}  // namespace troupe
