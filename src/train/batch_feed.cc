#include "train/batch_feed.h"

#include <algorithm>

namespace troupe {
namespace {

// Copies the rows of a whole sequence that `chunks` says; `rows` of them.
template <class From, class To>
void copy_rows(const std::vector<From>& whole, const SequenceChunks& chunks, int64_t rows,
               To* target) {
  for (int64_t row = 0; row < rows; ++row) {
    target[row] = whole[static_cast<size_t>(chunks.position(row, rows))];
  }
}

}  // namespace

BatchFeed::BatchFeed(const SampleSource& source)
    : source_(source),
      tokens_(static_cast<size_t>(source.options().sequence_length)),
      labels_(tokens_.size()),
      mask_(tokens_.size()),
      valid_(tokens_.size()),
      starts_(tokens_.size()) {}

int64_t BatchFeed::write(const Interpreter& interpreter, const BatchValues& batch, int64_t first) {
  TROUPE_CHECK(static_cast<int64_t>(mask_.size()) == int64_t{batch.sequence} * batch.chunks.ranks,
               "batch and samples differ in length");
  int64_t counted = 0;
  for (int32_t sequence = 0; sequence < batch.batch; ++sequence) {
    source_.get(first + sequence, tokens_, labels_, mask_, valid_, starts_);
    counted += std::count_if(mask_.begin(), mask_.end(), [](float each) { return each != 0.0F; });
    write_sequence(interpreter, batch, sequence);
  }
  return counted;
}

void BatchFeed::write_sequence(const Interpreter& interpreter, const BatchValues& batch,
                               int32_t sequence) const {
  const int64_t rows = batch.sequence;
  const auto write_rows = [&](const auto& whole, auto* target) {
    copy_rows(whole, batch.chunks, rows, target + sequence * rows);
  };
  if (batch.tokens.valid()) write_rows(tokens_, interpreter.view(batch.tokens).as<int32_t>());
  if (batch.valid.mask.valid()) {
    const TensorView valid = interpreter.view(batch.valid.mask);
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t at = sequence * rows + row - batch.first_valid;
      if (at < 0 || at >= valid.shape[0]) continue;  // another rank's, of the tp group
      valid.as<int32_t>()[at] = valid_[static_cast<size_t>(batch.chunks.position(row, rows))];
    }
  }
  const auto write_starts = [&](ValueId id, const SequenceChunks& chunks) {
    if (!id.valid()) return;
    const int64_t own = batch.rows_of(chunks);
    copy_rows(starts_, chunks, own, interpreter.view(id).as<int32_t>() + sequence * own);
  };
  write_starts(batch.starts, batch.starts_chunks);
  write_starts(batch.whole_starts, {});
  if (!batch.labels.valid()) return;
  write_rows(labels_, interpreter.view(batch.labels).as<int32_t>());
  const TensorView mask = interpreter.view(batch.mask);
  if (mask.dtype == DType::f64) {
    write_rows(mask_, mask.as<double>());
  } else {
    write_rows(mask_, mask.as<float>());
  }
}

}  // namespace troupe
