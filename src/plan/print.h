// The printer: a program as a person would write it, one line per operation.
//
//   14  fwd  compute  L1 mb0  24.00 KiB  96.50 KiB  qkv = linear(x, w_qkv)  f32 [128, 48]
//
// The columns are: number of the operation in the program, phase, queue, layer and micro-batch,
// bytes of the tensors it defines, transient bytes live while it runs (when the caller has a plan),
// the statement, and the type of each output. `[<=256, 48] rows=routing.offsets[4]` is a ragged
// tensor: at most 256 rows, as many as that counter says.
//
// Statements
//   a, b = kind(x, y) {attributes}   defines new tensors; an absent optional input prints as "-"
//   grad.w <- kind(x, y)             stores into tensors that exist already, or changes them
//   grad.w += kind(x, y)             adds to a main gradient or metric that was stored before
//   a, .b = kind(x)                  defines a and a.b
//   a, &b = kind(x)                  defines a, changes b
// Tensors that are changed in place are not repeated among the inputs. "by sm90 pair" after a
// statement names the kernel, where the kind has several.
//
// Names follow the rule of nested blocks (step > micro-batch > layer): a plain name means the
// innermost tensor of that name around the operation. Everything else says where it is from:
// "moe_out@L0" (layer 0 of the same micro-batch), "x@mb1", "loss@step". A name defined several
// times in one block counts: d_x, d_x#2, d_x#3. State of the operation's own layer drops its prefix
// ("layers.1.w_qkv" prints as "w_qkv"). Numbers and names do not depend on what is filtered out.
//
// The text depends on the arguments alone. Functions here only read; any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "program/program.h"

namespace troupe {

struct PrintOptions {
  // What to print; everything by default. A layer comes with its optimizer operations.
  std::optional<int32_t> layer;
  std::optional<int32_t> micro_batch;
  std::optional<Phase> phase;

  // From the memory plan; empty: not printed. Transient bytes by operation, and bytes by Role
  // (kRoleCount numbers) on the device and on the host.
  std::span<const uint64_t> live_bytes;
  std::span<const uint64_t> bytes_by_role;
  std::span<const uint64_t> host_bytes_by_role;

  // The kernel of each operation, on a GPU; empty: not printed.
  std::span<const std::string> kernels;

  // For terminals of 80 columns: without the queue, without the place, which headings say, and
  // statements not aligned.
  bool is_narrow = false;
};

// Do the filters let an operation at this place through?
bool is_shown(const Place& place, const PrintOptions& options);

// Aborts when a span has another length than stated above.
std::string print_program(const Program& program, const PrintOptions& options);

// "f32 [128, 48]", "i32 [8]". The row counter of a ragged tensor is left out: "f32 [<=256, 48]".
std::string type_text(const Value& value);

// The phase in at most five letters: fwd, dgrad, wgrad, rec, opt.
std::string_view short_name_of(Phase phase);

}  // namespace troupe
