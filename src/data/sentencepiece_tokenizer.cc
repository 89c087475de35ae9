#include "data/sentencepiece_tokenizer.h"

#include <fmt/format.h>
#include <sentencepiece_processor.h>

#include "base/error.h"
#include "base/text.h"
#include "data/sentencepiece_file.h"
#include "data/utf8.h"

namespace troupe {
namespace {

constexpr std::string_view kUnknownText = " \xe2\x81\x87 ";  // U+2047, as the library writes it

std::string with_spaces(const std::string& piece) {
  std::string text;
  size_t at = 0;
  for (size_t found = 0; (found = piece.find(kSpaceSymbol, at)) != std::string::npos;
       at = found + kSpaceSymbol.size()) {
    text.append(piece, at, found - at).push_back(' ');
  }
  return text.append(piece, at);
}

class SentencePieceTokenizer final : public Tokenizer {
 public:
  explicit SentencePieceTokenizer(const TokenizerModel& model) {
    const std::string checked = checked_sentencepiece_model(model);
    const auto status = processor_.LoadFromSerializedProto({checked.data(), checked.size()});
    if (!status.ok()) {
      throw_failed(fmt::format("{}: not a SentencePiece model: {}", model.path,
                               printable(status.message(), kLongestComplaint)));
    }
    eod_ = processor_.eos_id();
    if (eod_ < 0 || eod_ >= vocab_size()) {
      throw_bad_request(
          fmt::format("{}: the model has no eos piece, which must end each document; train it with "
                      "--eos_id, or use another tokenizer",
                      model.path));
    }
    pieces_.reserve(static_cast<size_t>(vocab_size()));
    for (int32_t id = 0; id < vocab_size(); ++id) pieces_.push_back(text_of(id));
  }

  std::string_view name() const override { return kSentencePieceTokenizer; }
  int32_t vocab_size() const override { return processor_.GetPieceSize(); }
  int32_t eod() const override { return eod_; }
  int32_t pad() const override { return processor_.pad_id() == eod_ ? -1 : processor_.pad_id(); }

  void encode(std::string_view text, std::vector<int32_t>& ids) const override {
    std::string storage;
    const std::string_view valid = replace_invalid_utf8(text, storage);
    if (valid.size() > INT32_MAX) {
      throw_failed(fmt::format("a document of {} bytes is too long for SentencePiece; split it",
                               valid.size()));
    }
    std::vector<int> pieces;
    const auto status = processor_.Encode({valid.data(), valid.size()}, &pieces);
    if (!status.ok()) throw_failed(fmt::format("SentencePiece: {}", status.message()));
    ids.insert(ids.end(), pieces.begin(), pieces.end());
  }

  std::string decode(std::span<const int32_t> ids) const override {
    for (const int32_t id : ids) piece(id);  // refuses what is not in the vocabulary
    std::string text;
    const auto status = processor_.Decode(std::vector<int>(ids.begin(), ids.end()), &text);
    if (!status.ok()) throw_failed(fmt::format("SentencePiece: {}", status.message()));
    return text;
  }

 private:
  std::string_view known_piece(int32_t id) const override {
    return pieces_[static_cast<size_t>(id)];
  }

  std::string text_of(int32_t id) const {
    const std::string& piece = processor_.IdToPiece(id);
    if (processor_.IsControl(id) || processor_.IsUnused(id)) return {};
    if (processor_.IsUnknown(id)) return std::string(kUnknownText);
    if (processor_.IsByte(id)) {  // "<0x41>"
      return {static_cast<char>(std::stoi(piece.substr(3, 2), nullptr, 16))};
    }
    return with_spaces(piece);
  }

  sentencepiece::SentencePieceProcessor processor_;
  int32_t eod_ = 0;
  std::vector<std::string> pieces_;  // as text, by id
};

}  // namespace

std::unique_ptr<Tokenizer> make_sentencepiece_tokenizer(const TokenizerModel& model) {
  return std::make_unique<SentencePieceTokenizer>(model);
}

}  // namespace troupe
