// SHA-256 (FIPS 180-4) and HMAC with it (RFC 2104): what ranks prove to each other that they belong
// to one run with. Our own, because the machines with GPUs have no library of it with headers; the
// tests hold it to the standards' vectors. For a few hundred bytes at a time, not for speed.
//
// Pure functions; any thread.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace troupe {

using Sha256 = std::array<uint8_t, 32>;

Sha256 sha256(std::string_view bytes);
Sha256 hmac_sha256(std::string_view key, std::string_view bytes);

// In a time that does not depend on where they differ.
bool same_in_constant_time(const Sha256& a, const Sha256& b);

}  // namespace troupe
