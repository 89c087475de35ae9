// SentencePiece models (`tokenizer.model`): unigram, BPE, word and character, through the
// SentencePiece library. Normalization, byte fallback and the space before a text are as the model
// says. The document's end is the model's eos piece.
#pragma once

#include <memory>
#include <string_view>

#include "data/tokenizer.h"

namespace troupe {

inline constexpr std::string_view kSentencePieceTokenizer = "SentencePieceTokenizer";
// Megatron's name for the one of Llama 2: the same ids.
inline constexpr std::string_view kLlama2Tokenizer = "Llama2Tokenizer";
inline constexpr std::string_view kGptSentencePieceTokenizer = "GPTSentencePieceTokenizer";

// A file that is no SentencePiece model is `failed`, one without an eos piece a bad request.
std::unique_ptr<Tokenizer> make_sentencepiece_tokenizer(const TokenizerModel& model);

}  // namespace troupe
