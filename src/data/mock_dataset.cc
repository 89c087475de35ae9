#include "data/mock_dataset.h"

#include <bit>
#include <limits>
#include <vector>

namespace troupe {
namespace {

constexpr int32_t kSequences = 100'000;
constexpr uint32_t kLengths = 4095;  // 1 to 4095

__extension__ using Wide = unsigned __int128;

constexpr Wide wide(uint64_t high, uint64_t low) {
  return Wide{high} << 64 | low;
}

// numpy.random.default_rng(0): PCG64, that is a linear congruential generator of 128 bits whose
// halves are joined by exclusive or and rotated (O'Neill, "PCG: A Family of Simple Fast
// Space-Efficient Statistically Good Algorithms for Random Number Generation", 2014). State and
// increment are what numpy makes of the seed 0.
class NumpyPcg64 {
 public:
  // numpy's integers(0, range, dtype=int32): Lemire's method on 32 bits ("Fast Random Integer
  // Generation in an Interval", 2019).
  uint32_t below(uint32_t range) {
    const uint32_t threshold = (std::numeric_limits<uint32_t>::max() - (range - 1)) % range;
    uint64_t product = uint64_t{next32()} * range;
    while (static_cast<uint32_t>(product) < threshold) product = uint64_t{next32()} * range;
    return static_cast<uint32_t>(product >> 32);
  }

 private:
  uint64_t next64() {
    state_ = state_ * wide(0x2360ed051fc65da4, 0x4385df649fccf645) + kIncrement;
    const auto folded = static_cast<uint64_t>(state_ >> 64) ^ static_cast<uint64_t>(state_);
    return std::rotr(folded, static_cast<int>(state_ >> 122));
  }

  // The lower half of 64 bits first, then the upper one.
  uint32_t next32() {
    if (has_upper_) {
      has_upper_ = false;
      return upper_;
    }
    const uint64_t bits = next64();
    upper_ = static_cast<uint32_t>(bits >> 32);
    has_upper_ = true;
    return static_cast<uint32_t>(bits);
  }

  static constexpr Wide kIncrement = wide(0x418ddadb3af71a82, 0x588133bc447873a9);
  Wide state_ = wide(0x1aa1b5345996452d, 0x09585eb7a69561e3);
  uint32_t upper_ = 0;
  bool has_upper_ = false;
};

template <class Stored>
void append(std::vector<unsigned char>& bytes, Stored value) {
  for (size_t byte = 0; byte < sizeof(Stored); ++byte) {
    bytes.push_back(static_cast<unsigned char>(static_cast<uint64_t>(value) >> 8 * byte & 0xff));
  }
}

// All sequences of one length are the same: one of each length lies there, the shortest first.
std::vector<unsigned char> tokens_of_all_lengths(int64_t vocab_size, int32_t eod, TokenType type) {
  std::vector<unsigned char> bytes;
  bytes.reserve(static_cast<size_t>(size_of(type)) * kLengths * (kLengths + 1) / 2);
  const auto add = [&](int64_t token) {
    if (type == TokenType::u16) {
      append(bytes, static_cast<uint16_t>(token));
    } else {
      append(bytes, static_cast<int32_t>(token));
    }
  };
  for (int64_t length = 1; length <= kLengths; ++length) {
    for (int64_t i = 1; i < length; ++i) add(i % vocab_size);
    add(eod);
  }
  return bytes;
}

}  // namespace

std::shared_ptr<const IndexedDataset> make_mock_dataset(int64_t vocab_size, int32_t eod) {
  const TokenType type = token_type_for_vocabulary(vocab_size);
  NumpyPcg64 random;
  IndexedDataset::Parts parts;
  parts.type = type;
  parts.tokens = tokens_of_all_lengths(vocab_size, eod, type);
  for (int32_t sequence = 0; sequence < kSequences; ++sequence) {
    const auto length = static_cast<int32_t>(1 + random.below(kLengths));
    parts.lengths.push_back(length);
    parts.starts.push_back(int64_t{length} * (length - 1) / 2 * size_of(type));
  }
  return std::make_shared<const IndexedDataset>("mock data", parts);
}

}  // namespace troupe
