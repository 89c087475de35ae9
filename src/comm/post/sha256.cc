#include "comm/post/sha256.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <string>

namespace troupe {
namespace {

constexpr size_t kBlock = 64;

// The first 32 bits of the fractional parts of the cube roots of the first 64 primes.
constexpr std::array<uint32_t, 64> kRoundConstants = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

using State = std::array<uint32_t, 8>;

// Of the square roots of the first eight primes.
constexpr State kStart = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                          0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

std::array<uint32_t, 64> message_schedule(std::string_view block) {
  std::array<uint32_t, 64> words{};
  for (size_t i = 0; i < 16; ++i) {
    for (size_t j = 0; j < 4; ++j) {
      words[i] = words[i] << 8 | static_cast<unsigned char>(block[4 * i + j]);
    }
  }
  for (size_t i = 16; i < 64; ++i) {
    const uint32_t a = words[i - 15];
    const uint32_t b = words[i - 2];
    words[i] = words[i - 16] + (std::rotr(a, 7) ^ std::rotr(a, 18) ^ a >> 3) + words[i - 7] +
               (std::rotr(b, 17) ^ std::rotr(b, 19) ^ b >> 10);
  }
  return words;
}

void compress(State& state, std::string_view block) {
  const std::array<uint32_t, 64> words = message_schedule(block);
  auto [a, b, c, d, e, f, g, h] = state;
  for (size_t i = 0; i < 64; ++i) {
    const uint32_t choice = (e & f) ^ (~e & g);
    const uint32_t majority = (a & b) ^ (a & c) ^ (b & c);
    const uint32_t first = h + (std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25)) + choice +
                           kRoundConstants[i] + words[i];
    const uint32_t second = (std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22)) + majority;
    h = g;
    g = f;
    f = e;
    e = d + first;
    d = c;
    c = b;
    b = a;
    a = first + second;
  }
  const State worked = {a, b, c, d, e, f, g, h};
  for (size_t i = 0; i < state.size(); ++i) state[i] += worked[i];
}

// What follows the last whole block of the bytes: their rest, a bit, zeros, and their number of
// bits.
std::string last_blocks(std::string_view bytes) {
  std::string rest(bytes.substr(bytes.size() / kBlock * kBlock));
  rest += '\x80';
  while (rest.size() % kBlock != kBlock - 8) rest += '\0';
  const uint64_t bits = uint64_t{bytes.size()} * 8;
  for (int shift = 56; shift >= 0; shift -= 8) rest += static_cast<char>(bits >> shift & 0xff);
  return rest;
}

std::string_view text_of(const Sha256& digest) {
  return {reinterpret_cast<const char*>(digest.data()), digest.size()};
}

}  // namespace

Sha256 sha256(std::string_view bytes) {
  State state = kStart;
  const std::string end = last_blocks(bytes);
  for (size_t at = 0; at + kBlock <= bytes.size(); at += kBlock) {
    compress(state, bytes.substr(at, kBlock));
  }
  for (size_t at = 0; at < end.size(); at += kBlock) {
    compress(state, std::string_view(end).substr(at, kBlock));
  }
  Sha256 digest{};
  for (size_t i = 0; i < digest.size(); ++i) {
    digest[i] = static_cast<uint8_t>(state[i / 4] >> (24 - 8 * (i % 4)));
  }
  return digest;
}

Sha256 hmac_sha256(std::string_view key, std::string_view bytes) {
  std::string padded(key.size() > kBlock ? text_of(sha256(key)) : key);
  padded.resize(kBlock, '\0');
  const auto masked = [&](char mask) {
    std::string text = padded;
    for (char& each : text) each = static_cast<char>(each ^ mask);
    return text;
  };
  const Sha256 inner = sha256(masked(0x36).append(bytes));
  return sha256(masked(0x5c).append(text_of(inner)));
}

bool same_in_constant_time(const Sha256& a, const Sha256& b) {
  unsigned difference = 0;
  for (size_t i = 0; i < a.size(); ++i) difference |= static_cast<unsigned>(a[i] ^ b[i]);
  return difference == 0;
}

}  // namespace troupe
