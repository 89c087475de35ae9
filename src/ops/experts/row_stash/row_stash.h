// The stash: memory for the rows of experts that wait for the backward pass (passes/stash.h). What
// a rank's experts get depends on the data, so each tensor is as large as the most rows that a
// layer may get; the stash keeps of each only the rows that are there, so that it need only be as
// large as the sum over all that wait.
//
// It is made of pages of page_bytes. A tensor's live rows, one after the other, take as many pages
// as they fill; which ones, its table says. Pages that are free are a stack on the device. How many
// are wanted, free or not, is counted: who finds too few takes those that there are and nothing
// else, so that nothing is written beyond the stash, and `lacked` says that the step is void.
//
// Kinds
//   open_stash () -> pages, free                     all pages are free
//   stash (x, pages, free, lacked, most) -> table    x is copied into pages
//   unstash (table, pages, free, counter) -> y       and back; its pages are free again
// x: a ragged tensor of numbers or codes; y has its shape, dtype and row count, as the attributes
// say. pages: u8 [pages, page_bytes] and free: i32 [2 + pages], both Role::stash and changed in
// place. lacked: f64 [1], a metric, grows by 1 where pages lacked; most: f64 [1], a metric, the
// most pages that were wanted at a time. Both must be defined. table: i32 [pages that x may take].
// Where pages lacked, y has zeros. Rows keep their bits; there is no derivative.
#pragma once

#include <string>

#include "program/builder.h"
#include "program/op_spec.h"

namespace troupe {

struct OpenStashAttributes {
  int64_t pages = 0;
  int64_t page_bytes = 0;  // a multiple of 256
};

struct UnstashAttributes {
  Shape shape;
  int64_t expected = 0;  // of RowCount
  int32_t element = 0;
  DType dtype = DType::f32;
};

struct Stash {
  ValueId pages;
  ValueId free;
};

// The beginning of `free`: how many pages are free, how many are wanted. The free ones follow.
inline constexpr int64_t kFreePages = 0;
inline constexpr int64_t kWantedPages = 1;
inline constexpr int64_t kFirstFreePage = 2;

// How many pages a number of bytes fills.
constexpr int64_t pages_of(int64_t bytes, int64_t page_bytes) {
  return (bytes + page_bytes - 1) / page_bytes;
}

// Numbers, or codes of them: where pages lacked, no index becomes 0.
inline bool is_stashable(const Value& value) {
  return value.rows.valid() && value.dtype != DType::i32 && value.dtype != DType::i64;
}

Stash open_stash(Builder& builder, const OpenStashAttributes& attributes);
// The table.
ValueId stash_rows(Builder& builder, const Stash& stash, ValueId lacked, ValueId most, ValueId x);
// What stash_rows() took of `x`, as a new value.
ValueId unstash_rows(Builder& builder, const Stash& stash, ValueId table, ValueId x);

extern const OpSpec kOpenStash;
extern const OpSpec kStash;
extern const OpSpec kUnstash;

}  // namespace troupe
