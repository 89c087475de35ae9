// Attention on a GPU, whichever operation it is of: where the rows of a call lie. Which kernel
// computes it, attention_cuda.h decides. This header itself needs no CUDA.
//
// Queries are some rows of every sequence: those of all positions, or a rank's chunks of them
// (program/row_origin.h). Keys and values are the rows of all positions, in their order. So each
// chunk of queries attends to the keys before it, with the softmax over all of them at once.
//
// Any thread that launches kernels. Kernels throw UserError as others do.
#pragma once

#include <cstdint>

#include "base/dtype.h"
#include "ops/attention/attention/attention.h"
#include "program/cuda_kernel.h"
#include "program/row_origin.h"

namespace troupe {

enum class AttentionVariant : uint8_t {
  cudnn,  // attention_cudnn.h
  sm90,   // our own kernels for Hopper's tensor cores (attention_sm90.h)
  tiles,  // ordinary arithmetic for any type and head of at most 256 elements (attention_cuda.cu)
};

struct AttentionShape {
  AttentionAttributes attributes;  // its sequence: the rows of queries in each sequence
  SequenceChunks chunks = {};      // which positions these have
  DType dtype = DType::f32;
  bool documents = false;  // sequences hold several
  // The gradients of keys and values are left in the accumulation type, for the caller to sum.
  bool wide_key_gradients = false;

  int64_t rows() const { return attributes.sequence; }
  int64_t positions() const { return rows() * chunks.ranks; }
  // Queries of a chunk, whose positions follow each other. A sequence's rows are one chunk or two.
  int64_t chunk() const { return chunks.ranks == 1 ? rows() : rows() / 2; }
  // Of row `row` of a sequence.
  int64_t position(int64_t row) const { return chunks.position(row, rows()); }
};

// Rows are consecutive, sequence after sequence; the heads of a row follow each other. Inputs are
// only read.
struct AttentionCall {
  AttentionShape shape;
  int64_t query_stride = 0;       // elements from row to row, of q and d_q
  int64_t key_stride = 0;         // of k, v, d_k and d_v
  void* q = nullptr;              // [B rows, H d]
  void* out = nullptr;            // [B rows, H e]
  void* k = nullptr;              // [B positions, G d]
  void* v = nullptr;              // [B positions, G e]
  void* lse = nullptr;            // [B rows, H]
  const int64_t* step = nullptr;  // of dropout
  // [B rows]: where the document of each query begins; null without documents.
  const int32_t* starts = nullptr;
  const void* sinks = nullptr;  // [H] of the accumulation type; null without sinks
  // Of the gradient, like q, out, k and v. All of d_q, d_k and d_v is written.
  void* d_q = nullptr;
  void* d_out = nullptr;
  void* d_k = nullptr;
  void* d_v = nullptr;
};

// The sinks of an operand's heads; null where the operand is not there.
const void* sinks_of(const CudaTensor& sinks, const AttentionAttributes& attributes);

// Launch the attention of a call, or its gradient; `scratch`: the bytes that attention_cuda.h
// states.
void run_attention(const CudaKernelArguments& args, const AttentionCall& call,
                   AttentionVariant variant, std::byte* scratch);
void run_attention_gradient(const CudaKernelArguments& args, const AttentionCall& call,
                            AttentionVariant variant, std::byte* scratch);

}  // namespace troupe
