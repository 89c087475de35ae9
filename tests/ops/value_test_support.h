// Shared by the tests of operations' values: runs what a function builds and returns its results.
#pragma once

#include <functional>
#include <vector>

#include "base/random.h"
#include "support/sample_run.h"

namespace troupe::testing {

inline std::vector<std::vector<double>> run_sample(const std::function<void(SampleBuilder&)>& build,
                                                   DType dtype = DType::f64, int threads = 1) {
  SampleRun run({"", build}, {.dtype = dtype, .threads = threads, .backward = false});
  run.run();
  return run.results();
}

// Fixed normal numbers; `number` tells tensors of one test apart.
inline std::vector<double> normal_numbers(int64_t count, uint32_t number) {
  std::vector<double> values(static_cast<size_t>(count));
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = random_normal(9, RandomStream::test, number, i);
  }
  return values;
}

}  // namespace troupe::testing
