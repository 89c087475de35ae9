// XXH3-64 of bytes: the hash that checkpoints store for headers, slices and the index.
//
// The value is XXH3_64bits with seed 0 and the default secret, the same on every machine. It finds
// accidental damage, not forgery. Everything here may be called from any thread; one StreamingHash
// belongs to one thread at a time. Nothing here fails.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

namespace troupe {

uint64_t hash_bytes(const void* data, size_t bytes);

// 16 lower-case hexadecimal digits, most significant first.
std::string hash_to_hex(uint64_t hash);

// The inverse of hash_to_hex; empty for anything that hash_to_hex does not produce.
std::optional<uint64_t> hash_from_hex(std::string_view text);

// The hash of a concatenation of pieces, equal to hash_bytes of the whole.
class StreamingHash {
 public:
  StreamingHash();
  ~StreamingHash();
  StreamingHash(StreamingHash&& other) noexcept;
  StreamingHash& operator=(StreamingHash&& other) noexcept;

  void update(const void* data, size_t bytes);
  uint64_t digest() const;
  // Forgets everything that was added.
  void reset();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace troupe
