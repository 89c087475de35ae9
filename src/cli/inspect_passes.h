// `troupe inspect --passes`: what each pass over a training step's program did. One object watches
// the building of one step.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "passes/pass_pipeline.h"

namespace troupe {

class PassTable {
 public:
  // `memory_of`: bytes that a program takes, planned.
  explicit PassTable(std::function<uint64_t(const Program&)> memory_of);

  // Adds a line; for PassControls::watch.
  void add(const PassRecord& record, const Program& program);

  // A table of 80 columns, and below it what the passes do.
  std::string text() const;
  // {"passes": [{"name", "seconds", "ops_before", "ops_after", "ops_moved", "bytes"}]}
  std::string json() const;

 private:
  struct Line {
    PassRecord record;
    uint64_t bytes = 0;
  };

  std::function<uint64_t(const Program&)> memory_of_;
  std::vector<Line> lines_;
};

}  // namespace troupe
