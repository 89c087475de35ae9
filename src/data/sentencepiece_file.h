// Checks a SentencePiece model file before the library sees it: the library trusts the file, reads
// beyond the ends of a broken normalization table, and cannot encode every text with every model
// that it loads. Functions of their arguments alone, from any thread.
#pragma once

#include <string>
#include <string_view>

#include "data/tokenizer.h"

namespace troupe {

// What stands for a space in pieces: U+2581.
inline constexpr std::string_view kSpaceSymbol = "\xe2\x96\x81";

// The file's ModelProto (a message of Protocol Buffers), as it may be given to the library: with it
// any text can be encoded, and any ids decoded. Samples for a test of the library that the file may
// hold are left out: the library would write those that fail to stderr, as they stand.
//
// What is wrong inside the file is `failed`; a model that is right but cannot encode every text, or
// is larger than any that is known, is a bad request. Both name the file and the piece or the
// table.
std::string checked_sentencepiece_model(const TokenizerModel& model);

}  // namespace troupe
