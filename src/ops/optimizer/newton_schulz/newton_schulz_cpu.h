// What the rules and the kernels of newton_schulz, on CPU and GPU, share: its matrices, and the
// coefficients. Pure functions. Private to this folder.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "base/shape.h"
#include "ops/optimizer/newton_schulz/newton_schulz.h"

namespace troupe {

// The least norm that is divided by.
inline constexpr double kNewtonSchulzLeastNorm = 1e-15;

// One step: X = a X + (b A + c A A) X.
struct NewtonSchulzStep {
  double a, b, c;
};

// Both as in Emerging-Optimizers: `quintic` is modded-nanogpt's, `simple` the first Muon's.
inline constexpr std::array<NewtonSchulzStep, 5> kQuinticSteps = {{{4.0848, -6.8946, 2.9270},
                                                                   {3.9505, -6.3029, 2.6377},
                                                                   {3.7418, -5.5913, 2.3037},
                                                                   {2.8769, -3.1427, 1.2046},
                                                                   {2.8366, -3.0525, 1.2012}}};
inline constexpr NewtonSchulzStep kSimpleStep = {3.4445, -4.7750, 2.0315};

inline NewtonSchulzStep newton_schulz_step(const NewtonSchulzAttributes& attributes, int32_t step) {
  if (attributes.coefficients == NewtonSchulzCoefficients::simple) return kSimpleStep;
  return kQuinticSteps[static_cast<size_t>(step) % kQuinticSteps.size()];
}

inline bool newton_schulz_is_in_bf16(const OpView& op) {
  return op.attributes<NewtonSchulzAttributes>().arithmetic == NewtonSchulzArithmetic::bf16;
}

// The B matrices of `shape`, [rows, columns] or [B, rows, columns].
struct MatrixBatch {
  int64_t count;
  int64_t rows;
  int64_t columns;

  explicit MatrixBatch(const Shape& shape)
      : count(shape.rank() == 3 ? shape[0] : 1),
        rows(shape[shape.rank() - 2]),
        columns(shape.back()) {}
};

// A section of each matrix: what one orthogonalisation works on.
struct SectionMatrix {
  int64_t first;  // its first element, within the matrix
  int64_t rows;
  int64_t columns;
  double scale;

  bool is_tall() const { return rows > columns; }
  int64_t side() const { return std::min(rows, columns); }  // of A
  int64_t elements() const { return rows * columns; }
};

// Calls body(section) for the sections in use, one after the other.
template <class Body>
void for_sections(const NewtonSchulzAttributes& attributes, const MatrixBatch& batch,
                  const Body& body) {
  const bool whole = attributes.sections[0].rows == 0;
  int64_t row = 0;
  for (const NewtonSchulzSection& section : attributes.sections) {
    const int64_t rows = whole ? batch.rows : section.rows;
    if (rows > 0) {
      body(SectionMatrix{row * batch.columns, rows, batch.columns, section.scale});
    }
    if (whole) return;
    row += rows;
  }
}

}  // namespace troupe
