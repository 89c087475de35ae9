// Writes training or evaluation samples into the inputs of a program.
#pragma once

#include <cstdint>
#include <vector>

#include "data/sampler.h"
#include "model/decoder.h"
#include "runtime/interpreter.h"

namespace troupe {

class BatchFeed {
 public:
  explicit BatchFeed(const SampleSource& source);

  // Writes samples first, first + 1, ... into the micro-batch's tokens, labels, masks and starts of
  // documents, those of them that the program has. Returns how many of the samples' tokens count in
  // the loss.
  int64_t write(const Interpreter& interpreter, const BatchValues& batch, int64_t first);

 private:
  // Writes the sample that was read last, as sequence `sequence` of the micro-batch.
  void write_sequence(const Interpreter& interpreter, const BatchValues& batch,
                      int32_t sequence) const;

  const SampleSource& source_;
  // Of one sample.
  std::vector<int32_t> tokens_;
  std::vector<int32_t> labels_;
  std::vector<float> mask_;
  std::vector<int32_t> valid_;
  std::vector<int32_t> starts_;
};

}  // namespace troupe
