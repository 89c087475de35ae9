#include "data/hf_tokenizer_file.h"

#include <algorithm>
#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "base/error.h"
#include "data/byte_alphabet.h"
#include "data/json_text.h"
#include "data/utf8.h"

namespace troupe {
namespace {

using nlohmann::json;

// The pattern of GPT-2's tokenizer, which ByteLevel uses when the file asks for "use_regex"
// (Radford et al., "Language Models are Unsupervised Multitask Learners", 2019, its code).
constexpr std::string_view kGpt2Pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

// Ids above are a broken file: the vocabulary is kept as a table.
constexpr int64_t kMaxId = (int64_t{1} << 24) - 1;

// Tokens that end a document in the models that are around, for files without
// tokenizer_config.json.
constexpr std::array<std::string_view, 5> kUsualEods = {
    "<|endoftext|>", "<|end_of_text|>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "</s>", "<eos>"};

// Invalid UTF-8 and control characters must not reach a terminal.
std::string in_quotes(std::string_view text) {
  return json(text.substr(0, 100)).dump(-1, ' ', true, json::error_handler_t::replace);
}

// A value and its place in the file.
class Node {
 public:
  Node(const json& value, const std::string& file, std::string where)
      : value_(&value), file_(&file), where_(std::move(where)) {}

  const json& value() const { return *value_; }
  const std::string& where() const { return where_; }
  // For messages: the file and the place.
  std::string place() const { return where_.empty() ? *file_ + ":" : *file_ + ": " + where_; }

  [[noreturn]] void broken(std::string_view what) const {
    throw_failed(fmt::format("{} {}", place(), what));
  }
  [[noreturn]] void unsupported(std::string_view what) const {
    throw_bad_request(fmt::format("{} {}", place(), what));
  }

  // Missing and null are the same in these files.
  bool has(const char* name) const {
    const auto found = value_->find(name);
    return found != value_->end() && !found->is_null();
  }
  Node operator[](const char* name) const {
    const auto found = value_->find(name);
    if (found == value_->end()) broken(fmt::format("has no \"{}\"", name));
    return {*found, *file_, where_.empty() ? name : fmt::format("{}.{}", where_, name)};
  }
  Node operator[](size_t index) const {
    return {(*value_)[index], *file_, fmt::format("{}[{}]", where_, index)};
  }

  const Node& as(json::value_t type, std::string_view name) const {
    if (value_->type() != type) broken(fmt::format("is {}, not {}", value_->type_name(), name));
    return *this;
  }
  const Node& object() const { return as(json::value_t::object, "an object"); }
  const Node& array() const { return as(json::value_t::array, "an array"); }
  const std::string& string() const {
    return as(json::value_t::string, "a string").value_->get_ref<const std::string&>();
  }
  bool boolean() const { return as(json::value_t::boolean, "true or false").value_->get<bool>(); }
  bool flag(const char* name, bool otherwise) const {
    return has(name) ? (*this)[name].boolean() : otherwise;
  }
  int32_t id() const {
    if (!value_->is_number_integer()) broken("is not a whole number");
    const bool fits = value_->is_number_unsigned() ? value_->get<uint64_t>() <= kMaxId : false;
    if (!fits) broken(fmt::format("is {}; ids are from 0 to {}", value_->dump(), kMaxId));
    return value_->get<int32_t>();
  }

 private:
  const json* value_;
  const std::string* file_;
  std::string where_;
};

json parse_document(const std::string& contents, const std::string& path) {
  std::string problem;
  std::optional<json> parsed = parse_json_text(contents, problem);
  if (!parsed) throw_failed(fmt::format("{}: {}", path, problem));
  return std::move(*parsed);
}

class Parser {
 public:
  Parser(const json& root, const std::string& path) : path_(path), root_(root, path, "") {}

  HfTokenizerFile run(const std::string& eod, const std::string& pad) {
    if (!root_.value().is_object()) root_.broken("is not a JSON object");
    model(root_["model"].object());
    if (root_.has("normalizer")) normalizer(root_["normalizer"].object(), 0);
    if (!root_.has("pre_tokenizer")) {
      root_.unsupported("pre_tokenizer is not given; byte-level BPE needs ByteLevel there");
    }
    pre_tokenizer(root_["pre_tokenizer"].object(), /*last=*/true, 0);
    if (root_.has("decoder")) {
      const Node type = root_["decoder"].object()["type"];
      if (type.string() != "ByteLevel")
        type.unsupported("is not ByteLevel, which alone is supported");
    }
    if (root_.has("added_tokens")) added_tokens(root_["added_tokens"].array());
    end_of_document(eod);
    padding(pad);
    return std::move(file_);
  }

 private:
  void model(const Node& node) {
    const Node type = node["type"];
    if (type.string() != "BPE") {
      type.unsupported(fmt::format(
          "is {}; only BPE is supported (for a SentencePiece model, give its tokenizer.model with "
          "--tokenizer-type SentencePieceTokenizer)",
          in_quotes(type.string())));
    }
    for (const char* name : {"continuing_subword_prefix", "end_of_word_suffix"}) {
      if (node.has(name) && !node[name].string().empty()) {
        node[name].unsupported("is not empty, which byte-level BPE does not use");
      }
    }
    if (node.has("dropout") && node["dropout"].value() != 0) {
      node["dropout"].unsupported("makes encoding random, which is not supported; set it to null");
    }
    vocabulary(node["vocab"].object());
    merges(node["merges"].array());
    file_.ignore_merges = node.flag("ignore_merges", false);
  }

  void vocabulary(const Node& node) {
    id_of_.reserve(node.value().size());
    for (const auto& item : node.value().items()) {
      const std::string& token = item.key();
      const nlohmann::json& value = item.value();
      const auto place = [&] {
        return Node(value, path_, fmt::format("{}[{}]", node.where(), in_quotes(token)));
      };
      if (!value.is_number_unsigned() || value.get<uint64_t>() > kMaxId) place().id();
      const auto id = value.get<int32_t>();
      if (static_cast<size_t>(id) >= file_.pieces.size()) {
        file_.pieces.resize(static_cast<size_t>(id) + 1);
        names_.resize(static_cast<size_t>(id) + 1);
      }
      if (names_[static_cast<size_t>(id)] != nullptr) {
        place().broken(fmt::format("has id {}, which {} has too", id,
                                   in_quotes(*names_[static_cast<size_t>(id)])));
      }
      const std::string& name = id_of_.emplace(token, id).first->first;
      names_[static_cast<size_t>(id)] = &name;
      if (auto bytes = alphabet_.bytes_of(name); bytes && !bytes->empty()) {
        file_.pieces[static_cast<size_t>(id)] = std::move(*bytes);
        file_.word_ids.push_back(id);
      } else {
        file_.pieces[static_cast<size_t>(id)] = name;
      }
    }
    for (size_t byte = 0; byte < 256; ++byte) {
      const std::string& character = alphabet_.character(byte);
      const auto found = id_of_.find(character);
      if (found == id_of_.end()) {
        node.unsupported(fmt::format(
            "has no token \"{}\" for the byte 0x{:02x}; only byte-level BPE is supported, which "
            "has "
            "one for each byte (for a SentencePiece model, give its tokenizer.model with "
            "--tokenizer-type SentencePieceTokenizer)",
            character, byte));
      }
      file_.byte_ids[byte] = found->second;
    }
  }

  void merges(const Node& node) {
    const json& list = node.value();
    file_.merges.reserve(list.size());
    std::string joined;
    for (size_t i = 0; i < list.size(); ++i) {
      const json& entry = list[i];
      std::string_view left;
      std::string_view right;
      if (entry.is_string()) {
        const std::string_view text = entry.get_ref<const std::string&>();
        if (text.starts_with("#version")) continue;
        const size_t space = text.find(' ');
        if (space == std::string_view::npos ||
            text.find(' ', space + 1) != std::string_view::npos) {
          node[i].broken(
              fmt::format("is {}, not two tokens with a space between", in_quotes(text)));
        }
        left = text.substr(0, space);
        right = text.substr(space + 1);
      } else if (entry.is_array() && entry.size() == 2 && entry[0].is_string() &&
                 entry[1].is_string()) {
        left = entry[0].get_ref<const std::string&>();
        right = entry[1].get_ref<const std::string&>();
      } else {
        node[i].broken(
            "is not a merge: two tokens in an array, or in a string with a space between");
      }
      joined.assign(left).append(right);
      const auto id = [&](std::string_view token) {
        key_.assign(token);
        const auto found = id_of_.find(key_);
        if (found == id_of_.end()) {
          node[i].broken(fmt::format("names the token {}, which the vocabulary (model.vocab) lacks",
                                     in_quotes(token)));
        }
        return found->second;
      };
      file_.merges.push_back({id(left), id(right), id(joined)});
    }
  }

  static void refuse_depth(const Node& node, int depth) {
    if (depth > 8) node.unsupported("is a sequence in a sequence, more than 8 deep");
  }

  void normalizer(const Node& node, int depth) {
    refuse_depth(node, depth);
    const Node type = node["type"];
    if (type.string() == "NFC") {
      file_.nfc = true;
    } else if (type.string() == "Sequence") {
      const Node list = node["normalizers"].array();
      for (size_t i = 0; i < list.value().size(); ++i) normalizer(list[i].object(), depth + 1);
    } else {
      type.unsupported(
          fmt::format("is {}; only NFC (or none) is supported", in_quotes(type.string())));
    }
  }

  // `last`: nothing comes after it. ByteLevel must be last, and only it can be.
  void pre_tokenizer(const Node& node, bool last, int depth) {
    refuse_depth(node, depth);
    const Node type = node["type"];
    const std::string& name = type.string();
    if (name == "Sequence") {
      const Node list = node["pretokenizers"].array();
      const size_t count = list.value().size();
      if (count == 0) list.unsupported("is empty; ByteLevel must be its last entry");
      for (size_t i = 0; i < count; ++i) {
        pre_tokenizer(list[i].object(), last && i + 1 == count, depth + 1);
      }
      return;
    }
    if ((name == "ByteLevel") != last) {
      type.unsupported(fmt::format("is {}; ByteLevel must be the last pre-tokenizer, and only once",
                                   in_quotes(name)));
    }
    SplitStep step;
    if (name == "ByteLevel") {
      step.prefix_space = node.flag("add_prefix_space", true);
      if (node.flag("use_regex", true)) {
        step.pattern = TextPattern::regex(kGpt2Pattern, node.place());
      }
    } else if (name == "Digits") {
      const bool each = node.flag("individual_digits", false);
      step.pattern = TextPattern::regex(each ? R"(\p{N})" : R"(\p{N}+)", node.place());
    } else if (name == "Split") {
      split(node, step);
    } else {
      type.unsupported(fmt::format("is {}; supported are ByteLevel, Split, Digits and Sequence",
                                   in_quotes(name)));
    }
    file_.steps.push_back(std::move(step));
  }

  static void split(const Node& node, SplitStep& step) {
    const Node pattern = node["pattern"].object();
    if (pattern.has("Regex")) {
      step.pattern = TextPattern::regex(pattern["Regex"].string(), pattern["Regex"].place());
    } else if (pattern.has("String")) {
      const Node text = pattern["String"];
      if (text.string().empty()) text.unsupported("is empty");
      step.pattern = TextPattern::literal(text.string(), text.place());
    } else {
      pattern.unsupported("is neither a Regex nor a String");
    }
    const Node behavior = node["behavior"];
    const bool invert = node.flag("invert", false);
    if (behavior.string() == "Removed") {
      (invert ? step.keep_between : step.keep_matches) = false;
    } else if (behavior.string() != "Isolated") {
      behavior.unsupported(
          fmt::format("is {}; supported are Isolated and Removed", in_quotes(behavior.string())));
    }
  }

  void added_tokens(const Node& list) {
    std::unordered_set<std::string> seen;
    for (size_t i = 0; i < list.value().size(); ++i) {
      const Node node = list[i].object();
      AddedToken token;
      token.content = node["content"].string();
      token.id = node["id"].id();
      token.strip_left = node.flag("lstrip", false);
      token.strip_right = node.flag("rstrip", false);
      if (token.content.empty()) continue;  // the reference ignores them too
      if (node.flag("single_word", false)) {
        node["single_word"].unsupported("is true, which is not supported");
      }
      if (!seen.insert(token.content).second) {
        node["content"].broken(
            fmt::format("is {}, which an added token before it is too", in_quotes(token.content)));
      }
      const auto in_vocabulary = id_of_.find(token.content);
      if (in_vocabulary != id_of_.end() && in_vocabulary->second != token.id) {
        node["id"].broken(fmt::format("is {}, but {} has id {} in the vocabulary (model.vocab)",
                                      token.id, in_quotes(token.content), in_vocabulary->second));
      }
      const auto at = static_cast<size_t>(token.id);
      if (at >= names_.size()) {
        names_.resize(at + 1);
        file_.pieces.resize(at + 1);
      }
      if (in_vocabulary == id_of_.end()) {
        if (names_[at] != nullptr) {
          node["id"].broken(
              fmt::format("is {}, which {} has too", token.id, in_quotes(*names_[at])));
        }
        names_[at] = &id_of_.emplace(token.content, token.id).first->first;
      }
      // Without a normalizer the two kinds are still looked for one after the other.
      const bool normalized = node.flag("normalized", !node.flag("special", false));
      if (normalized && file_.nfc) {
        std::string storage;
        token.content = normalize_nfc(token.content, storage);
      }
      file_.pieces[at] = token.content;
      (normalized ? file_.added_normalized : file_.added).push_back(std::move(token));
    }
    remove_doubles(file_.added_normalized);
  }

  // Contents that only normalization made equal: the first one counts.
  static void remove_doubles(std::vector<AddedToken>& tokens) {
    std::unordered_set<std::string_view> seen;
    std::vector<AddedToken> kept;
    kept.reserve(tokens.size());
    for (AddedToken& token : tokens) {
      kept.push_back(std::move(token));
      if (!seen.insert(kept.back().content).second) kept.pop_back();
    }
    tokens = std::move(kept);
  }

  void end_of_document(const std::string& eod) {
    if (!eod.empty()) {
      const auto found = id_of_.find(eod);
      if (found == id_of_.end()) {
        root_.broken(fmt::format("has no token {}, which tokenizer_config.json names as eos_token",
                                 in_quotes(eod)));
      }
      file_.eod = found->second;
      return;
    }
    for (const std::string_view name : kUsualEods) {
      const auto found = id_of_.find(std::string(name));
      if (found == id_of_.end()) continue;
      file_.eod = found->second;
      return;
    }
    root_.unsupported(
        "has none of the usual tokens that end a document; put a tokenizer_config.json with "
        "\"eos_token\" beside it");
  }

  // One that the file does not have stands nowhere in the data.
  void padding(const std::string& pad) {
    const auto found = id_of_.find(pad);
    if (!pad.empty() && found != id_of_.end() && found->second != file_.eod) {
      file_.pad = found->second;
    }
  }

  const std::string& path_;
  Node root_;
  HfTokenizerFile file_;
  ByteAlphabet alphabet_;
  std::unordered_map<std::string, int32_t> id_of_;  // its keys do not move
  std::vector<const std::string*> names_;           // by id; null: no piece has it
  std::string key_;
};

}  // namespace

HfTokenizerFile parse_hf_tokenizer(const std::string& contents, const std::string& path,
                                   const std::string& eod, const std::string& pad) {
  const json document = parse_document(contents, path);
  return Parser(document, path).run(eod, pad);
}

std::string token_of_config(const std::string& contents, const std::string& path,
                            const char* name) {
  const json document = parse_document(contents, path);
  const Node root(document, path, "");
  if (!root.value().is_object()) root.broken("is not a JSON object");
  if (!root.has(name)) return "";
  const Node token = root[name];
  return token.value().is_object() ? token["content"].string() : token.string();
}

}  // namespace troupe
