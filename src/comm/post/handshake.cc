#include "comm/post/handshake.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fmt/format.h>
#include <sys/random.h>

#include "base/error.h"
#include "base/text.h"
#include "comm/bytes.h"

namespace troupe {
namespace {

std::string_view digest_bytes(const Sha256& digest) {
  return {reinterpret_cast<const char*>(digest.data()), digest.size()};
}

std::string derived(std::string_view key, std::string_view purpose) {
  return std::string(digest_bytes(hmac_sha256(key, purpose)));
}

}  // namespace

Nonce random_nonce() {
  Nonce nonce = {};
  size_t count = 0;
  while (count < nonce.size()) {
    const ssize_t got = getrandom(nonce.data() + count, nonce.size() - count, 0);
    if (got < 0 && errno != EINTR) throw_failed("the system gives no random numbers.");
    if (got > 0) count += static_cast<size_t>(got);
  }
  return nonce;
}

ShortText short_text(std::string_view text) {
  ShortText result = {};
  std::copy_n(text.begin(), std::min(text.size(), result.size()), result.begin());
  return result;
}

std::string text_of(const ShortText& text) {
  return printable({text.data(), strnlen(text.data(), text.size())});
}

HandshakeKey::HandshakeKey(std::string_view secret, std::string_view run)
    : key_(derived(secret, fmt::format("troupe ranks of {}", run))) {
  const Sha256 digest = sha256(run);
  std::memcpy(&run_, digest.data(), sizeof(run_));
}

HandshakeKey HandshakeKey::with_token(const Nonce& token) const {
  HandshakeKey key(run_);
  std::string bytes = "token ";
  append_bytes(bytes, token);
  key.key_ = derived(key_, bytes);
  return key;
}

Sha256 HandshakeKey::signature_of(Hello hello, const Nonce& challenge) const {
  hello.signature = {};
  std::string bytes = "hello ";
  append_bytes(bytes, challenge);
  append_bytes(bytes, hello);
  return hmac_sha256(key_, bytes);
}

Sha256 HandshakeKey::signature_of(Answer answer, const Nonce& challenge, const Nonce& hello) const {
  answer.signature = {};
  std::string bytes = "answer ";
  append_bytes(bytes, challenge);
  append_bytes(bytes, hello);
  append_bytes(bytes, answer);
  return hmac_sha256(key_, bytes);
}

void HandshakeKey::sign(Hello& hello, const Nonce& challenge) const {
  hello.signature = signature_of(hello, challenge);
}

bool HandshakeKey::has_signed(const Hello& hello, const Nonce& challenge) const {
  return same_in_constant_time(hello.signature, signature_of(hello, challenge));
}

Answer HandshakeKey::answer(AnswerKind kind, std::string_view bytes, const Nonce& challenge,
                            const Nonce& hello) const {
  Answer answer{.protocol = kProtocol,
                .kind = kind,
                .bytes = static_cast<uint32_t>(bytes.size()),
                .digest = sha256(bytes),
                .signature = {}};
  answer.signature = signature_of(answer, challenge, hello);
  return answer;
}

bool HandshakeKey::has_signed(const Answer& answer, const Nonce& challenge,
                              const Nonce& hello) const {
  return same_in_constant_time(answer.signature, signature_of(answer, challenge, hello));
}

}  // namespace troupe
