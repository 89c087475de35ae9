// Attention in bf16 through cuDNN's fused kernels. Private to attention_cuda.cu.
//
// Probabilities and the gradients of scores are rounded to bf16 where they enter a product, and so
// are the gradients of keys and values of each query head before they are summed over a group.
// Everything else between the operands is in fp32.
//
// The backward pass is cuDNN's deterministic one, which stores the gradients of all scores: 2 S^2
// bytes for each head. So it works on some heads of a sequence at a time, as many as fit into
// kAttentionPieceBytes and at least one group; the results do not depend on how many.
//
// Plans are built at the first run of a shape and kept in the CudaContext: that takes about a
// second, and must not happen while a graph is captured. Kernels throw UserError when cuDNN cannot
// do what is asked, or wants more scratch memory than these functions say.
#pragma once

#include <cstdint>

#include "ops/attention/attention.h"

namespace troupe {

inline constexpr uint64_t kAttentionPieceBytes = uint64_t{768} << 20;

// Bf16 without dropout, heads of up to 256 elements that are whole multiples of 16 bytes, and
// sequences of which a group's scores fit into a few GiB.
bool cudnn_takes_attention(const AttentionAttributes& a, DType dtype);

uint64_t cudnn_attention_scratch_bytes(const AttentionAttributes& a);
uint64_t cudnn_attention_gradient_scratch_bytes(const AttentionAttributes& a);

void cudnn_attention(const CudaKernelArguments& args);
void cudnn_attention_gradient(const CudaKernelArguments& args);

}  // namespace troupe
