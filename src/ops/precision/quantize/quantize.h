// Quantisation: a tensor in 8 bits, as codes and the scales that belong to them.
//
//   amax_b = max over the block b of |x|
//   codes  = nearest code of x / scale of its block, ties to even; what is too large saturates
//
// with the blocks of ops/precision/scale_blocks.h, and scales by the attribute's rule, L being the
// largest number of the format:
//
//   ratio         f = L / amax in f32 (1 where amax is 0 or not finite; the largest float where f
//   is
//                 infinite); the scale is 1 / f, and x is multiplied by f
//   power_of_two  2^ceil(log2(amax / 448)), 1 where amax is 0; exact: it is a power of two
//   exponent      the same, as E8M0. Both are for e4m3
//
// With the rule fp4 codes are those of 4 bits, kept as numbers of e4m3 (ops/precision/fp4_block.h);
// `amax` is then of whole matrices, or of each expert's rows, and there are no others. Blocks are
// 1 x 16, 16 x 1 or 16 x 16. What is rotated is that in blocks of 16 whole rows; the rest is not.
//
// x is rounded to f32 first, where it is wider; with `rounds` to bf16, as the copy would be that a
// weight does not have. NaN becomes NaN.
//
// Kinds
//   quantize   (x, offsets optional, amax optional, row_slot optional) -> codes and scales, by
//              their order:
//                rows        codes like x, scales
//                transposed  transposed codes, scales
//                both        codes like x, scales, transposed codes; where these have other blocks
//                            than the codes, their scales
//              with `measures`, amax of the blocks' own, f32, shaped as scales
//   block_amax (x, offsets optional)                -> amax, f32, shaped as scales
// x is f64, f32 or bf16, [R, C] or [E, N, K]; or rows [R, C] of such matrices (`part`), with one
// scale for each matrix, also for those of which there are no rows. Where it is ragged, there are
// offsets, whose last is the number of live rows, or codes in rows only with blocks of one row.
// `amax` is what block_amax computes, of several tensors one after the other (of all ranks,
// all_gather): of each block the largest counts. Without it, the blocks' own count. `measures`
// needs it. Unused scales are 1.
//
// With `row_slot` and the attribute top_k = k, what is quantised are the rows that permute
// (ops/experts/permute) would gather, without storing them: row r is row row_slot[r] / k of x, or
// zeros where row_slot[r] is negative. Not of the rule fp4.
//
// There is no derivative: precision is lowered after differentiation (passes/precision.h), so
// gradients pass quantisation as if it were not there.
#pragma once

#include <span>
#include <string>

#include "ops/precision/quantization.h"
#include "program/builder.h"
#include "program/op_spec.h"

namespace troupe {

struct BlockAmaxAttributes {
  BlockShape block = {};
  MatrixRows part = {};
  bool rounds = false;   // x, which is f32, to bf16 first
  bool rotates = false;  // x first, as QuantizeAttributes says; of whole matrices
};

// A tensor in 8 bits, in the order in which a product reads it.
struct Codes {
  ValueId codes;
  ValueId scales;
};
struct Quantized {
  Codes rows;
  Codes transposed;
  ValueId amax;  // where it is measured
};

Quantized quantize(Builder& builder, ValueId x, ValueId offsets, ValueId amax,
                   const QuantizeAttributes& attributes, const std::string& name,
                   ValueId row_slot = {});
ValueId block_amax(Builder& builder, ValueId x, ValueId offsets,
                   const BlockAmaxAttributes& attributes, const std::string& name);

// For kinds that quantise what they make themselves (ops/precision/quantize_activation): inputs 1
// and 2 are offsets and amax, the first outputs those of quantize. `x`: what is quantised.
void declare_codes(InferContext& context, const QuantizeAttributes& attributes, const Value& x);
Quantized quantized_of(std::span<const ValueId> outputs, const QuantizeAttributes& attributes);
// What quantisation needs of memory while it runs, on a CPU and a GPU.
uint64_t quantize_workspace(const OpView& op, const QuantizeAttributes& attributes);
std::string print_quantize(const QuantizeAttributes& attributes);
// The kernels for such x; those of GPUs are there in builds with CUDA.
CpuKernel quantize_cpu_kernel_of(DType dtype);
CudaKernel quantize_cuda_kernel_of(const QuantizeAttributes& attributes, const CudaTensor& x);

// "f8e4m3 1x128"
std::string to_string(BlockShape block);

extern const OpSpec kQuantize;
extern const OpSpec kBlockAmax;

}  // namespace troupe
