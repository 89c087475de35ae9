// Makes tokenizers of every type, from files that people name or from what a checkpoint keeps.
//
// Any thread.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "data/tokenizer.h"

namespace troupe {

// Types:
//   byte                    ids 0 to 255 are the bytes, 256 is the end of a document; no file.
//   HuggingFaceTokenizer    a tokenizer.json: byte-level BPE (data/hf_tokenizer.h). The token that
//                           ends a document is the eos_token of the tokenizer_config.json beside
//                           it, if there is one, and that of padding its pad_token.
//   SentencePieceTokenizer  a tokenizer.model of SentencePiece; padding is its pad piece.
//   Llama2Tokenizer, GPTSentencePieceTokenizer
//                           other names for it, which the result does not keep.
//   GPT2BPETokenizer        vocab.json and merges.txt, each given as a detail, or in the folder
//                           `path`; the result is a HuggingFaceTokenizer.
//   TikTokenizer            tiktoken's list of tokens (data/megatron_tokenizers.h); the result is a
//                           HuggingFaceTokenizer.
//   NullTokenizer           ids in decimal; needs details.vocab_size, and has no use for a path, as
//                           in Megatron.
// `path` is the file, or a folder that holds it under that name. An unknown type, a missing file,
// or a path that the type has no use for, is a bad request.
TokenizerModel read_tokenizer_model(std::string_view type, const std::string& path,
                                    const TokenizerDetails& details = {});

// What is wrong inside the file is `failed`, what is right but not supported a bad request; both
// name the file and the place.
std::unique_ptr<Tokenizer> make_tokenizer(const TokenizerModel& model);

}  // namespace troupe
