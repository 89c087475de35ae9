// Attention in bf16 on Hopper with tensor cores (wgmma) fed by TMA, for sequences of several
// documents, which cuDNN does not take, and for gradients, which it is slow at where they must have
// the same bits each time. Private to attention_cuda.cu. What they take, and the scratch memory, is
// in attention_cuda.h.
//
// Scores are masked by position, so documents and windows cost what they see: tiles of queries and
// keys that do not see each other are not loaded. Probabilities and the gradients of scores are
// rounded to bf16 where they enter a product, and so are the gradients of keys and values of each
// query head before they are summed over a group. Everything else between the operands is in fp32;
// with heads of more than 128 elements the rounded probabilities also go into the gradients of
// scores. Every sum has a fixed order: the same operands give the same bits.
#pragma once

#include "ops/attention/attention/cuda/attention_call.h"

namespace troupe {

void sm90_attention(const CudaKernelArguments& args, const AttentionCall& call);
void sm90_attention_gradient(const CudaKernelArguments& args, const AttentionCall& call,
                             std::byte* scratch);

}  // namespace troupe
