#include "train/random_batch.h"

#include <algorithm>

#include "base/random.h"

namespace troupe {
namespace {

// Documents of one length, about that of a page of the web.
constexpr int64_t kDocumentTokens = 512;

// Positions at which they begin, less begin(row, rows of a sequence).
template <class Begin>
void write_documents(const Interpreter& interpreter, const BatchValues& batch, ValueId id,
                     const SequenceChunks& chunks, const Begin& begin) {
  if (!id.valid()) return;
  const int64_t rows = batch.rows_of(chunks);
  auto* const starts = interpreter.view(id).as<int32_t>();
  for (int64_t i = 0; i < batch.batch * rows; ++i) {
    const int64_t position = chunks.position(i % rows, rows);
    starts[i] =
        static_cast<int32_t>(position / kDocumentTokens * kDocumentTokens - begin(i % rows, rows));
  }
}

}  // namespace

void write_random_batch(const Interpreter& interpreter, const BatchValues& batch, int64_t number,
                        int32_t vocab_size) {
  const int64_t rows = batch.sequence;
  const auto write = [&](ValueId id, uint32_t stream) {
    if (!id.valid()) return;
    auto* const tokens = interpreter.view(id).as<int32_t>();
    for (int64_t sequence = 0; sequence < batch.batch; ++sequence) {
      for (int64_t row = 0; row < rows; ++row) {
        const int64_t position = (number * batch.batch + sequence) * rows * batch.chunks.ranks +
                                 batch.chunks.position(row, rows);
        tokens[sequence * rows + row] = static_cast<int32_t>(
            random_below(static_cast<uint64_t>(vocab_size), /*seed=*/1, RandomStream::test, stream,
                         static_cast<uint64_t>(position)));
      }
    }
  };
  write(batch.tokens, 0);
  write(batch.labels, 1);
  write_documents(interpreter, batch, batch.starts, batch.starts_chunks,
                  [](int64_t, int64_t) { return int64_t{0}; });
  write_documents(
      interpreter, batch, batch.delta_starts, batch.delta_chunks,
      [&](int64_t row, int64_t each) { return batch.delta_chunks.chunk_begin(row, each); });
  for (size_t depth = 0; depth <= batch.shifted.size(); ++depth) {
    if (const ValidTokens& tokens = batch.valid_of(depth); tokens.mask.valid()) {
      const TensorView valid = interpreter.view(tokens.mask);
      std::fill_n(valid.as<int32_t>(), valid.shape.elements(), 1);
    }
    if (depth > 0) {
      write(batch.shifted[depth - 1].tokens, 0);
      write(batch.shifted[depth - 1].labels, 1);
    }
    if (!batch.mask_of(depth).valid()) continue;
    const TensorView mask = interpreter.view(batch.mask_of(depth));
    if (mask.dtype == DType::f64) {
      std::fill_n(mask.as<double>(), mask.shape.elements(), 1.0);
    } else {
      std::fill_n(mask.as<float>(), mask.shape.elements(), 1.0F);
    }
  }
}

}  // namespace troupe
