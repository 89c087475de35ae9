// Training samples for language modelling: a pure function from a sample's number to its tokens.
//
// The promise that resuming rests on: which tokens sample i holds depends on the data sets and
// their weights, the split, the sequence length, the seed, the number of samples asked for, and i,
// and on nothing else: not on batch sizes, ranks, or what was read before. A run's position in its
// data is the number of samples it has consumed.
//
// A split is a contiguous range of a data set's sequences. Of one data set, samples come in the
// order of data/sample_order.h; of several, data/blend.h says from which each comes.
// docs/data_format.md states it all to the bit.
//
// Threads: const functions may be called from any number of threads at once.
// Memory: the orders' (data/sample_order.h), and for a mixture 6 bytes for each sample. A sample is
// looked up in constant time.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "data/blend.h"
#include "data/indexed_dataset.h"
#include "data/sample_order.h"

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

// The part of one data set that samples are taken from.
struct SourceMember {
  std::shared_ptr<const IndexedDataset> dataset = {};
  SequenceRange sequences = {};
};

struct SampleOptions {
  Split split = Split::train;   // for messages
  int64_t sequence_length = 0;  // S, tokens
  // Asked for, at least 1: the order is made for it. Unset: each data set once, which is an
  // order that does not depend on any number; a weighted mixture then ends where a data set does.
  std::optional<int64_t> num_samples = {};
  // Samples that will be read, if more than num_samples. They exist as far as the order holds them.
  int64_t num_read = 0;
  uint64_t seed = 0;                  // 32 bits
  int64_t vocab_size = 0;             // every id in a sample is checked against it
  int32_t eod = 0;                    // the end-of-document id
  int32_t pad = -1;                   // the id of padding; -1: there is none
  bool eod_mask_loss = false;         // no loss where the input is the end of a document
  bool reset_attention_mask = false;  // the token after the end of a document begins another one
  bool keep_partial = false;          // the tokens left at the end are one more sample, padded
  ProgressReport progress = {};
};

// What is taken from one data set.
struct MemberUse {
  std::string_view prefix;
  int64_t documents = 0;  // of the split; counted as sequences
  int64_t tokens = 0;     // of the split
  int64_t samples = 0;
  double epochs = 0;  // samples over those of one epoch, not whole
};

// Tokens that a split needs for one sample where it is read once.
int64_t least_tokens(const SampleOptions& options);

class SampleSource {
 public:
  // `weights` as given, one for each member, or empty: the one data set, or several by their sizes,
  // each at most once. A split without tokens, or without a whole sample where each is read once,
  // is a bad request; so are more samples than there are where each is read at most once.
  SampleSource(std::vector<SourceMember> members, std::span<const double> weights,
               SampleOptions options);

  const SampleOptions& options() const { return options_; }

  // Samples that there are: at least those asked for.
  int64_t num_samples() const;

  // Sample `sample` in [0, num_samples()). All spans have S elements: the inputs, the token after
  // each input, 1 where the loss counts, else 0, 1 where the input is not padding, else 0, and the
  // place in the sample at which the document of each input begins: 0, or after the last end of a
  // document before it. The loss does not count where the label is padding; as inputs and labels,
  // padding is 0 (as in Megatron). Beyond the end of a partial sample all but `starts` are 0. An id
  // outside the vocabulary is a bad request that names its place. `valid` and `starts` may be left
  // out.
  void get(int64_t sample, std::span<int32_t> tokens, std::span<int32_t> labels,
           std::span<float> loss_mask, std::span<int32_t> valid = {},
           std::span<int32_t> starts = {}) const;

  // What the first `samples` samples take from each data set.
  std::vector<MemberUse> use_of(int64_t samples) const;

 private:
  struct Member {
    std::shared_ptr<const IndexedDataset> dataset = {};
    SequenceRange sequences = {};
    int64_t tokens = 0;  // of one epoch
    SampleOrder order = {};
  };
  // A place in a member's stream.
  struct Cursor {
    int64_t place = 0;   // in the order's sequences
    int64_t offset = 0;  // in that sequence
  };

  Member make_member(SourceMember source, std::optional<int64_t> num_samples) const;
  // The first token that is not in the vocabulary, or null.
  const int32_t* find_foreign(std::span<const int32_t> tokens) const;
  // What get() says of `starts`.
  void find_documents(std::span<const int32_t> tokens, std::span<int32_t> starts) const;
  // Reads on from `cursor` and moves it. Returns how many tokens there were, up to out.size().
  int64_t read_stream(const Member& member, Cursor& cursor, std::span<int32_t> out) const;

  SampleOptions options_;
  std::vector<Member> members_;
  bool blended_ = false;
  BlendOrder blend_;  // empty unless blended
};

}  // namespace troupe
