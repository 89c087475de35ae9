#include "train/batch_feed.h"

namespace troupe {

BatchFeed::BatchFeed(const SampleSource& source)
    : source_(source), mask_(static_cast<size_t>(source.options().sequence_length)) {}

int64_t BatchFeed::write(const CpuInterpreter& interpreter, const BatchValues& batch,
                         int64_t first) {
  const auto length = static_cast<size_t>(batch.sequence);
  TROUPE_CHECK(mask_.size() == length, "batch and samples differ in length");
  auto* tokens = interpreter.view(batch.tokens).as<int32_t>();
  auto* labels = interpreter.view(batch.labels).as<int32_t>();
  const TensorView mask = interpreter.view(batch.mask);
  int64_t counted = 0;
  for (int32_t row = 0; row < batch.batch; ++row) {
    const size_t begin = static_cast<size_t>(row) * length;
    source_.get(first + row, {tokens + begin, length}, {labels + begin, length}, mask_);
    for (size_t i = 0; i < length; ++i) {
      counted += mask_[i] != 0.0F ? 1 : 0;
      if (mask.dtype == DType::f64) {
        mask.as<double>()[begin + i] = mask_[i];
      } else {
        mask.as<float>()[begin + i] = mask_[i];
      }
    }
  }
  return counted;
}

}  // namespace troupe
