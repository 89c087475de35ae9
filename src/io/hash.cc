#include "io/hash.h"

#define XXH_INLINE_ALL
#if defined(__AVX512F__)
// gcc 12 warns about its own AVX-512 intrinsics when they are inlined here; hashing is bound by
// memory either way.
#define XXH_VECTOR XXH_AVX2
#endif
#include <xxhash.h>

namespace troupe {

struct StreamingHash::State {
  XXH3_state_t xxh3;
};

uint64_t hash_bytes(const void* data, size_t bytes) {
  return XXH3_64bits(data, bytes);
}

std::string hash_to_hex(uint64_t hash) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text(16, '0');
  for (size_t i = 0; i < text.size(); ++i) text[i] = kDigits[(hash >> (60 - 4 * i)) & 15U];
  return text;
}

std::optional<uint64_t> hash_from_hex(std::string_view text) {
  if (text.size() != 16) return std::nullopt;
  uint64_t hash = 0;
  for (const char c : text) {
    uint64_t digit = 0;
    if (c >= '0' && c <= '9') {
      digit = static_cast<uint64_t>(c - '0');
    } else if (c >= 'a' && c <= 'f') {
      digit = static_cast<uint64_t>(c - 'a') + 10;
    } else {
      return std::nullopt;
    }
    hash = hash << 4 | digit;
  }
  return hash;
}

StreamingHash::StreamingHash() : state_(std::make_unique<State>()) {
  reset();
}
StreamingHash::~StreamingHash() = default;
StreamingHash::StreamingHash(StreamingHash&& other) noexcept = default;
StreamingHash& StreamingHash::operator=(StreamingHash&& other) noexcept = default;

void StreamingHash::update(const void* data, size_t bytes) {
  XXH3_64bits_update(&state_->xxh3, data, bytes);
}

uint64_t StreamingHash::digest() const {
  return XXH3_64bits_digest(&state_->xxh3);
}

void StreamingHash::reset() {
  XXH3_64bits_reset(&state_->xxh3);
}

}  // namespace troupe
