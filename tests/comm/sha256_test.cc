// The vectors of FIPS 180-4 (NIST's examples) and of RFC 4231.
#include "comm/post/sha256.h"

#include <gtest/gtest.h>
#include <string>

namespace troupe {
namespace {

std::string hexadecimal(const Sha256& digest) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string text;
  for (const uint8_t byte : digest) {
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

TEST(Sha256, GivesTheDigestsOfTheStandard) {
  EXPECT_EQ(hexadecimal(sha256("")),
            "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(hexadecimal(sha256("abc")),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(hexadecimal(sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq")),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(hexadecimal(sha256(std::string(1'000'000, 'a'))),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(Sha256, SignsAsTheRfcDoes) {
  EXPECT_EQ(hexadecimal(hmac_sha256(std::string(20, '\x0b'), "Hi There")),
            "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  EXPECT_EQ(hexadecimal(hmac_sha256("Jefe",
                                    "what do ya wa"
                                    "nt for nothing?")),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  EXPECT_EQ(hexadecimal(hmac_sha256(std::string(20, '\xaa'), std::string(50, '\xdd'))),
            "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe");
  // Keys of a block, and of more than one.
  EXPECT_EQ(hexadecimal(hmac_sha256(std::string(64, 'k'), "what is signed")),
            "6507aeb80eeb997e4125a2e585eb1da31e6d59ea1c193ecb02406d64b6fe7c0d");
  EXPECT_EQ(hexadecimal(hmac_sha256(std::string(65, 'k'), "what is signed")),
            "406dd0b3d1ecec6532fde35d878245202e18480306a266a203513e605a33f916");
  EXPECT_EQ(hexadecimal(hmac_sha256(std::string(131, '\xaa'),
                                    "Test Using Larger Than Block-Size Key - Hash Key First")),
            "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
}

TEST(Sha256, ComparesAllBytes) {
  const Sha256 digest = sha256("abc");
  EXPECT_TRUE(same_in_constant_time(digest, sha256("abc")));
  for (size_t i = 0; i < digest.size(); ++i) {
    Sha256 other = digest;
    other[i] ^= 1;
    EXPECT_FALSE(same_in_constant_time(digest, other));
  }
}

}  // namespace
}  // namespace troupe
