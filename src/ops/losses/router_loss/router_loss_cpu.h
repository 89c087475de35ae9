// The loops over tokens of the CPU kernels that make one number of a router's logits, or its
// gradient. Private to the rooms named in router_loss.h.
#pragma once

#include <algorithm>
#include <cstdint>

#include "program/kernel.h"

namespace troupe {

// Tokens per chunk: about 16k logits.
inline int64_t router_loss_chunk_tokens(int64_t experts) {
  return std::max<int64_t>(1, 16384 / experts);
}

// The workspace of a loss holds one double for each chunk.
inline int64_t router_loss_chunks(int64_t tokens, int64_t experts) {
  const int64_t chunk = router_loss_chunk_tokens(experts);
  return (tokens + chunk - 1) / chunk;
}

// The tokens that count, for kernels: the ValidTokens of an operation, whose mask is this input if
// it has one. (Without a mask there is at most one input from there on, a loss's gradient.)
struct TokenMask {
  const int32_t* mask = nullptr;  // null: all count
  const int32_t* count = nullptr;

  TokenMask(const KernelArguments& args, size_t input) {
    if (input + 1 >= args.inputs.size()) return;
    mask = args.in<int32_t>(static_cast<int>(input));
    count = args.in<int32_t>(static_cast<int>(input) + 1);
  }
  bool counts(int64_t token) const { return mask == nullptr || mask[token] != 0; }
  // What a sum over them is divided by: at least 1. `all`: tokens, where there is no mask.
  double divisor(int64_t all) const {
    return mask == nullptr ? static_cast<double>(all) : std::max(1.0, static_cast<double>(*count));
  }
};

// The sum over the tokens that count of term(token, z, scratch), with the token's logits z[E] and
// room for E numbers. It is kept in double, one sum for each chunk, added in the order of the
// chunks. T is float or double.
template <class T, class Term>
double sum_over_tokens(const KernelArguments& args, const TokenMask& valid, const Term& term) {
  const int64_t tokens = args.input(0).shape[0];
  const int64_t experts = args.input(0).shape[1];
  const T* logits = args.in<T>(0);
  const int64_t grain = router_loss_chunk_tokens(experts);
  auto* partial = reinterpret_cast<double*>(args.workspace);
  args.pool->parallel_ranges(tokens, grain, [&](int64_t begin, int64_t end, int worker) {
    T* scratch = args.thread_scratch<T>(worker);
    double sum = 0;
    for (int64_t token = begin; token < end; ++token) {
      if (!valid.counts(token)) continue;
      sum += static_cast<double>(term(token, logits + token * experts, scratch));
    }
    partial[begin / grain] = sum;
  });
  double sum = 0;
  const int64_t chunks = router_loss_chunks(tokens, experts);
  for (int64_t chunk = 0; chunk < chunks; ++chunk) sum += partial[chunk];
  return sum;
}

// Calls body(token, z, dz) for every token that counts, with its logits z[E] and room dz[E] for
// their gradient. That of others is 0.
template <class T, class Body>
void for_each_token(const KernelArguments& args, const TokenMask& valid, const Body& body) {
  const int64_t experts = args.input(0).shape[1];
  const T* logits = args.in<T>(0);
  T* d_logits = args.out<T>(0);
  args.pool->parallel_ranges(args.input(0).shape[0], router_loss_chunk_tokens(experts),
                             [&](int64_t begin, int64_t end, int) {
                               for (int64_t token = begin; token < end; ++token) {
                                 T* const own = d_logits + token * experts;
                                 if (valid.counts(token)) {
                                   body(token, logits + token * experts, own);
                                 } else {
                                   std::fill_n(own, experts, T(0));
                                 }
                               }
                             });
}

}  // namespace troupe
