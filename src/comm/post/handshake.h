// What two processes of a run say to each other first on a new connection, so that each knows that
// the other has the run's secret:
//
//   who listens   Challenge   a number that was never used
//   who connects  Hello       who it is, a number of its own, signed with both
//   who listens   Answer      welcome, signed with both; or why not
//
// Signatures are HMAC-SHA256 under a key that follows from the secret and the run's name. Without a
// secret the key is known to all who know the name: then this only keeps runs apart. Nothing is
// encrypted, and what comes on a connection later is not signed.
//
// All of these have fixed sizes, except for the bytes after an answer, whose length is signed
// before they are taken. Pure functions; any thread.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>

#include "comm/post/sha256.h"

namespace troupe {

using Nonce = std::array<uint8_t, 16>;
Nonce random_nonce();

// What both sides must speak: another number when the messages change. The first six bytes tell
// Troupe from other programs.
inline constexpr uint64_t kProtocol = 0x5452'4f55'5045'0002;
inline constexpr uint64_t kProgramMask = 0xffff'ffff'ffff'0000;

struct Challenge {
  uint64_t protocol = kProtocol;
  Nonce nonce = {};
};

enum class Purpose : uint32_t {
  join,     // the rendezvous
  connect,  // to a rank, after the rendezvous
};

// A text of bounded length, as it travels. What comes back from it is printable.
using ShortText = std::array<char, 64>;
ShortText short_text(std::string_view text);
std::string text_of(const ShortText& text);

struct Hello {
  uint64_t protocol = kProtocol;
  uint64_t run = 0;  // a digest of the run's name
  Nonce nonce = {};
  Purpose purpose = Purpose::join;
  int32_t rank = 0;
  int32_t size = 0;
  int32_t port = 0;  // join: where it listens
  int32_t process = 0;
  int32_t to = -1;  // connect: the rank that is meant
  uint64_t machine = 0;
  ShortText host = {};
  Sha256 signature = {};
};

enum class AnswerKind : uint32_t {
  welcome,
  members,  // the list of all ranks follows
  refusal,  // followed by the reason; none: another rank says it
  // Not signed: they are for those who cannot check a signature.
  other_run,
  other_secret,
};

struct Answer {
  uint64_t protocol = kProtocol;
  AnswerKind kind = AnswerKind::welcome;
  uint32_t bytes = 0;  // that follow
  Sha256 digest = {};  // of these
  Sha256 signature = {};
};

// They are sent as they lie in memory.
static_assert(std::has_unique_object_representations_v<Challenge>);
static_assert(std::has_unique_object_representations_v<Hello>);
static_assert(std::has_unique_object_representations_v<Answer>);

class HandshakeKey {
 public:
  HandshakeKey(std::string_view secret, std::string_view run);
  // The key of the connections after the rendezvous, which chose the token.
  HandshakeKey with_token(const Nonce& token) const;

  uint64_t run() const { return run_; }

  void sign(Hello& hello, const Nonce& challenge) const;
  bool has_signed(const Hello& hello, const Nonce& challenge) const;
  Answer answer(AnswerKind kind, std::string_view bytes, const Nonce& challenge,
                const Nonce& hello) const;
  // The bytes are for the caller to compare with the digest.
  bool has_signed(const Answer& answer, const Nonce& challenge, const Nonce& hello) const;

 private:
  explicit HandshakeKey(uint64_t run) : run_(run) {}
  Sha256 signature_of(Hello hello, const Nonce& challenge) const;
  Sha256 signature_of(Answer answer, const Nonce& challenge, const Nonce& hello) const;

  std::string key_;
  uint64_t run_ = 0;
};

}  // namespace troupe
