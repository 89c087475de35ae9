// Orthogonalises matrices, as the optimizer Muon does with its momentum: with x = U S V^T, y is
// about U V^T, all singular values near 1 (Jordan and others, "Muon", 2024; Megatron Core and
// Emerging-Optimizers compute the same). Of each matrix X [rows, columns] with rows <= columns:
//   X = x / max(|x|, 1e-15)                   |x|: root of the sum of the squares, in double
//   A = X X^T,  X = a X + (b A + c A A) X     in each of `steps` iterations, with its a, b and c
//   y = scale X
// With rows > columns the same of the transposes: A = X^T X, X = a X + X (b A + c A A). In exact
// arithmetic, singular values of x from 0.003 |x| on come to lie in [0.97, 1.15] after five steps
// with the coefficients `quintic`, in [0.68, 1.21] with `simple`; smaller ones grow by a factor of
// at most 493 or 485.
//
// Kinds
//   newton_schulz (x) -> y
// x and y are f32 or f64 [rows, columns] or [B, rows, columns], of one shape and dtype, not ragged;
// each of the B matrices is one by itself, and so are the sections of its rows. A matrix of zeros
// stays zero. y may be stored over x: a section is read before it is written. On a CPU the bits of
// a matrix do not depend on B; on a GPU the library chooses an algorithm for several products
// together. There is no derivative.
//
// What products take and give:
//   accumulation   the dtype of x
//   bf16           only with f32: X, A and b A + c A A are rounded to bf16 whenever they are
//                  stored, sums and the addition of what is added are in f32, as on tensor cores
//                  (Emerging-Optimizers' precision "medium", its default). On CPU and GPU alike.
//                  Of random matrices y is off by some 0.6 % of its norm with `quintic`, 1 to 2 %
//                  with `simple`, and another order of the sums alone changes it by 0.6 %: bits
//                  that round to the other side are enlarged by the next steps.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "program/builder.h"
#include "program/op_spec.h"

namespace troupe {

// The (a, b, c) of the steps: five triples, one after the other and then again, or always one.
enum class NewtonSchulzCoefficients : uint8_t { quintic, simple };

enum class NewtonSchulzArithmetic : uint8_t { accumulation, bf16 };

// Successive rows that are a matrix by themselves (queries, keys and values in one weight).
struct NewtonSchulzSection {
  int64_t rows = 0;  // 0: there is no such section
  double scale = 1;
};

struct NewtonSchulzAttributes {
  // Either all rows of a matrix are in sections, from the first on, or none: then the matrix is
  // whole, with the scale of the first.
  std::array<NewtonSchulzSection, 4> sections{};
  int32_t steps = 5;  // with `quintic` a multiple of 5
  NewtonSchulzCoefficients coefficients = NewtonSchulzCoefficients::quintic;
  NewtonSchulzArithmetic arithmetic = NewtonSchulzArithmetic::accumulation;
};

ValueId newton_schulz(Builder& builder, ValueId x, const NewtonSchulzAttributes& attributes,
                      const std::string& name);

extern const OpSpec kNewtonSchulz;

}  // namespace troupe
