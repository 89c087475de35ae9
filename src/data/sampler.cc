#include "data/sampler.h"

#include <algorithm>
#include <bit>
#include <charconv>
#include <cmath>
#include <fmt/format.h>
#include <limits>
#include <utility>

#include "base/error.h"
#include "base/random.h"

namespace troupe {
namespace {

constexpr uint32_t kRounds = 8;

}  // namespace

std::string_view name_of(Split split) {
  switch (split) {
    case Split::train:
      return "training";
    case Split::validation:
      return "validation";
    case Split::test:
      return "test";
  }
  return "?";
}

std::array<SequenceRange, 3> split_sequences(std::string_view weights, int64_t num_sequences) {
  const auto refuse = [&](const char* what) {
    throw_bad_request(
        fmt::format("--split '{}': {}; give one to three numbers such as 969,30,1 (training, "
                    "validation, test)",
                    weights, what));
  };
  std::array<double, 3> values = {0, 0, 0};
  size_t count = 0;
  const char* at = weights.data();
  const char* const end = at + weights.size();
  const auto skip_spaces = [&] {
    while (at != end && *at == ' ') ++at;
  };
  for (;;) {
    skip_spaces();
    if (count == values.size()) refuse("more than three numbers");
    double value = 0;
    const auto [next, error] = std::from_chars(at, end, value);
    if (error != std::errc() || !std::isfinite(value)) refuse("not a list of numbers");
    if (value < 0) refuse("a negative number");
    values[count++] = value;
    at = next;
    skip_spaces();
    if (at == end) break;
    if (*at++ != ',') refuse("not a list of numbers separated by commas");
  }
  const double sum = values[0] + values[1] + values[2];
  if (!(sum > 0)) refuse("the numbers sum to 0");
  if (!std::isfinite(sum)) refuse("the numbers are too large");

  std::array<SequenceRange, 3> ranges;
  double cumulative = 0;
  int64_t begin = 0;
  for (size_t j = 0; j < ranges.size(); ++j) {
    cumulative += values[j] / sum;
    const auto bound =
        static_cast<int64_t>(std::nearbyint(cumulative * static_cast<double>(num_sequences)));
    ranges[j] = {begin, bound};
    begin = bound;
  }
  return ranges;
}

Permutation::Permutation(int64_t size, uint64_t seed, uint32_t epoch, ShuffleDomain domain)
    : size_(size), seed_(seed), epoch_(epoch), domain_(domain) {
  TROUPE_CHECK(size >= 1, fmt::format("a permutation of {} elements", size));
  const auto bits = static_cast<uint32_t>(std::bit_width(static_cast<uint64_t>(size - 1)));
  half_bits_ = std::max(1U, (bits + 1) / 2);
}

int64_t Permutation::operator()(int64_t i) const {
  TROUPE_CHECK(i >= 0 && i < size_, fmt::format("entry {} of a permutation of {}", i, size_));
  const uint64_t mask = (uint64_t{1} << half_bits_) - 1;
  auto value = static_cast<uint64_t>(i);
  // A value outside the range is sent through the network again. The network permutes its domain,
  // so the walk along the cycle of i comes back into the range, at i itself at the latest.
  do {
    uint64_t left = value >> half_bits_;
    uint64_t right = value & mask;
    for (uint32_t round = 0; round < kRounds; ++round) {
      const uint64_t index =
          (static_cast<uint64_t>(domain_) << 40) | (static_cast<uint64_t>(round) << 32) | right;
      const uint64_t word = random_words(seed_, RandomStream::data_shuffle, epoch_, index)[0];
      left = std::exchange(right, left ^ (word & mask));
    }
    value = (left << half_bits_) | right;
  } while (value >= static_cast<uint64_t>(size_));
  return static_cast<int64_t>(value);
}

// The stream of one epoch.
struct SampleSource::EpochIndex {
  uint32_t epoch = 0;
  std::vector<uint32_t> order;  // sequences of the split in stream order; empty: as they are
  std::vector<uint64_t> start;  // where each begins in the stream, and the stream's length
};

SampleSource::SampleSource(std::shared_ptr<const IndexedDataset> dataset,
                           const SampleOptions& options)
    : dataset_(std::move(dataset)), options_(options) {
  const SequenceRange range = options_.sequences;
  TROUPE_CHECK(
      range.begin >= 0 && range.begin <= range.end && range.end <= dataset_->num_sequences(),
      fmt::format("sequences [{}, {}) of {}", range.begin, range.end, dataset_->num_sequences()));
  if (options_.sequence_length < 1) {
    throw_bad_request(
        fmt::format("a sequence length of {} tokens; it is at least 1", options_.sequence_length));
  }
  if (range.size() > int64_t{std::numeric_limits<uint32_t>::max()}) {
    throw_bad_request(
        fmt::format("the {} split of {} has {} sequences, and 4,294,967,295 is the "
                    "limit; store longer documents or several data sets",
                    name_of(options_.split), dataset_->prefix(), range.size()));
  }
  for (int64_t sequence = range.begin; sequence < range.end; ++sequence) {
    tokens_per_epoch_ += dataset_->sequence_length(sequence);
  }
  if (tokens_per_epoch_ <= options_.sequence_length) {
    throw_bad_request(fmt::format(
        "the {} split of {} has {} tokens in {} of the data set's {} sequences, and one sample "
        "takes {} (sequence length + 1); tokenize more text or in more documents (plain text: "
        "split it at blank lines), change --split, or shorten the sequence length",
        name_of(options_.split), dataset_->prefix(), tokens_per_epoch_, range.size(),
        dataset_->num_sequences(), options_.sequence_length + 1));
  }
  samples_per_epoch_ = (tokens_per_epoch_ - 1) / options_.sequence_length;
}

SampleSource::~SampleSource() = default;

std::shared_ptr<const SampleSource::EpochIndex> SampleSource::build_epoch_index(
    uint32_t epoch) const {
  auto index = std::make_shared<EpochIndex>();
  index->epoch = epoch;
  const SequenceRange range = options_.sequences;
  const auto count = static_cast<size_t>(range.size());
  if (shuffled()) {
    const Permutation permutation(range.size(), options_.seed, epoch, ShuffleDomain::sequences);
    index->order.resize(count);
    for (size_t i = 0; i < count; ++i) {
      index->order[i] = static_cast<uint32_t>(permutation(static_cast<int64_t>(i)));
    }
  }
  index->start.resize(count + 1);
  index->start[0] = 0;
  for (size_t i = 0; i < count; ++i) {
    const auto sequence = static_cast<int64_t>(shuffled() ? index->order[i] : i);
    index->start[i + 1] =
        index->start[i] + static_cast<uint64_t>(dataset_->sequence_length(range.begin + sequence));
  }
  return index;
}

std::shared_ptr<const SampleSource::EpochIndex> SampleSource::epoch_index(uint32_t epoch) const {
  const std::lock_guard lock(mutex_);
  if (cache_[0] == nullptr || cache_[0]->epoch != epoch) {
    std::swap(cache_[0], cache_[1]);
    if (cache_[0] == nullptr || cache_[0]->epoch != epoch) cache_[0] = build_epoch_index(epoch);
  }
  return cache_[0];
}

void SampleSource::read_stream(const EpochIndex& index, int64_t position,
                               std::span<int32_t> out) const {
  // The last sequence that begins at or before `position`: of several, all but it are empty.
  const auto after =
      std::upper_bound(index.start.begin(), index.start.end(), static_cast<uint64_t>(position));
  auto place = static_cast<size_t>(after - index.start.begin()) - 1;
  int64_t offset = position - static_cast<int64_t>(index.start[place]);
  while (!out.empty()) {
    const auto in_split = static_cast<int64_t>(shuffled() ? index.order[place] : place);
    const int64_t sequence = options_.sequences.begin + in_split;
    const int64_t count =
        std::min(dataset_->sequence_length(sequence) - offset, static_cast<int64_t>(out.size()));
    dataset_->read(sequence, offset, count, out.data());
    for (int64_t i = 0; i < count; ++i) {
      const int32_t token = out[static_cast<size_t>(i)];
      if (token >= 0 && token < options_.vocab_size) continue;
      throw_bad_request(
          fmt::format("{}.bin: token {} of sequence {} is {}, outside the vocabulary "
                      "of {}: the data was written with another tokenizer; tokenize "
                      "the text again or name that one",
                      dataset_->prefix(), offset + i, sequence, token, options_.vocab_size));
    }
    out = out.subspan(static_cast<size_t>(count));
    offset = 0;
    ++place;
  }
}

void SampleSource::get(int64_t sample, std::span<int32_t> tokens, std::span<int32_t> labels,
                       std::span<float> loss_mask) const {
  const auto length = static_cast<size_t>(options_.sequence_length);
  TROUPE_CHECK(sample >= 0, fmt::format("sample {}", sample));
  TROUPE_CHECK(tokens.size() == length && labels.size() == length && loss_mask.size() == length,
               fmt::format("spans of {}, {} and {} for a sequence length of {}", tokens.size(),
                           labels.size(), loss_mask.size(), length));
  const int64_t epoch = sample / samples_per_epoch_;
  if (!std::in_range<uint32_t>(epoch)) {
    throw_failed(fmt::format("sample {} of {} lies in epoch {}, and 4,294,967,295 is the last",
                             sample, dataset_->prefix(), epoch));
  }
  const int64_t drawn = sample % samples_per_epoch_;

  int64_t place = drawn;
  uint32_t order = 0;  // all epochs in data order are the same one
  if (shuffled()) {
    order = static_cast<uint32_t>(epoch);
    place = Permutation(samples_per_epoch_, options_.seed, order, ShuffleDomain::samples)(drawn);
  }
  const auto index = epoch_index(order);
  const int64_t position = place * options_.sequence_length;
  read_stream(*index, position, tokens);
  std::copy(tokens.begin() + 1, tokens.end(), labels.begin());
  read_stream(*index, position + options_.sequence_length, labels.last(1));

  for (size_t i = 0; i < length; ++i) {
    loss_mask[i] = options_.eod_mask_loss && tokens[i] == options_.eod ? 0.0F : 1.0F;
  }
}

}  // namespace troupe
