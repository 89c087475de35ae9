// Training samples for language modelling: a pure function from a sample's number to its tokens.
//
// The promise that resuming rests on: which tokens sample i holds depends on the data set, the
// split, the sequence length, the seed and i, and on nothing else: not on batch sizes, ranks, or
// what was read before. A run's position in its data is the number of samples it has consumed.
//
// The rule (docs/data_format.md states it to the bit):
//   * A split is a contiguous range of the data set's sequences.
//   * An epoch is a permutation of those sequences, joined into one stream of T tokens, and cut
//     into N = floor((T - 1) / S) samples of S + 1 tokens each, at stream positions 0, S, 2S, ...;
//     neighbours in the stream share one token. A second permutation orders the samples.
//   * Samples never straddle epochs. The T - (N S + 1) tokens at the end of the stream are not used
//     in that epoch; the next epoch has another order and leaves out other tokens.
//   * The permutations are keyed by (seed, epoch). Validation and test sets keep the order of the
//     data set, the same in every epoch.
// In kind this is Megatron Core's GPTDataset (semantics 24.2); the orders differ, because
// Megatron's depend on how many samples the run asks for.
//
// Threads: const functions may be called from any number of threads at once. The first sample of
// an epoch builds the epoch's index, and calls that need an index wait for it meanwhile.
// Memory: 12 bytes per sequence of the split for each of at most two epochs.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string_view>
#include <vector>

#include "data/indexed_dataset.h"

namespace troupe {

// Part of a data set. The values index split_sequences' result.
enum class Split : int { train = 0, validation = 1, test = 2 };

std::string_view name_of(Split split);

// Sequences [begin, end).
struct SequenceRange {
  int64_t begin = 0;
  int64_t end = 0;

  int64_t size() const { return end - begin; }
};

// Cuts `num_sequences` into training, validation and test ranges, in this order. `weights` is
// Megatron's --split: one to three numbers >= 0 with a positive sum, separated by commas, missing
// ones 0, normalised to sum to 1. With cumulative sums c_0 = 0, c_1, c_2, c_3, range j is
// [round(c_j n), round(c_{j+1} n)), rounded half to even. A malformed string is a bad request.
std::array<SequenceRange, 3> split_sequences(std::string_view weights, int64_t num_sequences);

// What a permutation orders. The values are part of what a seed means.
enum class ShuffleDomain : uint32_t { sequences = 0, samples = 1 };

// A pseudo-random permutation of [0, size), 1 <= size < 2^63, computed entry by entry without a
// table: a balanced Feistel network with Philox as its round function on the smallest power of 4
// that is >= max(size, 4), with cycle walking (Black and Rogaway, "Ciphers with arbitrary finite
// domains", CT-RSA 2002). An entry takes at most 4 walks of 8 Philox words on average.
class Permutation {
 public:
  Permutation(int64_t size, uint64_t seed, uint32_t epoch, ShuffleDomain domain);

  int64_t size() const { return size_; }

  // The image of i in [0, size()).
  int64_t operator()(int64_t i) const;

 private:
  int64_t size_;
  uint64_t seed_;
  uint32_t epoch_;
  ShuffleDomain domain_;
  uint32_t half_bits_;  // the network works on two halves of this many bits, 1 to 32
};

struct SampleOptions {
  Split split = Split::train;   // train is shuffled, the others are in order
  SequenceRange sequences;      // the split's range in the data set
  int64_t sequence_length = 0;  // S, tokens
  uint64_t seed = 0;
  int64_t vocab_size = 0;      // every id handed out is checked against it
  int32_t eod = 0;             // the end-of-document id
  bool eod_mask_loss = false;  // no loss where the input is the end of a document
};

class SampleSource {
 public:
  // A split with fewer than S + 1 tokens is a bad request.
  SampleSource(std::shared_ptr<const IndexedDataset> dataset, const SampleOptions& options);
  ~SampleSource();

  const SampleOptions& options() const { return options_; }
  int64_t samples_per_epoch() const { return samples_per_epoch_; }  // N
  int64_t tokens_per_epoch() const { return tokens_per_epoch_; }    // T, unused tail included

  // Sample `sample` >= 0 of the endless sequence of epochs. All spans have S elements: the inputs,
  // the token after each input, and 1 where the loss counts, else 0. An id outside the vocabulary
  // is a bad request that names its place. Logarithmic in the number of sequences.
  void get(int64_t sample, std::span<int32_t> tokens, std::span<int32_t> labels,
           std::span<float> loss_mask) const;

 private:
  struct EpochIndex;

  bool shuffled() const { return options_.split == Split::train; }
  std::shared_ptr<const EpochIndex> epoch_index(uint32_t epoch) const;
  std::shared_ptr<const EpochIndex> build_epoch_index(uint32_t epoch) const;
  void read_stream(const EpochIndex& index, int64_t position, std::span<int32_t> out) const;

  std::shared_ptr<const IndexedDataset> dataset_;
  SampleOptions options_;
  int64_t tokens_per_epoch_ = 0;
  int64_t samples_per_epoch_ = 0;

  mutable std::mutex mutex_;
  mutable std::array<std::shared_ptr<const EpochIndex>, 2> cache_;  // the most recently used first
};

}  // namespace troupe
