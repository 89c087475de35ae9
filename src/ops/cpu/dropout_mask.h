// Which elements a dropout keeps: a pure function of (seed, substream, step, element), shared by
// the kernels of dropout and attention. Element e has word e mod 4 of random position e / 4, under
// a seed derived from the step, and is kept when that word is at least probability * 2^32 (rounded
// down). So the probability of keeping is 1 - probability within 2^-32.
//
// An object belongs to one kernel; all threads may draw from it at once.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/random.h"

namespace troupe {

class DropoutMask {
 public:
  // 0 <= probability < 1
  DropoutMask(uint64_t seed, uint32_t substream, int64_t step, double probability)
      : substream_(substream),
        threshold_(static_cast<uint32_t>(probability * 0x1.0p32)),
        scale_(1 / (1 - probability)) {
    const auto words =
        random_words(seed, RandomStream::dropout, substream, static_cast<uint64_t>(step));
    step_seed_ = (static_cast<uint64_t>(words[1]) << 32) | words[0];
  }

  // The factor of what is kept: 1 / (1 - probability).
  double scale() const { return scale_; }

  // words[i] for element first + i, with i < count; see keeps().
  void draw(uint64_t first, int64_t count, uint32_t* words) const {
    const uint64_t skipped = first % 4;
    uint64_t position = first / 4;
    int64_t done = 0;
    if (skipped != 0) {
      const auto group = random_words(step_seed_, RandomStream::dropout, substream_, position++);
      done = std::min<int64_t>(count, static_cast<int64_t>(4 - skipped));
      std::copy_n(group.data() + skipped, done, words);
    }
    const int64_t whole = (count - done) / 4;
    fill_random_words(step_seed_, RandomStream::dropout, substream_, position, whole, words + done);
    done += 4 * whole;
    if (done < count) {
      const auto group = random_words(step_seed_, RandomStream::dropout, substream_,
                                      position + static_cast<uint64_t>(whole));
      std::copy_n(group.data(), count - done, words + done);
    }
  }

  bool keeps(uint32_t word) const { return word >= threshold_; }

 private:
  uint64_t step_seed_ = 0;
  uint32_t substream_;
  uint32_t threshold_;
  double scale_;
};

}  // namespace troupe
