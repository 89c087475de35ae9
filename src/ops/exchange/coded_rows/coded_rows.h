// Rows in 8 bits: what a message between ranks carries of activations or gradients. Each block of
// 32 elements of a row has a scale, a power of two (the MXFP8 of "OCP Microscaling Formats (MX)
// Specification 1.0", 2023), chosen as those of products are (ops/precision/scale_blocks.h). So
// what a row becomes depends on nothing but the row.
//
// A coded row is bytes (coded_block.h).
//
// Kinds, with x and y of one float dtype
//   encode_rows (x [T, w]) -> u8 [T, coded_row_bytes(w)]
//   decode_rows (u8 [M, coded_row_bytes(w)], received i32 [n] or none) -> y [M, w]
//       y = code * scale, rounded to the dtype. Ragged as the coded rows are. With `received` these
//       are n sections of M / n rows, of which section s has received[s]; the others are neither
//       read nor written.
//   round_rows (x [T, w]) -> y [T, w]
//       y = decode_rows(encode_rows(x)), the same bits. The gradient passes as it is.
//   round_gradient (x [T, w]) -> y [T, w]
//       y = x; the gradient of x is round_rows of the gradient of y.
#pragma once

#include <cstdint>
#include <string>

#include "base/dtype.h"
#include "ops/exchange/coded_rows/coded_block.h"
#include "program/builder.h"
#include "program/op_spec.h"

namespace troupe {

struct DecodeRowsAttributes {
  DType dtype = DType::bf16;
  int64_t elements = 0;  // w
  // How many rows there are on average, which costs count; 0: all of them.
  int64_t expected_rows = 0;
};

ValueId encode_rows(Builder& builder, ValueId x, const std::string& name);
ValueId decode_rows(Builder& builder, ValueId coded, ValueId received,
                    const DecodeRowsAttributes& attributes, const std::string& name);
ValueId round_rows(Builder& builder, ValueId x, const std::string& name);
ValueId round_gradient(Builder& builder, ValueId x, const std::string& name);

extern const OpSpec kEncodeRows;
extern const OpSpec kDecodeRows;
extern const OpSpec kRoundRows;
extern const OpSpec kRoundGradient;

}  // namespace troupe
