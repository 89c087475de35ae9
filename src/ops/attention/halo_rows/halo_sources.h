// The attributes of halo_rows (halo_rows.h), and where rows of y come from, for the kernels on CPU
// and GPU. Pure functions.
#pragma once

#include <cstdint>

#include "program/row_origin.h"

namespace troupe {

enum class HaloStep : uint8_t { ends, ends_gradient, before, before_gradient };

struct HaloRowsAttributes {
  HaloStep step = HaloStep::ends;
  SequenceChunks chunks = {};
  int32_t length = 1;  // L
  int32_t rows = 1;    // k

  constexpr int64_t ends() const { return length < rows ? length : rows; }  // m
};

// Rows of x whose sum a row of y is; -1: none.
struct HaloSources {
  int64_t first = -1;
  int64_t second = -1;
};

// This rank's chunks of all sequences, 2 B, of an x of `rows` rows. They are numbered by
// sequence, the first chunk of each before its second.
constexpr int64_t halo_pieces(const HaloRowsAttributes& a, int64_t rows) {
  switch (a.step) {
    case HaloStep::ends:
      return rows / a.length;
    case HaloStep::ends_gradient:
      return rows / a.ends();
    case HaloStep::before:
      return rows / (a.ends() * a.chunks.ranks);
    case HaloStep::before_gradient:
      return rows / a.rows;
  }
  return 0;
}

constexpr HaloSources halo_sources(const HaloRowsAttributes& a, int64_t pieces, int64_t row) {
  const int64_t m = a.ends();
  switch (a.step) {
    case HaloStep::ends:
      return {.first = row / m * a.length + a.length - m + row % m};
    case HaloStep::ends_gradient: {
      const int64_t end = row % a.length - (a.length - m);
      return {.first = end < 0 ? -1 : row / a.length * m + end};
    }
    case HaloStep::before: {
      const int64_t piece = row / a.rows;
      const int64_t position = a.chunks.position(piece % 2, 2) * a.length - a.rows + row % a.rows;
      if (position < 0) return {};
      const int64_t chunk = position / a.length;
      const int64_t from =
          a.chunks.owner(chunk) * pieces + piece - piece % 2 + (chunk < a.chunks.ranks ? 0 : 1);
      return {.first = from * m + position % a.length - (a.length - m)};
    }
    case HaloStep::before_gradient: {
      const int64_t piece = row / m % pieces;
      const int64_t rank = row / m / pieces;
      const int64_t chunk = piece % 2 == 0 ? rank : 2 * a.chunks.ranks - 1 - rank;
      const int64_t position = chunk * a.length + a.length - m + row % m;
      const auto row_before = [&](int64_t own) {
        const int64_t at = position - a.chunks.position(own, 2) * a.length + a.rows;
        return at < 0 || at >= a.rows ? -1 : (piece - piece % 2 + own) * a.rows + at;
      };
      return {.first = row_before(0), .second = row_before(1)};
    }
  }
  return {};
}

}  // namespace troupe
