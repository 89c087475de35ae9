#include "data/hf_tokenizer.h"

#include <array>
#include <cstring>
#include <fmt/format.h>
#include <functional>
#include <mutex>
#include <unordered_map>

#include "base/error.h"
#include "data/hf_tokenizer_file.h"
#include "data/utf8.h"

namespace troupe {
namespace {

// The ids of words met before. A text has few distinct words, so most are found here. Each word has
// one place; a new word takes it from the one before. Entries fill a cache line.
class WordCache {
 public:
  static constexpr size_t kMaxWord = 23;
  static constexpr size_t kMaxIds = 9;

  struct alignas(64) Entry {
    std::array<char, kMaxWord> word{};
    uint8_t size = 0;
    uint8_t count = 0;  // of ids; 0: empty
    std::array<int32_t, kMaxIds> ids{};

    bool holds(std::string_view text) const {
      return count > 0 && size == text.size() && std::memcmp(word.data(), text.data(), size) == 0;
    }
    void store(std::string_view text, const int32_t* first, size_t number) {
      if (number > kMaxIds) return;
      std::memcpy(word.data(), text.data(), text.size());
      size = static_cast<uint8_t>(text.size());
      std::memcpy(ids.data(), first, number * sizeof(int32_t));
      count = static_cast<uint8_t>(number);
    }
  };

  WordCache() : entries_(kEntries) {}
  // `text` has at most kMaxWord bytes.
  Entry& place_of(std::string_view text) {
    return entries_[std::hash<std::string_view>()(text) & (kEntries - 1)];
  }

 private:
  static constexpr size_t kEntries = size_t{1} << 15;  // 2 MiB
  std::vector<Entry> entries_;
};

class HfTokenizer final : public Tokenizer {
 public:
  explicit HfTokenizer(HfTokenizerFile file)
      : pieces_(std::move(file.pieces)),
        pairs_(file.byte_ids, file.merges),
        nfc_(file.nfc),
        steps_(std::move(file.steps)),
        added_(std::move(file.added)),
        added_normalized_(std::move(file.added_normalized)),
        eod_(file.eod),
        pad_(file.pad) {
    pieces_[static_cast<size_t>(eod_)].clear();  // it stands for no text
    if (!file.ignore_merges) return;
    for (const int32_t id : file.word_ids) words_.emplace(pieces_[static_cast<size_t>(id)], id);
  }

  std::string_view name() const override { return kHuggingFaceTokenizer; }
  int32_t vocab_size() const override { return static_cast<int32_t>(pieces_.size()); }
  int32_t eod() const override { return eod_; }
  int32_t pad() const override { return pad_; }

  void encode(std::string_view text, std::vector<int32_t>& ids) const override {
    if (text.size() > INT32_MAX / 3) {  // an invalid byte becomes three
      throw_failed(
          fmt::format("a document of {} bytes is too long to tokenize; split it", text.size()));
    }
    const Lease lease(*this);
    Scratch& scratch = *lease.scratch;
    const std::string_view valid = replace_invalid_utf8(text, scratch.valid);
    const auto on_token = [&](int32_t id) { ids.push_back(id); };
    added_.cut(
        valid,
        [&](std::string_view part) {
          const std::string_view normal = nfc_ ? normalize_nfc(part, scratch.normal) : part;
          added_normalized_.cut(
              normal, [&](std::string_view piece) { split(piece, 0, scratch, ids); }, on_token);
        },
        on_token);
  }

 private:
  struct Scratch {
    PatternScratch pattern;
    BytePairs::Scratch pairs;
    WordCache cache;
    std::string valid;
    std::string normal;
  };

  // The working memory of one call, taken from and given back to the tokenizer's store: there are
  // as many as calls at once, and a thread nearly always finds its words in the cache.
  struct Lease {
    explicit Lease(const HfTokenizer& of) : tokenizer(of) {
      const std::lock_guard lock(tokenizer.mutex_);
      if (tokenizer.idle_.empty()) {
        scratch = std::make_unique<Scratch>();
      } else {
        scratch = std::move(tokenizer.idle_.back());
        tokenizer.idle_.pop_back();
      }
    }
    ~Lease() {
      const std::lock_guard lock(tokenizer.mutex_);
      tokenizer.idle_.push_back(std::move(scratch));
    }
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;

    const HfTokenizer& tokenizer;
    std::unique_ptr<Scratch> scratch;
  };

  std::string_view known_piece(int32_t id) const override {
    return pieces_[static_cast<size_t>(id)];
  }

  // Does the steps of the pre-tokenizer from number `step` on; what is left in the end are words.
  void split(std::string_view text, size_t step, Scratch& scratch,
             std::vector<int32_t>& ids) const {
    if (text.empty()) return;
    if (step == steps_.size()) return word(text, scratch, ids);
    const SplitStep& now = steps_[step];
    std::string prefixed;
    if (now.prefix_space && text.front() != ' ') {
      prefixed.reserve(text.size() + 1);
      prefixed.append(" ").append(text);
      text = prefixed;
    }
    if (!now.pattern) return split(text, step + 1, scratch, ids);
    size_t done = 0;
    size_t from = 0;
    TextMatch match;
    while (from <= text.size() && now.pattern->find(text, from, scratch.pattern, match)) {
      if (now.keep_between) split(text.substr(done, match.begin - done), step + 1, scratch, ids);
      if (now.keep_matches) {
        split(text.substr(match.begin, match.end - match.begin), step + 1, scratch, ids);
      }
      done = match.end;
      from = match.end;
      if (match.begin == match.end) {  // nothing matched: a cut, and on with the next character
        if (from == text.size()) break;
        next_code_point(text, from);
      }
    }
    if (now.keep_between) split(text.substr(done), step + 1, scratch, ids);
  }

  void word(std::string_view text, Scratch& scratch, std::vector<int32_t>& ids) const {
    if (text.size() > WordCache::kMaxWord) return new_word(text, scratch, ids);
    WordCache::Entry& entry = scratch.cache.place_of(text);
    if (entry.holds(text)) {
      ids.insert(ids.end(), entry.ids.data(), entry.ids.data() + entry.count);
      return;
    }
    const size_t before = ids.size();
    new_word(text, scratch, ids);
    entry.store(text, ids.data() + before, ids.size() - before);
  }

  void new_word(std::string_view text, Scratch& scratch, std::vector<int32_t>& ids) const {
    const auto whole = words_.find(text);
    if (whole != words_.end()) {
      ids.push_back(whole->second);
    } else {
      pairs_.encode(text, scratch.pairs, ids);
    }
  }

  std::vector<std::string> pieces_;  // by id
  BytePairs pairs_;
  bool nfc_;
  std::vector<SplitStep> steps_;
  AddedTokens added_;
  AddedTokens added_normalized_;
  int32_t eod_;
  int32_t pad_;
  // With ignore_merges: the words that are tokens as a whole. The keys lie in pieces_.
  std::unordered_map<std::string_view, int32_t> words_;

  mutable std::mutex mutex_;
  mutable std::vector<std::unique_ptr<Scratch>> idle_;
};

}  // namespace

std::unique_ptr<Tokenizer> make_hf_tokenizer(const TokenizerModel& model) {
  return std::make_unique<HfTokenizer>(
      parse_hf_tokenizer(model.contents, model.path, model.eod, model.pad.value_or("")));
}

}  // namespace troupe
