// Small models that are right and wrong, against what the SentencePiece library would do with them.
#include <gtest/gtest.h>
#include <limits>

#include "data/data_test_support.h"
#include "data/make_tokenizer.h"
#include "support/sentencepiece_writer.h"

namespace troupe {
namespace {

using testing::byte_pieces;
using testing::bytes_field;
using testing::first_pieces;
using testing::kBytePiece;
using testing::kControlPiece;
using testing::kUnknownPiece;
using testing::kUserDefinedPiece;
using testing::no_rules;
using testing::normalizer_specification;
using testing::one_rule;
using testing::sentencepiece;
using testing::table_of_rules;
using testing::trainer_specification;
using testing::varint_field;

constexpr int kUnigram = 1;
constexpr int kBpe = 2;
constexpr int kWord = 3;
constexpr int kCharacter = 4;

std::unique_ptr<Tokenizer> tokenizer_of(const std::string& contents) {
  return make_tokenizer(
      {.type = "SentencePieceTokenizer", .path = "p", .contents = contents, .eod = ""});
}

std::vector<int32_t> ids_of(const std::string& contents, const std::string& text) {
  std::vector<int32_t> ids;
  tokenizer_of(contents)->encode(text, ids);
  return ids;
}

void expect_refused(ExitStatus status, const std::string& contents, const std::string& part) {
  const std::string message = message_of(status, [&] { tokenizer_of(contents); });
  EXPECT_EQ(message.substr(0, 3), "p: ") << message;
  EXPECT_TRUE(contains(message, part)) << message;
}

// Ids: 0 unknown, 1 end, 2 to 5.
std::string pieces() {
  return first_pieces() + sentencepiece("\xe2\x96\x81", -2) + sentencepiece("f", -3) +
         sentencepiece("i", -4) + sentencepiece("fi", -1);
}

TEST(SentencePieceModel, AllKindsEncode) {
  using Ids = std::vector<int32_t>;
  EXPECT_EQ(ids_of(pieces(), "fif"), Ids({2, 5, 3}));
  EXPECT_EQ(ids_of(pieces() + trainer_specification(kBpe), "fif"), Ids({2, 5, 3}));
  EXPECT_EQ(ids_of(pieces() +
                       sentencepiece("\xe2\x96\x81"
                                     "fi") +
                       trainer_specification(kWord),
                   "fi fif"),
            Ids({6, 0}));
  EXPECT_EQ(ids_of(pieces() + trainer_specification(kCharacter), "fi"), Ids({2, 3, 4}));
  EXPECT_EQ(ids_of(pieces() + byte_pieces() + trainer_specification(kBpe, true), "fi!"),
            Ids({2, 5, 6 + '!'}));
}

TEST(SentencePieceModel, NormalizesWithItsTable) {
  const std::string normalizer = normalizer_specification(table_of_rules(one_rule()));
  EXPECT_EQ(ids_of(pieces() + normalizer, "\xef\xac\x81"), std::vector<int32_t>({2, 5}));
}

// The library would write the samples that fail to stderr.
TEST(SentencePieceModel, SamplesAreLeftOut) {
  const std::string sample = bytes_field(1, bytes_field(1, "f") + bytes_field(2, "i"));
  EXPECT_EQ(ids_of(pieces() + bytes_field(4, sample), "f"), std::vector<int32_t>({2, 3}));
}

TEST(SentencePieceModel, DamagedFiles) {
  const auto damaged = [](const std::string& contents) {
    expect_refused(ExitStatus::failed, contents, "not a SentencePiece model");
  };
  damaged(pieces().substr(0, 20));
  // Bytes that the field has beyond the end.
  expect_refused(ExitStatus::failed, pieces() + std::string("\x0a\x05xyz", 5),
                 "3 bytes before the end of the file or of a part of it is no field of a model");
  damaged(pieces() + std::string("\x0b\x0c", 2));           // a group
  damaged(pieces() + std::string(10, '\xff'));              // an endless number
  damaged(pieces() + std::string(1, '\0'));                 // field 0
  damaged(pieces() + varint_field(2, 1));                   // a number for a specification
  damaged(pieces() + bytes_field(2, bytes_field(3, "x")));  // a text for the kind of model
  damaged(pieces() + trainer_specification(kBpe) + trainer_specification(kUnigram));
  expect_refused(ExitStatus::bad_request, pieces() + trainer_specification(5),
                 "unknown kind of model 5");
}

TEST(SentencePieceModel, WithoutAnEndOfDocuments) {
  const std::string model = sentencepiece("<unk>", 0, kUnknownPiece) + sentencepiece("a");
  expect_refused(ExitStatus::bad_request, model, "the model has no eos piece");
  expect_refused(ExitStatus::failed, trainer_specification(kBpe), "it has no pieces");
}

// Fields of numbers that no known model has are passed over, of whatever kind.
TEST(SentencePieceModel, UnknownFieldsAreLeftOut) {
  const std::string fixed64 = std::string("\x31") + "12345678";  // field 6
  const std::string fixed32 = std::string("\x3d") + "1234";      // field 7
  EXPECT_EQ(ids_of(pieces() + fixed64 + fixed32 + varint_field(8, 1) + bytes_field(9, "x"), "fif"),
            (std::vector<int32_t>{2, 5, 3}));
  expect_refused(ExitStatus::failed, pieces() + fixed64.substr(0, 8), "is no field of a model");
}

TEST(SentencePieceModel, TheSpaceMayFollowItsWord) {
  const std::string suffix = bytes_field(2, varint_field(24, 1) + varint_field(3, kUnigram));
  EXPECT_EQ(ids_of(pieces() + suffix, "fi f"), (std::vector<int32_t>{5, 2, 3, 2}));
  EXPECT_EQ(ids_of(pieces(), "fi f"), (std::vector<int32_t>{2, 5, 2, 3}));
  // With words as pieces, a control piece that looks like a word of the text is found there.
  const auto words = [](int space_is_last) {
    return pieces() + bytes_field(2, varint_field(24, static_cast<uint64_t>(space_is_last)) +
                                         varint_field(3, kWord));
  };
  const std::string last = sentencepiece("x\xe2\x96\x81", 0, kControlPiece);
  expect_refused(ExitStatus::bad_request, words(1) + last, "may occur in a text");
}

TEST(SentencePieceModel, ATableHasALargestSize) {
  expect_refused(ExitStatus::bad_request,
                 pieces() + normalizer_specification(std::string((1U << 24) + 1, 'x')),
                 "has 16777217 bytes; at most 16777216 are supported");
  expect_refused(ExitStatus::failed,
                 pieces() + normalizer_specification(std::string(1U << 24, 'x')),
                 "holds no complete trie");
}

TEST(SentencePieceModel, WrongPieces) {
  const auto wrong = [](const std::string& contents, const std::string& part) {
    expect_refused(ExitStatus::failed, contents, part);
  };
  wrong(pieces() + sentencepiece(""), "piece 6 is empty");
  wrong(pieces() + sentencepiece(std::string("a\0b", 3)), "piece 6 (\"a?b\") holds a zero byte");
  wrong(pieces() + sentencepiece("a", std::numeric_limits<float>::quiet_NaN()),
        "the score of piece 6 (\"a\") is not finite");
  wrong(pieces() + sentencepiece("a", 0, 7), "piece 6 is of the unknown type 7");
  wrong(pieces() + sentencepiece("fi"), "the pieces 5 and 6 are both \"fi\"");
  wrong(pieces() + sentencepiece("zz") + sentencepiece("fi"), "the pieces 5 and 7 are both \"fi\"");
  for (const int count : {2, 20, 200, 3000}) {  // however many are the same
    std::string many;
    for (int i = 0; i < count; ++i) many += sentencepiece("!");
    wrong(pieces() + many, "are both \"!\"");
  }
  // The library keeps control pieces apart from others, so that this one would be found in texts.
  wrong(pieces() + sentencepiece("fi", 0, kControlPiece), "the pieces 5 and 6 are both \"fi\"");
  wrong(pieces() + sentencepiece("<unk2>", 0, kUnknownPiece), "2 pieces stand for unknown text");
  wrong(sentencepiece("</s>", 0, kControlPiece) + sentencepiece("a"),
        "0 pieces stand for unknown text");
  for (const std::string text : {"<0x4g>", "<0xG4>", "<0x/4>", "<0x4:>", "<0x@4>", "<0x4a>",
                                 "<1x41>", "<0x41]", "<0x41>>", "<0x4>"}) {
    wrong(pieces() + sentencepiece(text, 0, kBytePiece),
          "piece 6 (\"" + text + "\") is marked as a byte, but is not written as one (<0x41>)");
  }
  wrong(pieces() + byte_pieces(), "has 256 pieces for bytes, and needs 0");
  wrong(pieces() + sentencepiece("<0x41>", 0, kBytePiece) + trainer_specification(kBpe, true),
        "has 1 pieces for bytes, and needs 256");
  expect_refused(ExitStatus::bad_request, pieces() + sentencepiece(std::string(4097, 'x')),
                 "has 4097 bytes; at most 4096");
  EXPECT_EQ(ids_of(pieces() + sentencepiece(std::string(4096, 'x')), "f"),
            std::vector<int32_t>({2, 3}));
}

// What the library finds in a text, it looks up among the control pieces, too, and then fails.
TEST(SentencePieceModel, ControlPiecesThatTextsHold) {
  const auto found = [](const std::string& contents, const std::string& piece) {
    expect_refused(ExitStatus::bad_request, contents,
                   "the control " + piece + " may occur in a text");
  };
  const std::string newline = pieces() + sentencepiece("\n", 0, kControlPiece);
  EXPECT_EQ(ids_of(newline, "f\nf"), std::vector<int32_t>({2, 3, 0, 3}));
  found(newline + trainer_specification(kBpe), "piece 6 (\"?\")");
  found(newline + trainer_specification(kCharacter), "piece 6 (\"?\")");
  found(pieces() + sentencepiece("\xe2\x96\x81x", 0, kControlPiece) + trainer_specification(kWord),
        "piece 6 (\"\xe2\x96\x81x\")");
  const std::string no_prefix = bytes_field(3, varint_field(3, 0));
  found(pieces() + trainer_specification(kWord) + no_prefix, "piece 1 (\"</s>\")");
}

// One symbol has as many bytes as its first one says.
TEST(SentencePieceModel, ControlPiecesOfOneSymbol) {
  for (const std::string symbol :
       {"z", "\xc2\x80", "\xdf\xbf", "\xe0\xa0\x80", "\xef\xbf\xbc", "\xf0\x90\x80\x80"}) {
    const auto with = [](const std::string& piece) {
      return pieces() + sentencepiece(piece, 0, kControlPiece) + trainer_specification(kBpe);
    };
    expect_refused(ExitStatus::bad_request, with(symbol), "the control piece 6 (");
    EXPECT_EQ(ids_of(with(symbol + "z"), "f").back(), 3) << symbol;
  }
}

// The library keeps at most 64 matches, and reads what lies after them when there are more.
TEST(SentencePieceModel, NestedUserDefinedPieces) {
  std::string nested = pieces();
  for (size_t length = 1; length <= 64; ++length) {
    nested += sentencepiece(std::string(length, 'x'), 0, kUserDefinedPiece);
  }
  EXPECT_EQ(ids_of(nested, std::string(64, 'x')), std::vector<int32_t>({2, 69}));
  expect_refused(ExitStatus::bad_request,
                 nested + sentencepiece(std::string(65, 'x'), 0, kUserDefinedPiece),
                 "more than 64 user-defined pieces begin one another up to piece 70");
}

// The library follows a table wherever it leads.
TEST(SentencePieceModel, DamagedTables) {
  const auto refused = [](const std::string& table, const std::string& part,
                          ExitStatus status = ExitStatus::failed) {
    expect_refused(status, pieces() + normalizer_specification(table),
                   "the table of normalization rules " + part);
    expect_refused(status, pieces() + bytes_field(5, bytes_field(2, table)),
                   "the table of denormalization rules " + part);
  };
  const std::string table = table_of_rules(one_rule());
  refused(table.substr(0, 3), "is cut short");
  refused(table.substr(0, 1028), "holds no complete trie");
  refused(table_of_rules(one_rule(), "fi"), "ends within a text");
  refused(table_of_rules(one_rule(), std::string(4097, 'x') + '\0'),
          "replaces with a text of 4097 bytes", ExitStatus::bad_request);
  const std::string longest = std::string(4096, 'x') + '\0';
  refused(table_of_rules(one_rule(), longest + "x" + longest), "replaces with a text of 4097 bytes",
          ExitStatus::bad_request);
  EXPECT_EQ(
      ids_of(pieces() + normalizer_specification(table_of_rules(one_rule(), longest + longest)),
             "f"),
      std::vector<int32_t>({2, 3}));

  auto units = one_rule();
  units[3] = 512U << 10;
  refused(table_of_rules(units), "leads beyond its trie");
  units = one_rule();
  units[4] |= 3;
  refused(table_of_rules(units), "leads beyond its texts");
  units = one_rule();
  units[2 ^ 0xac] = 0xac | (uint32_t{2 ^ 0xac ^ 1} << 10);  // back to the first base
  refused(table_of_rules(units), "leads in a circle");

  // "x", "xx", ... from base 128 + i to 128 + i + 1, each of them a rule.
  const auto chain = [](uint32_t length) {
    std::array<uint32_t, 256> nested = no_rules();
    nested[0] = 128U << 10;
    for (uint32_t i = 0; i < length; ++i) {
      const uint32_t at = (128 + i) ^ 'x';
      nested[at] = 'x' | (1U << 8) | ((at ^ (129 + i)) << 10);
    }
    return table_of_rules(nested);
  };
  EXPECT_EQ(ids_of(pieces() + normalizer_specification(chain(32)), std::string(32, 'x')),
            std::vector<int32_t>({2, 5}));
  refused(chain(33), "has more than 32 rules", ExitStatus::bad_request);
}

}  // namespace
}  // namespace troupe
