#include "train/batch_feed.h"

#include <algorithm>
#include <span>

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

// Positions of a sequence's rows, as those that count from the beginning of the row's chunk.
void count_from_chunks(std::span<int32_t> positions, const SequenceChunks& chunks) {
  const auto rows = static_cast<int64_t>(positions.size());
  for (int64_t row = 0; row < rows; ++row) {
    positions[static_cast<size_t>(row)] -= static_cast<int32_t>(chunks.chunk_begin(row, rows));
  }
}

// What stands one place further; 0 before the end of the sequence or, if `starts` are given, of the
// document.
template <class T>
std::vector<T> shifted(const std::vector<T>& whole, const std::vector<int32_t>& starts) {
  std::vector<T> result(whole.size());
  for (size_t i = 0; i + 1 < whole.size(); ++i) {
    if (starts.empty() || starts[i + 1] == starts[i]) result[i] = whole[i + 1];
  }
  return result;
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
  const auto write_valid = [&](const std::vector<int32_t>& whole, const ValidTokens& to) {
    if (!to.mask.valid()) return;
    const TensorView valid = interpreter.view(to.mask);
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t at = sequence * rows + row - batch.first_valid;
      if (at < 0 || at >= valid.shape[0]) continue;  // another rank's, of the tp group
      valid.as<int32_t>()[at] = whole[static_cast<size_t>(batch.chunks.position(row, rows))];
    }
  };
  write_valid(valid_, batch.valid);
  const auto write_starts = [&](ValueId id, const SequenceChunks& chunks) {
    if (!id.valid()) return std::span<int32_t>();
    const int64_t own = batch.rows_of(chunks);
    auto* const to = interpreter.view(id).as<int32_t>() + sequence * own;
    copy_rows(starts_, chunks, own, to);
    return std::span(to, static_cast<size_t>(own));
  };
  write_starts(batch.starts, batch.starts_chunks);
  count_from_chunks(write_starts(batch.delta_starts, batch.delta_chunks), batch.delta_chunks);
  const auto write_targets = [&](const auto& labels, const auto& mask, ValueId to,
                                 ValueId to_mask) {
    if (!to.valid()) return;
    write_rows(labels, interpreter.view(to).as<int32_t>());
    const TensorView view = interpreter.view(to_mask);
    if (view.dtype == DType::f64) {
      write_rows(mask, view.as<double>());
    } else {
      write_rows(mask, view.as<float>());
    }
  };
  write_targets(labels_, mask_, batch.labels, batch.mask);
  if (batch.shifted.empty()) return;
  const std::vector<int32_t> ends = batch.shifts_in_documents ? starts_ : std::vector<int32_t>{};
  std::vector<int32_t> tokens = tokens_;
  std::vector<int32_t> labels = labels_;
  std::vector<float> mask = mask_;
  std::vector<int32_t> valid = valid_;
  for (const BatchValues::Shifted& further : batch.shifted) {
    tokens = shifted(tokens, ends);
    labels = shifted(labels, ends);
    mask = shifted(mask, ends);
    valid = shifted(valid, ends);
    write_valid(valid, further.valid);
    if (further.tokens.valid()) write_rows(tokens, interpreter.view(further.tokens).as<int32_t>());
    write_targets(labels, mask, further.labels, further.mask);
  }
}

}  // namespace troupe
