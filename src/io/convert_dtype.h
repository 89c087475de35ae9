// Conversion of tensors between the element types of files and of memory.
//
// Every result is the correctly rounded value of its source (to nearest, ties to even) in one
// rounding; f64 to bf16 in particular does not pass through a rounded f32. Widening is exact.
// Values beyond the range become infinities, NaN stays NaN. The processor's default rounding mode
// with subnormal numbers enabled is assumed.
//
// Callable from any thread; nothing is allocated.
#pragma once

#include <cstdint>

#include "base/dtype.h"
#include "io/file_dtype.h"

namespace troupe {

// True between floating-point types, and from a type to itself.
bool can_convert(FileDType from, FileDType to);
bool can_convert(FileDType from, DType to);

// Converts `count` elements. Source and target need no alignment and must not overlap. Requires
// can_convert(from, to).
void convert_elements(FileDType from, const void* source, FileDType to, void* target,
                      int64_t count);
void convert_elements(FileDType from, const void* source, DType to, void* target, int64_t count);

// The first element that is infinite or NaN, or -1. The elements need no alignment; their type is a
// floating-point one.
int64_t first_not_finite(FileDType dtype, const void* data, int64_t count);
int64_t first_not_finite(DType dtype, const void* data, int64_t count);

// Correct rounding of a double in one step.
bf16 double_to_bf16(double value);

}  // namespace troupe
