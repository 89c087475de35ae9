// Attention in bf16 or f16 through cuDNN's fused kernels. Private to attention_cuda.cu. What it
// takes, and the scratch memory, is in attention_cuda.h.
//
// Probabilities and the gradients of scores are rounded to bf16 where they enter a product, and so
// are the gradients of keys and values of each query head before they are summed over a group.
// Everything else between the operands is in fp32.
//
// Each chunk of queries is a call of its own, with all keys that it sees.
//
// The backward pass is cuDNN's deterministic one, which stores the gradients of all scores that it
// works on. So it works on pieces of at most about kAttentionPieceBytes: some sequences; some
// groups of heads of one sequence; or, of long chunks, a block of queries of one group, with the
// keys that they see. Where several pieces see the same keys, and where the caller asks for wide
// gradients of keys and values, these are summed in fp32. Smaller pieces are slower: they fill the
// GPU less well.
//
// Plans are built at the first run of a shape and kept in the CudaContext: that takes up to a
// second for each kind, and must not happen while a graph is captured. Kernels throw UserError when
// cuDNN cannot do what is asked, or needs more scratch memory than attention_cuda.h says.
#pragma once

#include "ops/attention/attention/cuda/attention_call.h"

namespace troupe {

void cudnn_attention(const CudaKernelArguments& args, const AttentionCall& call,
                     std::byte* scratch);
void cudnn_attention_gradient(const CudaKernelArguments& args, const AttentionCall& call,
                              std::byte* scratch);

}  // namespace troupe
