#include "data/sample_order.h"

#include <algorithm>
#include <fmt/format.h>
#include <limits>
#include <numeric>

#include "base/error.h"
#include "base/machine.h"
#include "base/units.h"
#include "data/numpy_random.h"

namespace troupe {
namespace {

// Shuffling fewer entries takes less than some seconds.
constexpr int64_t kWorthReporting = 50'000'000;
// A last epoch of which less than this share is needed is shuffled by itself.
constexpr double kSeparateBelow = 0.80;

int64_t ceil_div(int64_t a, int64_t b) {
  return a / b + (a % b != 0 ? 1 : 0);
}

void refuse_if_too_large(int64_t epochs, int64_t sequences, int64_t samples) {
  const double bytes = 4.0 * static_cast<double>(epochs) * static_cast<double>(sequences) +
                       12.0 * static_cast<double>(samples);
  const auto available = static_cast<double>(available_memory_bytes());
  if (available == 0 || bytes <= available) return;
  throw UserError(
      ExitStatus::does_not_fit,
      fmt::format("The order of {} samples ({} epochs over {} sequences) needs {} of "
                  "memory, this machine has {} available. Ask for fewer steps "
                  "(--train-iters) or use a larger data set.",
                  samples, epochs, sequences, format_bytes(static_cast<uint64_t>(bytes)),
                  format_bytes(static_cast<uint64_t>(available))));
}

void find_starts(std::span<const int32_t> lengths, int64_t sequence_length, SampleOrder& order) {
  const int64_t samples = order.start_place.size();
  // The first sample begins at the very beginning, even if empty sequences stand there. Every other
  // one begins inside a sequence.
  int64_t sample = 1;
  int64_t begin = 0;
  for (size_t place = 0; place < order.sequences.size() && sample < samples; ++place) {
    const int64_t end = begin + lengths[order.sequences[place]];
    for (; sample < samples && sample * sequence_length < end; ++sample) {
      order.start_place.set(sample, static_cast<int64_t>(place));
      order.start_offset[static_cast<size_t>(sample)] =
          static_cast<int32_t>(sample * sequence_length - begin);
    }
    begin = end;
  }
  TROUPE_CHECK(sample >= samples, "the stream is shorter than its samples");
}

}  // namespace

IndexArray::IndexArray(int64_t count, int64_t bound) {
  if (bound <= int64_t{1} << 32) {
    narrow_.resize(static_cast<size_t>(count));
  } else {
    wide_.resize(static_cast<size_t>(count));
  }
}

void IndexArray::set(int64_t i, int64_t value) {
  const auto at = static_cast<size_t>(i);
  if (wide_.empty()) {
    narrow_[at] = static_cast<uint32_t>(value);
  } else {
    wide_[at] = static_cast<uint64_t>(value);
  }
}

SampleOrder build_sample_order(std::span<const int32_t> lengths,
                               const SampleOrderOptions& options) {
  const int64_t sequence_length = options.sequence_length;
  const auto count = static_cast<int64_t>(lengths.size());
  const int64_t tokens = std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
  TROUPE_CHECK(tokens > 0, "an order of no tokens");
  TROUPE_CHECK(sequence_length > 0, "samples of no tokens");
  const int64_t wanted = options.num_samples.value_or(0);
  if (wanted > (std::numeric_limits<int64_t>::max() / 2 - tokens) / sequence_length) {
    throw_bad_request(
        fmt::format("{} samples of {} tokens are more than can be counted; ask for "
                    "fewer steps (--train-iters)",
                    wanted, sequence_length));
  }

  SampleOrder order;
  int64_t first_part = 0;  // samples before a last epoch that is shuffled by itself
  if (options.num_samples) order.epochs = ceil_div(wanted * sequence_length + 1, tokens);
  if (order.epochs > 1) {
    first_part = ((order.epochs - 1) * tokens - 1) / sequence_length;
    const int64_t epoch = (tokens - 1) / sequence_length;
    order.separate_last_epoch =
        wanted - first_part < static_cast<int64_t>(kSeparateBelow * static_cast<double>(epoch));
  }
  const int64_t last_start = order.epochs * tokens - 1;
  const int64_t samples =
      options.keep_partial ? ceil_div(last_start, sequence_length) : last_start / sequence_length;
  if (!order.separate_last_epoch) first_part = samples;
  refuse_if_too_large(order.epochs, count, samples);
  const bool slow = std::max(order.epochs * count, samples) > kWorthReporting;
  const auto report = [&](const std::string& what) {
    if (slow && options.progress) options.progress(what);
  };

  report(fmt::format("Shuffling {} sequences ({} epochs) ...",
                     format_count(static_cast<double>(order.epochs * count)), order.epochs));
  NumpyRandom random(options.seed);
  order.sequences.resize(static_cast<size_t>(order.epochs * count));
  for (size_t i = 0; i < order.sequences.size(); ++i) {
    order.sequences[i] = static_cast<uint32_t>(i % lengths.size());
  }
  const std::span<uint32_t> all(order.sequences);
  if (order.separate_last_epoch) {
    random.shuffle(all.first(all.size() - lengths.size()));
    random.shuffle(all.last(lengths.size()));
  } else {
    random.shuffle(all);
  }

  report(fmt::format("Cutting {} samples ...", format_count(static_cast<double>(samples))));
  order.start_place = IndexArray(samples, order.epochs * count);
  order.start_offset.resize(static_cast<size_t>(samples));
  find_starts(lengths, sequence_length, order);

  report(fmt::format("Shuffling {} samples ...", format_count(static_cast<double>(samples))));
  order.shuffle = IndexArray(samples, samples);
  order.shuffle.visit([&](auto numbers) {
    std::iota(numbers.begin(), numbers.end(), 0U);
    random.shuffle(numbers.first(static_cast<size_t>(first_part)));
    random.shuffle(numbers.subspan(static_cast<size_t>(first_part)));
  });
  return order;
}

}  // namespace troupe
