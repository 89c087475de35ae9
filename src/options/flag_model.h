// The model of a command line without --model: Megatron's defaults, and what follows from the flags
// that describe a shape. Its vocabulary is the tokenizer's.
//
// Reads the tokenizer's file; otherwise pure functions. Any thread. Errors are UserErrors that name
// the flag or the file.
#pragma once

#include "model/model_config.h"
#include "options/options.h"

namespace troupe {

// Megatron's defaults: LayerNorm, biases, gelu, tied embeddings, dropout 0.1, as many key-value
// heads as query heads, an inner size of 4 x hidden (SwiGLU: 8/3 x hidden, in whole 64s), every
// layer with experts if there are any, each as wide as --ffn-hidden-size. Positions are rotary,
// which is not Megatron's default. What other flags say is left to the caller (load_model_config);
// the result is not validated. A missing size that nothing implies is a bad request.
ModelConfig model_of_flags(const Options& options);

// The least multiple of `multiple` that holds `vocabulary` ids.
int32_t rounded_vocabulary(int32_t vocabulary, int32_t multiple);

}  // namespace troupe
