#include "data/sampler.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <fmt/format.h>
#include <limits>
#include <numeric>
#include <utility>

#include "base/error.h"

namespace troupe {

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

int64_t least_tokens(const SampleOptions& options) {
  return options.keep_partial ? 2 : options.sequence_length + 1;
}

SampleSource::SampleSource(std::vector<SourceMember> members, std::span<const double> weights,
                           SampleOptions options)
    : options_(std::move(options)) {
  TROUPE_CHECK(!members.empty() && (weights.empty() || weights.size() == members.size()),
               "a weight for each data set, or none");
  if (options_.sequence_length < 1) {
    throw_bad_request(
        fmt::format("a sequence length of {} tokens; it is at least 1", options_.sequence_length));
  }
  if (options_.seed > std::numeric_limits<uint32_t>::max()) {
    throw_bad_request(fmt::format(
        "--seed {}: the order of data takes seeds up to 4,294,967,295, as numpy's generator does",
        options_.seed));
  }
  blended_ = members.size() > 1 || !weights.empty();
  const std::optional<int64_t> wanted = options_.num_samples;
  TROUPE_CHECK(!wanted || *wanted >= 1, "at least one sample is asked for");
  std::vector<double> shares = normalize_weights(weights);
  std::vector<int64_t> available;
  for (size_t i = 0; i < members.size(); ++i) {
    // Several data sets without weights are read once each.
    std::optional<int64_t> asked = blended_ ? std::nullopt : wanted;
    if (wanted && !weights.empty()) asked = samples_to_request(*wanted, shares[i]);
    members_.push_back(make_member(std::move(members[i]), asked));
    available.push_back(members_.back().order.num_samples());
  }
  if (!blended_) return;
  const int64_t total = std::accumulate(available.begin(), available.end(), int64_t{0});
  if (weights.empty()) {
    if (wanted && *wanted > total) {
      throw_bad_request(fmt::format(
          "{} {} samples are asked for, and the {} data sets hold {}. Data sets without weights "
          "are read at most once: give each a weight to read them more often, or ask for fewer "
          "steps",
          *wanted, name_of(options_.split), members_.size(), total));
    }
    shares = normalize_weights(std::vector<double>(available.begin(), available.end()));
  }
  const int64_t size = wanted ? std::max(*wanted, options_.num_read) : total;
  blend_ = BlendOrder(shares, available, size, weights.empty());
  TROUPE_CHECK(!wanted || blend_.size() >= *wanted, "the surplus covers every share");
}

SampleSource::Member SampleSource::make_member(SourceMember source,
                                               std::optional<int64_t> num_samples) const {
  Member member{.dataset = std::move(source.dataset), .sequences = source.sequences};
  const IndexedDataset& dataset = *member.dataset;
  const SequenceRange range = member.sequences;
  TROUPE_CHECK(
      range.begin >= 0 && range.begin <= range.end && range.end <= dataset.num_sequences(),
      fmt::format("sequences [{}, {}) of {}", range.begin, range.end, dataset.num_sequences()));
  if (range.size() > int64_t{std::numeric_limits<uint32_t>::max()}) {
    throw_bad_request(
        fmt::format("the {} split of {} has {} sequences, and 4,294,967,295 is the "
                    "limit; store longer documents or several data sets",
                    name_of(options_.split), dataset.prefix(), range.size()));
  }
  std::vector<int32_t> lengths(static_cast<size_t>(range.size()));
  for (size_t i = 0; i < lengths.size(); ++i) {
    lengths[i] =
        static_cast<int32_t>(dataset.sequence_length(range.begin + static_cast<int64_t>(i)));
    member.tokens += lengths[i];
  }
  // Epochs are joined, so a data set that is read more than once may be smaller than a sample.
  if (member.tokens < (num_samples ? 1 : least_tokens(options_))) {
    throw_bad_request(fmt::format(
        "the {} split of {} has {} tokens in {} of the data set's {} sequences, and {} needed; "
        "tokenize more text or in more documents (plain text: split it at blank lines), change "
        "--split, or shorten the sequence length",
        name_of(options_.split), dataset.prefix(), member.tokens, range.size(),
        dataset.num_sequences(),
        num_samples ? std::string("at least one is")
                    : fmt::format("one sample takes {} (sequence length + 1), which are",
                                  options_.sequence_length + 1)));
  }
  SampleOrderOptions order{.sequence_length = options_.sequence_length,
                           .num_samples = num_samples,
                           .seed = static_cast<uint32_t>(options_.seed),
                           .keep_partial = options_.keep_partial};
  if (options_.progress) {
    order.progress = [&](const std::string& what) {
      options_.progress(fmt::format("{} ({} split): {}", member.dataset->prefix(),
                                    name_of(options_.split), what));
    };
  }
  member.order = build_sample_order(lengths, order);
  return member;
}

int64_t SampleSource::num_samples() const {
  return blended_ ? blend_.size() : members_.front().order.num_samples();
}

const int32_t* SampleSource::find_foreign(std::span<const int32_t> tokens) const {
  // Without an exit, so that the usual case is a few vector instructions.
  const auto bound = static_cast<uint64_t>(options_.vocab_size);
  bool any = false;
  for (const int32_t token : tokens) any |= static_cast<uint64_t>(token) >= bound;
  if (!any) return nullptr;
  return &*std::find_if(tokens.begin(), tokens.end(),
                        [&](int32_t token) { return static_cast<uint64_t>(token) >= bound; });
}

int64_t SampleSource::read_stream(const Member& member, Cursor& cursor,
                                  std::span<int32_t> out) const {
  const auto places = static_cast<int64_t>(member.order.sequences.size());
  const IndexedDataset& dataset = *member.dataset;
  int64_t done = 0;
  const auto wanted = static_cast<int64_t>(out.size());
  while (done < wanted && cursor.place < places) {
    const int64_t sequence =
        member.sequences.begin + member.order.sequences[static_cast<size_t>(cursor.place)];
    const int64_t left = dataset.sequence_length(sequence) - cursor.offset;
    const int64_t count = std::min(left, wanted - done);
    int32_t* const to = out.data() + done;
    dataset.read(sequence, cursor.offset, count, to);
    const int32_t* const foreign = find_foreign({to, static_cast<size_t>(count)});
    if (foreign != nullptr) {
      throw_bad_request(
          fmt::format("{}.bin: token {} of sequence {} is {}, outside the vocabulary "
                      "of {}: the data was written with another tokenizer; tokenize "
                      "the text again or name that one",
                      dataset.prefix(), cursor.offset + (foreign - to), sequence, *foreign,
                      options_.vocab_size));
    }
    done += count;
    cursor.offset += count;
    if (count == left) cursor = {.place = cursor.place + 1, .offset = 0};
  }
  return done;
}

void SampleSource::find_documents(std::span<const int32_t> tokens,
                                  std::span<int32_t> starts) const {
  int32_t start = 0;
  for (size_t i = 0; i < starts.size(); ++i) {
    starts[i] = start;
    const bool ends = i < tokens.size() && tokens[i] == options_.eod;
    if (options_.reset_attention_mask && ends) start = static_cast<int32_t>(i + 1);
  }
}

void SampleSource::get(int64_t sample, std::span<int32_t> tokens, std::span<int32_t> labels,
                       std::span<float> loss_mask, std::span<int32_t> valid,
                       std::span<int32_t> starts) const {
  const auto length = static_cast<size_t>(options_.sequence_length);
  TROUPE_CHECK(sample >= 0 && sample < num_samples(),
               fmt::format("sample {} of {}", sample, num_samples()));
  TROUPE_CHECK(tokens.size() == length && labels.size() == length && loss_mask.size() == length &&
                   (valid.empty() || valid.size() == length) &&
                   (starts.empty() || starts.size() == length),
               fmt::format("spans of {}, {} and {} for a sequence length of {}", tokens.size(),
                           labels.size(), loss_mask.size(), length));
  const Member& member = members_[blended_ ? blend_.member(sample) : 0];
  const int64_t number = member.order.shuffle[blended_ ? blend_.sample(sample) : sample];
  Cursor cursor{.place = member.order.start_place[number],
                .offset = member.order.start_offset[static_cast<size_t>(number)]};
  int64_t read = read_stream(member, cursor, tokens);
  std::copy(tokens.begin() + 1, tokens.end(), labels.begin());
  read += read_stream(member, cursor, labels.last(1));

  // The inputs that have a label.
  const auto whole = std::min(length, static_cast<size_t>(read - 1));
  for (size_t i = 0; i < whole; ++i) {
    loss_mask[i] = options_.eod_mask_loss && tokens[i] == options_.eod ? 0.0F : 1.0F;
  }
  for (size_t i = 0; i < valid.size(); ++i) {
    const bool is_read = static_cast<int64_t>(i) < read;
    valid[i] = is_read && (options_.pad < 0 || tokens[i] != options_.pad) ? 1 : 0;
  }
  find_documents(tokens.first(std::min(length, static_cast<size_t>(read))), starts);
  if (options_.pad >= 0) {
    for (size_t i = 0; i < whole; ++i) {
      if (labels[i] == options_.pad) loss_mask[i] = 0.0F;
    }
    std::replace(tokens.begin(), tokens.begin() + std::min<int64_t>(read, options_.sequence_length),
                 options_.pad, 0);
    std::replace(labels.begin(), labels.begin() + static_cast<std::ptrdiff_t>(whole), options_.pad,
                 0);
  }
  if (whole == length) return;
  std::fill(tokens.begin() + read, tokens.end(), 0);
  std::fill(labels.begin() + static_cast<std::ptrdiff_t>(whole), labels.end(), 0);
  std::fill(loss_mask.begin() + static_cast<std::ptrdiff_t>(whole), loss_mask.end(), 0.0F);
}

std::vector<MemberUse> SampleSource::use_of(int64_t samples) const {
  std::vector<int64_t> taken(members_.size());
  if (blended_) {
    for (int64_t i = 0; i < samples; ++i) ++taken[blend_.member(i)];
  } else {
    taken[0] = samples;
  }
  std::vector<MemberUse> uses;
  for (size_t i = 0; i < members_.size(); ++i) {
    const Member& member = members_[i];
    uses.push_back(
        {.prefix = member.dataset->prefix(),
         .documents = member.sequences.size(),
         .tokens = member.tokens,
         .samples = taken[i],
         .epochs = static_cast<double>(taken[i]) * static_cast<double>(options_.sequence_length) /
                   static_cast<double>(member.tokens)});
  }
  return uses;
}

}  // namespace troupe
