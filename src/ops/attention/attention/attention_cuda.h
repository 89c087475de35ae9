// Which kernel computes an attention on a GPU, and the scratch memory that it takes: pure
// arithmetic of shapes, in every build.
//
// In bf16 and f16 without dropout and documents, with heads of 8, 16, ... 256 elements and chunks
// of several queries, that is cuDNN. On Hopper gradients of whole sequences and of short windows,
// and all where cuDNN is not, are our own kernels for tensor cores, in bf16, with queries and keys
// of 8, 16, ... 192 elements, values of up to 128, and without dropout. Everything else has plain
// kernels (AttentionVariant).
//
// Pure functions; any thread.
#pragma once

#include <cstdint>

#include "ops/attention/attention/cuda/attention_call.h"
#include "ops/choose_kernel.h"

namespace troupe {

// Throw UserError if heads are too large for any kernel.
AttentionVariant forward_attention_variant(const AttentionShape& shape, const DeviceTraits& device);
AttentionVariant gradient_attention_variant(const AttentionShape& shape,
                                            const DeviceTraits& device);

// Scratch memory of run_attention() and run_attention_gradient().
uint64_t attention_call_scratch_bytes(const AttentionShape& shape, AttentionVariant variant);
uint64_t attention_gradient_call_scratch_bytes(const AttentionShape& shape,
                                               AttentionVariant variant);

// The function for a variant; nullptr in builds without CUDA.
using SelectAttention = CudaKernel (*)(const OpView&, AttentionVariant);

// The choice for an operation whose attention has this shape, without what it needs for staging.
// `scratch`: bytes.
KernelChoice choose_attention(const OpView& op, const DeviceTraits& device,
                              const AttentionShape& shape, AttentionVariant variant,
                              SelectAttention select, uint64_t scratch);

// Our own backward pass on Hopper (attention_sm90_gradient.cu) works on blocks of keys and tiles of
// queries. Rows of queries are those of a chunk, in whole blocks.
inline constexpr int64_t kSm90BlockRows = 128;
inline constexpr int64_t kSm90TileRows = 64;
inline int64_t sm90_padded_rows(const AttentionShape& shape) {
  return (shape.chunk() + kSm90BlockRows - 1) / kSm90BlockRows * kSm90BlockRows;
}
// Of all sequences and heads.
inline int64_t sm90_prepared_rows(const AttentionShape& shape) {
  return int64_t{shape.attributes.batch} * shape.attributes.heads * (shape.rows() / shape.chunk()) *
         sm90_padded_rows(shape);
}
// Elements of queries and keys in shared memory.
constexpr int32_t sm90_key_columns(const AttentionAttributes& a) {
  if (a.head_dim > 128) return 192;
  return a.head_dim > 64 || a.value_size() > 64 ? 128 : 64;
}
// Query heads of a group whose gradients of keys and values a block computes. One: most blocks, of
// which those with the first keys see all queries. Where windows and documents make blocks short
// and alike there are more, as long as there are blocks enough.
int32_t sm90_heads_each(const AttentionShape& shape);
// These parts of the heads are summed then.
inline bool sm90_sums_parts(const AttentionShape& shape) {
  const AttentionAttributes& a = shape.attributes;
  return shape.wide_key_gradients || a.heads != a.groups * sm90_heads_each(shape);
}
// Where the parts of its scratch memory begin, in bytes: two numbers for each row of queries, sums
// of their gradients in fp32, turns, gradients of keys and values of parts of the heads in bf16.
struct Sm90Scratch {
  uint64_t lse = 0;
  uint64_t dots = 0;
  uint64_t d_q = 0;
  uint64_t turns = 0;
  uint64_t head_gradients = 0;
  uint64_t end = 0;
};
Sm90Scratch sm90_gradient_scratch(const AttentionShape& shape);

// cuDNN's backward pass works on pieces: whole groups of heads, of some sequences; and some
// queries, with the last `keys` keys that they see.
struct AttentionPiece {
  int64_t batch = 1;
  int64_t groups = 1;
  int64_t queries = 1;
  int64_t keys = 1;
};

inline constexpr uint64_t kAttentionPieceBytes = uint64_t{2304} << 20;
inline constexpr uint64_t kCudnnAlignment = 256;                    // the arena promises less
inline constexpr uint64_t kCudnnForwardBytes = uint64_t{64} << 10;  // cuDNN 9.19 needs 256

inline uint64_t align_for_cudnn(uint64_t bytes) {
  return (bytes + kCudnnAlignment - 1) / kCudnnAlignment * kCudnnAlignment;
}

// cuDNN 9.19's workspace for the backward pass of a piece, rounded up a little: the gradients of
// scores in bf16, in whole tiles; D in fp32; with several heads to a group, the gradients of keys
// and values of each head in bf16.
uint64_t cudnn_gradient_workspace(const AttentionShape& shape, const AttentionPiece& piece);

// The largest piece of the backward pass that keeps to kAttentionPieceBytes, or the smallest there
// is. Its keys are the most that a chunk of any rank sees: all ranks plan the same memory.
AttentionPiece gradient_piece(const AttentionShape& shape);

// A piece has whole chunks of queries, and no other piece sees its keys.
bool sees_keys_alone(const AttentionShape& shape, const AttentionPiece& piece);

// Gradients of the keys and values of a piece, in elements.
uint64_t key_part_elements(const AttentionShape& shape, const AttentionPiece& piece);

}  // namespace troupe
