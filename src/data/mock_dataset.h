// A data set that is made up: Megatron's --mock-data (MockGPTLowLevelDataset), token for token.
//
// 100,000 sequences of 1 to 4,095 tokens. One of n tokens counts 1, 2, ... n - 1, each modulo the
// vocabulary, and ends with the end of a document. The lengths are numpy.random.default_rng(0)'s.
// So a run has data of any size without a file, and a model can learn something from it.
//
// Pure; any thread. Takes 17 or 34 MB, by the size of a token.
#pragma once

#include <cstdint>
#include <memory>

#include "data/indexed_dataset.h"

namespace troupe {

// `eod` is an id of the vocabulary.
std::shared_ptr<const IndexedDataset> make_mock_dataset(int64_t vocab_size, int32_t eod);

}  // namespace troupe
