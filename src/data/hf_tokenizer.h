// Hugging Face `tokenizer.json` files with byte-level BPE, as of GPT-2, Llama 3, Qwen and DeepSeek.
//
// Encoding gives the ids of the reference implementation (the `tokenizers` library, encode with
// add_special_tokens=False): added tokens are found first, then the text between them is normalized
// (NFC or not at all), cut into words by the pre-tokenizer's patterns, and each word is put
// together from bytes by the merges. The post-processor, truncation and padding are left out: what
// begins and ends a document is the data's matter. docs/data_format.md lists what is supported;
// everything else is refused with its place in the file.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "data/tokenizer.h"

namespace troupe {

inline constexpr std::string_view kHuggingFaceTokenizer = "HuggingFaceTokenizer";

std::unique_ptr<Tokenizer> make_hf_tokenizer(const TokenizerModel& model);

}  // namespace troupe
