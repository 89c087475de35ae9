#include "data/added_tokens.h"

#include <algorithm>

#include "data/utf8.h"

namespace troupe {
namespace {

bool is_continuation(char byte) {
  return (static_cast<unsigned char>(byte) & 0xc0) == 0x80;
}

}  // namespace

AddedTokens::AddedTokens(std::vector<AddedToken> tokens) : tokens_(std::move(tokens)) {
  std::sort(tokens_.begin(), tokens_.end(),
            [](const AddedToken& a, const AddedToken& b) { return a.content < b.content; });
  for (const AddedToken& token : tokens_) {
    begins_token_[static_cast<unsigned char>(token.content.front())] = true;
  }
}

const AddedToken* AddedTokens::longest_at(std::string_view text, size_t at) const {
  // [begin, end) are the tokens that agree with the text in the first `depth` bytes.
  auto begin = tokens_.begin();
  auto end = tokens_.end();
  const AddedToken* longest = nullptr;
  for (size_t depth = 0; begin != end; ++depth) {
    if (begin->content.size() == depth) {
      longest = &*begin;
      if (++begin == end) break;
    }
    if (at + depth == text.size()) break;
    const auto wanted = static_cast<unsigned char>(text[at + depth]);
    const auto byte = [depth](const AddedToken& token) {
      return static_cast<unsigned char>(token.content[depth]);
    };
    begin = std::partition_point(begin, end, [&](const auto& t) { return byte(t) < wanted; });
    end = std::partition_point(begin, end, [&](const auto& t) { return byte(t) == wanted; });
  }
  return longest;
}

bool AddedTokens::find(std::string_view text, size_t from, Found& found) const {
  if (tokens_.empty()) return false;
  for (size_t at = from; at < text.size(); ++at) {
    if (!begins_token_[static_cast<unsigned char>(text[at])]) continue;
    const AddedToken* token = longest_at(text, at);
    if (token == nullptr) continue;
    found = {at, at + token->content.size(), token->id};
    while (token->strip_left && found.begin > from) {
      size_t before = found.begin - 1;
      while (before > from && is_continuation(text[before])) --before;
      size_t end = before;
      if (!is_white_space(next_code_point(text, end))) break;
      found.begin = before;
    }
    while (token->strip_right && found.end < text.size()) {
      size_t end = found.end;
      if (!is_white_space(next_code_point(text, end))) break;
      found.end = end;
    }
    return true;
  }
  return false;
}

}  // namespace troupe
