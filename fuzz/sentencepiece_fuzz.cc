// tokenizer.model of SentencePiece. What is accepted must encode any text and decode its own ids.
#include "base/error.h"
#include "data/make_tokenizer.h"
#include "harness.h"
#include "support/sentencepiece_writer.h"

namespace troupe::fuzz {
namespace {

using testing::byte_pieces;
using testing::first_pieces;
using testing::kControlPiece;
using testing::kUnusedPiece;
using testing::kUserDefinedPiece;
using testing::normalizer_specification;
using testing::one_rule;
using testing::sentencepiece;
using testing::table_of_rules;
using testing::trainer_specification;

// Control pieces written out, spaces at both ends and inside, characters for which there are rules
// (a ligature, half-width kana), a zero byte, and bytes that are no UTF-8.
constexpr char kText[] =
    "  <s>It's 12 o'clock,  na\xc3\xafve\xff \xef\xac\x81\xef\xbd\xb6\xef\xbe\x9e\0 "
    "\xf0\x9f\x98\x80\xe2\x96\x81</s> abab<0x41>\n\xe2\x96";

void check(const Tokenizer& tokenizer, std::string_view text) {
  std::vector<int32_t> ids;
  tokenizer.encode(text, ids);
  for (const int32_t id : ids) {
    if (id < 0 || id >= tokenizer.vocab_size()) report_finding("an id beyond the vocabulary");
  }
  static_cast<void>(tokenizer.decode(ids));
}

}  // namespace

void parse(std::string_view input) {
  const auto tokenizer = make_tokenizer({.type = "SentencePieceTokenizer",
                                         .path = "tokenizer.model",
                                         .contents = std::string(input),
                                         .eod = ""});
  try {
    check(*tokenizer, std::string_view(kText, sizeof(kText)));
    check(*tokenizer, "");
    // Whatever the file holds is a text, too: its pieces among others.
    check(*tokenizer, input.substr(0, 4096));
    std::vector<int32_t> all;
    for (int32_t id = 0; id < tokenizer->vocab_size(); ++id) {
      check(*tokenizer, tokenizer->piece(id));
      all.push_back(id);
    }
    static_cast<void>(tokenizer->decode(all));
  } catch (const UserError& error) {
    report_finding(std::string("an accepted model fails: ") + error.what());
  }
}

// A small model of every kind: real ones are too long to be changed usefully.
std::vector<std::string> seeds() {
  const std::string pieces =
      first_pieces() + sentencepiece("\xe2\x96\x81", -2) + sentencepiece("a", -3) +
      sentencepiece("b", -4) + sentencepiece("ab", -1) + sentencepiece("<s>", 0, kControlPiece) +
      sentencepiece("12", 0, kUserDefinedPiece) + sentencepiece("abab", -5, kUnusedPiece);
  const std::string normalizer = normalizer_specification(table_of_rules(one_rule()));
  std::vector<std::string> models;
  for (const int kind : {1, 2, 3, 4}) {
    models.push_back(pieces + trainer_specification(kind));
    models.push_back(pieces + trainer_specification(kind) + normalizer);
  }
  for (const int kind : {1, 2}) {
    models.push_back(pieces + byte_pieces() + trainer_specification(kind, true) + normalizer);
  }
  return models;
}

}  // namespace troupe::fuzz
