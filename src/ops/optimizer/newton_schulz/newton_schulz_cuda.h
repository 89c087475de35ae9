// The scratch memory of newton_schulz on a GPU: shared by its kernels and by the rule that books
// it. Pure functions. Private to this folder.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "ops/optimizer/newton_schulz/newton_schulz_cpu.h"
#include "ops/product_scratch.h"

namespace troupe {

// Matrices are worked on together as long as their scratch memory has at most this much.
inline constexpr int64_t kTogetherBytes = int64_t{128} << 20;
// Pieces of a sum of squares, at most: one for each thread of the block that adds them.
inline constexpr int64_t kMostSquarePieces = 256;
inline constexpr int64_t kSquarePieceElements = 4096;

// What lies after the scratch memory of the products, for one section of `together` matrices side
// by side: of each X and its successor, A and b A + c A A, and the sums of squares of its pieces.
class SectionScratch {
 public:
  SectionScratch(const SectionMatrix& section, int64_t matrices, int64_t element_bytes)
      : pieces_(std::clamp<int64_t>(
            (section.elements() + kSquarePieceElements - 1) / kSquarePieceElements, 1,
            kMostSquarePieces)),
        matrix_bytes_(align(section.elements() * element_bytes)),
        gram_bytes_(align(section.side() * section.side() * element_bytes)),
        squares_bytes_(align(pieces_ * int64_t{sizeof(double)})),
        together_(std::clamp<int64_t>(kTogetherBytes / bytes_each(), 1,
                                      std::min<int64_t>(matrices, 65535))) {}

  int64_t pieces() const { return pieces_; }
  int64_t together() const { return together_; }
  uint64_t bytes() const {
    return kProductScratchBytes + static_cast<uint64_t>(together_ * bytes_each());
  }

  // Addresses in `scratch`, and elements of P from a matrix to the next.
  template <class P>
  P* x(std::byte* scratch, int which) const {
    return at<P>(scratch, which * matrix_bytes_);
  }
  template <class P>
  P* gram(std::byte* scratch) const {
    return at<P>(scratch, 2 * matrix_bytes_);
  }
  template <class P>
  P* polynomial(std::byte* scratch) const {
    return at<P>(scratch, 2 * matrix_bytes_ + gram_bytes_);
  }
  double* squares(std::byte* scratch) const {
    return at<double>(scratch, 2 * matrix_bytes_ + 2 * gram_bytes_);
  }
  template <class P>
  int64_t matrix_step() const {
    return matrix_bytes_ / int64_t{sizeof(P)};
  }
  template <class P>
  int64_t gram_step() const {
    return gram_bytes_ / int64_t{sizeof(P)};
  }

 private:
  static int64_t align(int64_t bytes) { return (bytes + 63) / 64 * 64; }
  int64_t bytes_each() const { return 2 * matrix_bytes_ + 2 * gram_bytes_ + squares_bytes_; }
  template <class P>
  P* at(std::byte* scratch, int64_t bytes_before) const {
    return reinterpret_cast<P*>(scratch + kProductScratchBytes + together_ * bytes_before);
  }

  int64_t pieces_, matrix_bytes_, gram_bytes_, squares_bytes_, together_;
};

}  // namespace troupe
