#include "data/sentencepiece_file.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <fmt/format.h>
#include <optional>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "base/text.h"

namespace troupe {
namespace {

// Far beyond what is in use. They bound the memory and time that a file can ask for.
constexpr size_t kMaxPieces = size_t{1} << 22;
constexpr size_t kMaxPieceBytes = 4096;
constexpr size_t kMaxTableBytes = size_t{1} << 24;
constexpr size_t kMaxReplacementBytes = 4096;

// The library collects matches of rules and of user-defined pieces in arrays of these lengths, and
// reads beyond their ends when there are more.
constexpr int kMaxRuleMatches = 32;
constexpr size_t kMaxNestedPieces = 64;

// ---- Protocol Buffers' wire format ----

enum class Wire : uint8_t { varint = 0, fixed64 = 1, bytes = 2, fixed32 = 5 };

struct Field {
  uint64_t number = 0;
  Wire wire = Wire::varint;
  uint64_t value = 0;      // of varint, fixed64, fixed32
  std::string_view bytes;  // of bytes
  std::string_view whole;  // with its tag
};

class MessageReader {
 public:
  MessageReader(std::string_view message, const std::string& where)
      : rest_(message), where_(where) {}

  // The next field, or nothing at the end.
  std::optional<Field> next() {
    if (rest_.empty()) return std::nullopt;
    if (++fields_ > 2 * kMaxPieces) {
      throw_bad_request(
          fmt::format("{}: more than {} fields; no known SentencePiece model has as "
                      "many: name another file",
                      where_, 2 * kMaxPieces));
    }
    const std::string_view begin = rest_;
    const uint64_t tag = varint();
    Field field;
    field.number = tag >> 3;
    if (field.number == 0 || tag > UINT32_MAX) refuse();
    switch (tag & 7) {
      case 0:
        field.value = varint();
        break;
      case 1:
        field.wire = Wire::fixed64;
        std::memcpy(&field.value, take(8).data(), 8);
        break;
      case 2:
        field.wire = Wire::bytes;
        field.bytes = take(varint());
        break;
      case 5:
        field.wire = Wire::fixed32;
        std::memcpy(&field.value, take(4).data(), 4);
        break;
      default:  // groups, which no model has
        refuse();
    }
    field.whole = begin.substr(0, begin.size() - rest_.size());
    return field;
  }

  // A field of a known number must be of its kind.
  void expect(const Field& field, Wire wire) const {
    if (field.wire != wire) refuse();
  }

 private:
  [[noreturn]] void refuse() const {
    throw_failed(
        fmt::format("{}: not a SentencePiece model, or a damaged one: {} bytes before the end of "
                    "the file or of a part of it is no field of a model",
                    where_, rest_.size()));
  }

  uint64_t varint() {
    uint64_t value = 0;
    for (unsigned shift = 0; shift < 64 && !rest_.empty(); shift += 7) {
      const auto byte = static_cast<unsigned char>(rest_.front());
      rest_.remove_prefix(1);
      value |= uint64_t{byte & 0x7fU} << shift;
      if (byte < 0x80) return value;
    }
    refuse();
  }

  std::string_view take(uint64_t size) {
    if (size > rest_.size()) refuse();
    const std::string_view taken = rest_.substr(0, size);
    rest_.remove_prefix(size);
    return taken;
  }

  std::string_view rest_;
  const std::string& where_;
  size_t fields_ = 0;
};

// ---- The parts of a model ----

enum class PieceType : uint8_t { normal = 1, unknown, control, user_defined, unused, byte };
enum class ModelType : uint8_t { unigram = 1, bpe, word, character };

struct Piece {
  std::string_view text;
  size_t id = 0;
  PieceType type = PieceType::normal;
};

// What the checks need of a model's specifications, with the format's defaults.
struct Specification {
  ModelType type = ModelType::unigram;
  bool byte_fallback = false;
  bool space_as_suffix = false;
  bool dummy_prefix = true;
};

std::string describe(const Piece& piece) {
  return fmt::format("piece {} ({})", piece.id, quote_name(piece.text));
}

Piece read_piece(std::string_view message, size_t id, const std::string& path) {
  Piece piece;
  piece.id = id;
  float score = 0;
  MessageReader reader(message, path);
  while (const auto field = reader.next()) {
    if (field->number == 1) {
      reader.expect(*field, Wire::bytes);
      piece.text = field->bytes;
    } else if (field->number == 2) {
      reader.expect(*field, Wire::fixed32);
      const auto bits = static_cast<uint32_t>(field->value);
      std::memcpy(&score, &bits, sizeof(score));
    } else if (field->number == 3) {
      reader.expect(*field, Wire::varint);
      if (field->value < 1 || field->value > 6) {
        throw_failed(fmt::format("{}: piece {} is of the unknown type {}", path, id, field->value));
      }
      piece.type = static_cast<PieceType>(field->value);
    }
  }
  if (piece.text.empty()) throw_failed(fmt::format("{}: piece {} is empty", path, id));
  if (piece.text.size() > kMaxPieceBytes) {
    throw_bad_request(fmt::format("{}: {} has {} bytes; at most {} are supported", path,
                                  describe(piece), piece.text.size(), kMaxPieceBytes));
  }
  if (piece.text.find('\0') != std::string_view::npos) {
    throw_failed(fmt::format("{}: {} holds a zero byte", path, describe(piece)));
  }
  if (!std::isfinite(score)) {
    throw_failed(fmt::format("{}: the score of {} is not finite", path, describe(piece)));
  }
  return piece;
}

void read_trainer(std::string_view message, const std::string& path, Specification& specification) {
  MessageReader reader(message, path);
  while (const auto field = reader.next()) {
    switch (field->number) {
      case 3:
        reader.expect(*field, Wire::varint);
        if (field->value < 1 || field->value > 4) {
          throw_bad_request(
              fmt::format("{}: unknown kind of model {}; unigram (1), BPE (2), word (3) and "
                          "character (4) are supported",
                          path, field->value));
        }
        specification.type = static_cast<ModelType>(field->value);
        break;
      case 24:
        reader.expect(*field, Wire::varint);
        specification.space_as_suffix = field->value != 0;
        break;
      case 35:
        reader.expect(*field, Wire::varint);
        specification.byte_fallback = field->value != 0;
        break;
      default:
        break;
    }
  }
}

// ---- Normalization tables ----

// A table is the size of a trie in bytes, the trie, and the texts that replace what it finds. The
// trie is a double array (Aoe, "An Efficient Digital Search Algorithm by Using a Double-Array
// Structure", 1989): from a base, the byte c leads to the unit at base XOR c if that unit's label
// is c; the unit's offset gives the next base, and if a rule ends there, the place of its text is
// the unit at the next base.
class NormalizationTable {
 public:
  NormalizationTable(std::string_view table, std::string where) : where_(std::move(where)) {
    uint32_t trie_bytes = 0;
    if (table.size() > kMaxTableBytes) {
      throw_bad_request(fmt::format("{} has {} bytes; at most {} are supported", where_,
                                    table.size(), kMaxTableBytes));
    }
    if (table.size() < sizeof(trie_bytes)) refuse("is cut short");
    std::memcpy(&trie_bytes, table.data(), sizeof(trie_bytes));
    table.remove_prefix(sizeof(trie_bytes));
    // The format's only writer extends tries by blocks of 256 units.
    constexpr size_t kBlockBytes = 256 * sizeof(uint32_t);
    if (trie_bytes == 0 || trie_bytes % kBlockBytes != 0 || trie_bytes >= table.size()) {
      refuse("holds no complete trie");
    }
    units_.resize(trie_bytes / sizeof(uint32_t));
    std::memcpy(units_.data(), table.data(), trie_bytes);
    texts_ = table.substr(trie_bytes);
  }

  void check() const {
    check_texts();
    check_places();
    check_matches();
  }

 private:
  [[noreturn]] void refuse(std::string_view what) const {
    throw_failed(fmt::format("{} {}; the file is damaged", where_, what));
  }

  bool is_leaf(size_t at) const { return (units_[at] >> 31) != 0; }
  bool ends_rule(size_t at) const { return ((units_[at] >> 8) & 1) != 0; }
  bool has_label(size_t at, size_t label) const {
    return !is_leaf(at) && (units_[at] & 0xff) == label;
  }
  size_t base_after(size_t at) const {
    const uint32_t unit = units_[at];
    return at ^ (size_t{unit >> 10} << ((unit & (1U << 9)) >> 6));
  }

  void check_texts() const {
    if (texts_.back() != '\0') refuse("ends within a text");
    for (size_t begin = 0; begin < texts_.size();) {
      const size_t end = texts_.find('\0', begin);
      if (end - begin > kMaxReplacementBytes) {
        throw_bad_request(
            fmt::format("{} replaces with a text of {} bytes; at most {} are supported", where_,
                        end - begin, kMaxReplacementBytes));
      }
      begin = end + 1;
    }
  }

  // Wherever a text may lead, it leads inside the trie, and every rule's text is there.
  void check_places() const {
    for (size_t at = 0; at < units_.size(); ++at) {
      if (at != 0 && is_leaf(at)) continue;
      const size_t base = base_after(at);
      if (base >= units_.size()) refuse("leads beyond its trie");
      if (at != 0 && ends_rule(at) && (units_[base] & INT32_MAX) >= texts_.size()) {
        refuse("leads beyond its texts");
      }
    }
  }

  // No text matches more rules at one place than the library takes. Depth first, since a trie that
  // somebody changed may be no tree and may even lead back.
  void check_matches() const {
    constexpr int8_t kUnseen = -1;
    constexpr int8_t kOpen = -2;
    std::vector<int8_t> matches(units_.size(), kUnseen);  // by base: the most that may follow
    struct Visit {
      size_t base;
      size_t label;
      int8_t most;
    };
    std::vector<Visit> path = {{base_after(0), 0, 0}};
    matches[path.back().base] = kOpen;
    while (!path.empty()) {
      Visit& visit = path.back();
      if (visit.label == 256) {
        matches[visit.base] = visit.most;
        path.pop_back();
        continue;
      }
      const size_t at = visit.base ^ visit.label;
      if (!has_label(at, visit.label)) {
        ++visit.label;
        continue;
      }
      const size_t next = base_after(at);
      if (matches[next] == kOpen) refuse("leads in a circle");
      if (matches[next] == kUnseen) {
        matches[next] = kOpen;
        path.push_back({next, 0, 0});
        continue;
      }
      const int following = matches[next] + (ends_rule(at) ? 1 : 0);
      if (following > kMaxRuleMatches) {
        throw_bad_request(
            fmt::format("{} has more than {} rules for beginnings of the same text, more than "
                        "SentencePiece can apply",
                        where_, kMaxRuleMatches));
      }
      visit.most = std::max(visit.most, static_cast<int8_t>(following));
      ++visit.label;
    }
  }

  std::string where_;
  std::vector<uint32_t> units_;
  std::string_view texts_;
};

void read_normalizer(std::string_view message, const std::string& path, std::string_view name,
                     bool& dummy_prefix) {
  MessageReader reader(message, path);
  while (const auto field = reader.next()) {
    if (field->number == 2) {
      reader.expect(*field, Wire::bytes);
      if (field->bytes.empty()) continue;
      NormalizationTable(field->bytes, fmt::format("{}: the table of {} rules", path, name))
          .check();
    } else if (field->number == 3) {
      reader.expect(*field, Wire::varint);
      dummy_prefix = field->value != 0;
    }
  }
}

// ---- Pieces together ----

// "<0x00>" to "<0xFF>".
bool is_byte_piece(std::string_view text) {
  const auto is_digit = [](char c) { return (c >= '0' && c <= '9') || (c >= 'A' && c <= 'F'); };
  return text.size() == 6 && text.substr(0, 3) == "<0x" && is_digit(text[3]) && is_digit(text[4]) &&
         text[5] == '>';
}

// Whether the library may find this text as one symbol: at most as many bytes as the first one
// announces.
bool is_one_symbol(std::string_view text) {
  const auto lead = static_cast<unsigned char>(text.front());
  size_t size = 1;
  if (lead >= 0xf0) {
    size = 4;
  } else if (lead >= 0xe0) {
    size = 3;
  } else if (lead >= 0xc0) {
    size = 2;
  }
  return text.size() <= size;
}

// The library looks texts up among the control pieces, too, and then fails: they stand for no text.
void check_control_piece(const Piece& piece, const Specification& specification,
                         const std::string& path) {
  bool found_in_text = false;
  switch (specification.type) {
    case ModelType::unigram:
      break;
    case ModelType::bpe:
    case ModelType::character:
      found_in_text = is_one_symbol(piece.text);
      break;
    case ModelType::word:  // every word begins with a space, if the text does
      found_in_text = !specification.dummy_prefix || specification.space_as_suffix ||
                      piece.text.substr(0, kSpaceSymbol.size()) == kSpaceSymbol ||
                      piece.text.front() == ' ';
      break;
  }
  if (found_in_text) {
    throw_bad_request(
        fmt::format("{}: the control {} may occur in a text, which SentencePiece could not encode; "
                    "use another tokenizer",
                    path, describe(piece)));
  }
}

void check_pieces(std::vector<Piece>& pieces, const Specification& specification,
                  const std::string& path) {
  std::array<size_t, 7> count{};
  for (const Piece& piece : pieces) {
    ++count[static_cast<size_t>(piece.type)];
    if (piece.type == PieceType::control) check_control_piece(piece, specification, path);
    if (piece.type == PieceType::byte && !is_byte_piece(piece.text)) {
      throw_failed(fmt::format("{}: {} is marked as a byte, but is not written as one (<0x41>)",
                               path, describe(piece)));
    }
  }
  const auto count_of = [&](PieceType type) { return count[static_cast<size_t>(type)]; };
  if (count_of(PieceType::unknown) != 1) {
    throw_failed(fmt::format("{}: {} pieces stand for unknown text; there must be one", path,
                             count_of(PieceType::unknown)));
  }

  std::sort(pieces.begin(), pieces.end(),
            [](const Piece& a, const Piece& b) { return a.text < b.text; });
  for (size_t i = 1; i < pieces.size(); ++i) {
    if (pieces[i].text == pieces[i - 1].text) {
      throw_failed(fmt::format(
          "{}: the pieces {} and {} are both {}", path, std::min(pieces[i].id, pieces[i - 1].id),
          std::max(pieces[i].id, pieces[i - 1].id), quote_name(pieces[i].text)));
    }
  }
  // All different by now.
  const size_t bytes = specification.byte_fallback ? 256 : 0;
  if (count_of(PieceType::byte) != bytes) {
    throw_failed(fmt::format("{}: the model has {} pieces for bytes, and needs {}", path,
                             count_of(PieceType::byte), bytes));
  }

  std::vector<std::string_view> nested;  // each begins the next
  for (const Piece& piece : pieces) {
    if (piece.type != PieceType::user_defined) continue;
    while (!nested.empty() && piece.text.substr(0, nested.back().size()) != nested.back()) {
      nested.pop_back();
    }
    nested.push_back(piece.text);
    if (nested.size() > kMaxNestedPieces) {
      throw_bad_request(
          fmt::format("{}: more than {} user-defined pieces begin one another up to {}, more than "
                      "SentencePiece can tell apart",
                      path, kMaxNestedPieces, describe(piece)));
    }
  }
}

}  // namespace

std::string checked_sentencepiece_model(const TokenizerModel& model) {
  const std::string& path = model.path;
  std::string accepted;
  accepted.reserve(model.contents.size());
  std::vector<Piece> pieces;
  Specification specification;
  bool unused_prefix = false;  // decoding needs none
  std::array<bool, 6> seen{};
  MessageReader reader(model.contents, path);
  while (const auto field = reader.next()) {
    if (field->number <= 5) reader.expect(*field, Wire::bytes);
    if (field->number >= 2 && field->number <= 5) {
      if (seen[field->number]) {
        throw_failed(
            fmt::format("{}: not a SentencePiece model, or a damaged one: part {} is "
                        "there twice",
                        path, field->number));
      }
      seen[field->number] = true;
    }
    switch (field->number) {
      case 1:
        if (pieces.size() == kMaxPieces) {
          throw_bad_request(
              fmt::format("{}: more than {} pieces are not supported", path, kMaxPieces));
        }
        pieces.push_back(read_piece(field->bytes, pieces.size(), path));
        break;
      case 2:
        read_trainer(field->bytes, path, specification);
        break;
      case 3:
        read_normalizer(field->bytes, path, "normalization", specification.dummy_prefix);
        break;
      case 4:  // the samples
        continue;
      case 5:
        read_normalizer(field->bytes, path, "denormalization", unused_prefix);
        break;
      default:
        break;
    }
    accepted.append(field->whole);
  }
  if (pieces.empty()) {
    throw_failed(fmt::format("{}: not a SentencePiece model: it has no pieces", path));
  }
  check_pieces(pieces, specification, path);
  return accepted;
}

}  // namespace troupe
