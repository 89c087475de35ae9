// What the ranks sign when they meet: a signature holds for one key, one challenge and one content.
#include "comm/post/handshake.h"

#include <algorithm>
#include <cstring>
#include <gtest/gtest.h>
#include <string>

namespace troupe {
namespace {

Nonce nonce_of(uint8_t first) {
  Nonce nonce = {};
  nonce[0] = first;
  nonce[15] = 7;
  return nonce;
}

TEST(Handshake, DrawsAllBytesOfANonce) {
  Nonce any = {};
  for (int draw = 0; draw < 64; ++draw) {
    const Nonce nonce = random_nonce();
    EXPECT_NE(nonce, random_nonce());
    for (size_t i = 0; i < nonce.size(); ++i) any[i] |= nonce[i];
  }
  for (const uint8_t byte : any) EXPECT_NE(byte, 0);
}

TEST(Handshake, CutsTextsToWhatTravels) {
  for (const size_t size : {0U, 1U, 63U, 64U, 65U, 500U}) {
    EXPECT_EQ(text_of(short_text(std::string(size, 'h'))),
              std::string(std::min<size_t>(size, 64), 'h'));
  }
}

TEST(Handshake, SignsEveryFieldOfAHello) {
  const HandshakeKey key("secret", "run");
  Hello hello{.nonce = nonce_of(1), .rank = 2, .size = 3, .host = short_text("node1")};
  key.sign(hello, nonce_of(9));
  EXPECT_TRUE(key.has_signed(hello, nonce_of(9)));
  EXPECT_FALSE(key.has_signed(hello, nonce_of(8))) << "for another challenge";
  EXPECT_FALSE(HandshakeKey("Secret", "run").has_signed(hello, nonce_of(9)));
  EXPECT_FALSE(HandshakeKey("secret", "Run").has_signed(hello, nonce_of(9)));
  for (size_t byte = 0; byte < sizeof(hello); ++byte) {
    std::string bytes(sizeof(hello), '\0');
    std::memcpy(bytes.data(), &hello, sizeof(hello));
    bytes[byte] = static_cast<char>(bytes[byte] ^ 1);
    Hello other;
    std::memcpy(&other, bytes.data(), sizeof(other));
    EXPECT_FALSE(key.has_signed(other, nonce_of(9))) << "byte " << byte << " is another one";
  }
}

TEST(Handshake, SignsEveryFieldOfAnAnswer) {
  const HandshakeKey key("secret", "run");
  const Answer answer = key.answer(AnswerKind::refusal, "why", nonce_of(1), nonce_of(2));
  EXPECT_EQ(answer.kind, AnswerKind::refusal);
  EXPECT_EQ(answer.bytes, 3U);
  EXPECT_EQ(answer.digest, sha256("why"));
  EXPECT_TRUE(key.has_signed(answer, nonce_of(1), nonce_of(2)));
  EXPECT_FALSE(key.has_signed(answer, nonce_of(3), nonce_of(2))) << "to another challenge";
  EXPECT_FALSE(key.has_signed(answer, nonce_of(1), nonce_of(3))) << "to another hello";
  for (size_t byte = 0; byte < sizeof(answer); ++byte) {
    std::string bytes(sizeof(answer), '\0');
    std::memcpy(bytes.data(), &answer, sizeof(answer));
    bytes[byte] = static_cast<char>(bytes[byte] ^ 1);
    Answer other;
    std::memcpy(&other, bytes.data(), sizeof(other));
    EXPECT_FALSE(key.has_signed(other, nonce_of(1), nonce_of(2)))
        << "byte " << byte << " is another one";
  }
}

TEST(Handshake, KeyOfConnectionsIsThatOfTheToken) {
  const HandshakeKey key("secret", "run");
  const HandshakeKey first = key.with_token(nonce_of(1));
  EXPECT_EQ(first.run(), key.run());
  EXPECT_NE(HandshakeKey("secret", "other").run(), key.run());
  Hello hello;
  first.sign(hello, nonce_of(9));
  EXPECT_TRUE(key.with_token(nonce_of(1)).has_signed(hello, nonce_of(9)));
  EXPECT_FALSE(key.with_token(nonce_of(2)).has_signed(hello, nonce_of(9)));
  EXPECT_FALSE(key.has_signed(hello, nonce_of(9)));
}

}  // namespace
}  // namespace troupe
