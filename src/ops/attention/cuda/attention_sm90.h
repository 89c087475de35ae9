// Attention in bf16 on Hopper with tensor cores (wgmma) fed by TMA, for sequences of several
// documents, which cuDNN does not take, and for short windows, whose gradients it is slow at.
// Private to attention_cuda.cu.
//
// Scores are masked by position, so documents and windows cost what they see: tiles of queries and
// keys that do not see each other are not loaded. Probabilities and the gradients of scores are
// rounded to bf16 where they enter a product; everything else between the operands is in fp32.
// Every sum is made by one warpgroup in a fixed order: the same operands give the same bits.
#pragma once

#include <cstdint>

#include "ops/attention/cuda/attention_call.h"

namespace troupe {

// Bf16 without dropout, heads of 8, 16, ... 128 elements, values of as many, and a GPU of compute
// capability 9.0.
bool sm90_takes_attention(const AttentionShape& shape);

uint64_t sm90_attention_gradient_scratch_bytes(const AttentionShape& shape);

void sm90_attention(const CudaKernelArguments& args, const AttentionCall& call);
void sm90_attention_gradient(const CudaKernelArguments& args, const AttentionCall& call,
                             std::byte* scratch);

}  // namespace troupe
