// Tokens that are found in the text as they are written, before anything else is done with it, such
// as <|endoftext|>.
//
// The leftmost match wins, and of those the longest. Immutable, any thread. Nothing here fails.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace troupe {

struct AddedToken {
  std::string content;  // not empty
  int32_t id = 0;
  bool strip_left = false;   // takes the white space before it
  bool strip_right = false;  // and after it
};

class AddedTokens {
 public:
  // The contents must differ from one another.
  explicit AddedTokens(std::vector<AddedToken> tokens);

  bool empty() const { return tokens_.empty(); }

  // Cuts `text` (valid UTF-8) and calls on_text(piece) for what lies between tokens, unless it is
  // empty, and on_token(id) for each token, in the order of the text.
  template <class OnText, class OnToken>
  void cut(std::string_view text, const OnText& on_text, const OnToken& on_token) const {
    size_t done = 0;
    Found found;
    while (find(text, done, found)) {
      if (found.begin > done) on_text(text.substr(done, found.begin - done));
      on_token(found.id);
      done = found.end;
    }
    if (done < text.size()) on_text(text.substr(done));
  }

 private:
  struct Found {
    size_t begin = 0;
    size_t end = 0;
    int32_t id = 0;
  };
  bool find(std::string_view text, size_t from, Found& found) const;
  // The longest token that is written at `at`, or null.
  const AddedToken* longest_at(std::string_view text, size_t at) const;

  std::vector<AddedToken> tokens_;           // sorted by content
  std::array<bool, 256> begins_token_ = {};  // by first byte
};

}  // namespace troupe
