#include "train/batch_feed.h"

#include <algorithm>

namespace troupe {

BatchFeed::BatchFeed(const SampleSource& source)
    : source_(source),
      tokens_(static_cast<size_t>(source.options().sequence_length)),
      labels_(tokens_.size()),
      mask_(tokens_.size()) {}

int64_t BatchFeed::write(const CpuInterpreter& interpreter, const BatchValues& batch,
                         int64_t first) {
  const auto length = static_cast<size_t>(batch.sequence);
  TROUPE_CHECK(mask_.size() == length, "batch and samples differ in length");
  int64_t counted = 0;
  for (int32_t row = 0; row < batch.batch; ++row) {
    const size_t begin = static_cast<size_t>(row) * length;
    source_.get(first + row, tokens_, labels_, mask_);
    counted += std::count_if(mask_.begin(), mask_.end(), [](float each) { return each != 0.0F; });
    if (batch.tokens.valid()) {
      std::copy(tokens_.begin(), tokens_.end(),
                interpreter.view(batch.tokens).as<int32_t>() + begin);
    }
    if (!batch.labels.valid()) continue;
    std::copy(labels_.begin(), labels_.end(), interpreter.view(batch.labels).as<int32_t>() + begin);
    const TensorView mask = interpreter.view(batch.mask);
    if (mask.dtype == DType::f64) {
      std::copy(mask_.begin(), mask_.end(), mask.as<double>() + begin);
    } else {
      std::copy(mask_.begin(), mask_.end(), mask.as<float>() + begin);
    }
  }
  return counted;
}

}  // namespace troupe
