// Which samples a data set gives and in what order: Megatron Core's GPT sample construction, value
// for value. docs/data_format.md, "Samples", states it in full.
//
// The sequences of a split are tiled over as many epochs as the samples asked for take, shuffled,
// and joined into one stream of tokens. Sample k of the stream is its S + 1 tokens from position
// k S on; neighbours share one token. A second shuffle by the same generator orders the samples.
// The last epoch is shuffled by itself, and comes last, when less than 80 % of it is needed: the
// epochs before it are then read whole.
//
// The order depends on how many samples were asked for, as Megatron's does, through the number of
// epochs; within one epoch it does not.
//
// Pure functions and plain values; const use from any thread. Memory: 4 bytes for each sequence of
// each epoch and 12 for each sample (twice as many where numbers exceed 32 bits).
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace troupe {

// Whole numbers in [0, bound), in four bytes each where they fit.
class IndexArray {
 public:
  IndexArray() = default;
  IndexArray(int64_t count, int64_t bound);

  int64_t size() const { return static_cast<int64_t>(narrow_.size() + wide_.size()); }
  int64_t operator[](int64_t i) const {
    const auto at = static_cast<size_t>(i);
    return wide_.empty() ? static_cast<int64_t>(narrow_[at]) : static_cast<int64_t>(wide_[at]);
  }
  void set(int64_t i, int64_t value);

  // Calls body(span) with all elements, as uint32_t or uint64_t.
  template <class Body>
  void visit(const Body& body) {
    if (wide_.empty()) {
      body(std::span<uint32_t>(narrow_));
    } else {
      body(std::span<uint64_t>(wide_));
    }
  }

 private:
  std::vector<uint32_t> narrow_;
  std::vector<uint64_t> wide_;  // empty, or all elements
};

// What is said while something slow goes on; empty: nothing.
using ProgressReport = std::function<void(const std::string&)>;

struct SampleOrderOptions {
  int64_t sequence_length = 0;              // S, at least 1
  std::optional<int64_t> num_samples = {};  // asked for; unset: one epoch
  uint32_t seed = 0;
  bool keep_partial = false;     // the tokens left at the end of the stream are one more sample
  ProgressReport progress = {};  // called for orders that take seconds
};

struct SampleOrder {
  int64_t epochs = 1;
  bool separate_last_epoch = false;
  std::vector<uint32_t> sequences;  // the stream: numbers of sequences in the split
  // Where each sample of the stream begins: a place in `sequences` and a token in that sequence.
  IndexArray start_place;
  std::vector<int32_t> start_offset;
  IndexArray shuffle;  // sample i of the order is sample shuffle[i] of the stream

  int64_t num_samples() const { return shuffle.size(); }
};

// `lengths` are the split's sequences, in tokens, not all of them empty; at most 2^32 - 1. An order
// that does not fit in the machine's memory is refused (does_not_fit).
SampleOrder build_sample_order(std::span<const int32_t> lengths, const SampleOrderOptions& options);

}  // namespace troupe
