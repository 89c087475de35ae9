// The operand `starts` of attention, for samples and tests.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "program/row_origin.h"

namespace troupe {

// Where the document of each of a rank's `rows` rows of `batch` sequences begins, when documents
// begin at these rows of the whole micro-batch, and at the first of every sequence.
inline std::vector<int32_t> document_starts(int64_t batch, int64_t rows,
                                            const SequenceChunks& chunks,
                                            const std::vector<int64_t>& begins) {
  const int64_t sequence = rows * chunks.ranks;
  std::vector<int32_t> starts;
  for (int64_t row = 0; row < batch * rows; ++row) {
    const int64_t first = row / rows * sequence;
    const int64_t own = first + chunks.position(row % rows, rows);
    int64_t start = first;
    for (const int64_t begin : begins) {
      if (begin <= own) start = std::max(start, begin);
    }
    starts.push_back(static_cast<int32_t>(start - first));
  }
  return starts;
}

}  // namespace troupe
