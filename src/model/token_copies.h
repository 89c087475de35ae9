// To how many ranks a token goes whose experts are spread over ranks, on average: what an exchange
// of tokens is expected to send, where a buffer needs room for the worst case.
//
// E experts lie in G groups of s = E/G successive ones, and each of P parts of the ranks holds m =
// E/P successive ones. A token chooses k experts of g of the groups (without group-limited routing
// G = g = 1), and goes once to each part with a chosen one. Loads are even: every choice of g
// groups is equally likely, and every choice of k of the N = g s experts in them. If h of these N
// are a part's, the token passes it by where all k are among the other N - h, so with probability
//
//   C(N - h, k) / C(N, k) = product over i < k of (N - h - i) / (N - i).
//
// h follows from the groups chosen, each of which is drawn without putting back. The sum over the
// parts of 1 - E[C(N - h, k)] / C(N, k) is the number of parts that a token goes to. Without groups
// that is P (1 - C(E - m, k) / C(E, k)): of 16 parts of 128 experts, 6.6 have one of a token's 8.
//
// Pure functions; any thread.
#pragma once

#include <cstdint>

namespace troupe {

struct TokenChoices {
  int32_t experts = 1;     // E
  int32_t top_k = 1;       // k
  int32_t groups = 1;      // G, a divisor of E
  int32_t group_topk = 1;  // g, with g s >= k
};

// `parts`: P, a divisor of E.
double parts_of_token(const TokenChoices& choices, int32_t parts);

}  // namespace troupe
