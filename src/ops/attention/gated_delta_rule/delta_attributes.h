// What the kinds of this folder share: attributes, a part of their rules, and gates of samples.
// Pure functions; any thread.
#pragma once

#include <cstdint>
#include <string>

#include "program/op_sample.h"
#include "program/op_spec.h"

namespace troupe {

inline constexpr double kDeltaNormEpsilon = 1e-6;

struct GatedDeltaRuleAttributes {
  int32_t sequence = 1;     // S
  int32_t key_heads = 1;    // H_k
  int32_t value_heads = 1;  // H_v, a multiple of H_k
  int32_t key_dim = 1;      // d_k
  int32_t value_dim = 1;    // d_v

  constexpr int64_t key_size() const { return int64_t{key_heads} * key_dim; }
  constexpr int64_t value_size() const { return int64_t{value_heads} * value_dim; }
  constexpr int64_t row_size() const { return 2 * key_size() + value_size(); }
  constexpr int64_t state_size() const { return int64_t{key_dim} * value_dim; }
  // Columns of what gated_delta_state makes.
  constexpr int64_t end_columns() const { return int64_t{value_dim} + key_dim; }
  // Where, in a row of qkv, the query, key and value of a value head begin.
  constexpr int64_t query_of(int64_t head) const {
    return head / (value_heads / key_heads) * key_dim;
  }
  constexpr int64_t key_of(int64_t head) const { return key_size() + query_of(head); }
  constexpr int64_t value_of(int64_t head) const { return 2 * key_size() + head * value_dim; }
};

// Rows between states that are kept while a gradient is computed: about the square root of the
// sequence, so that the kept states and those between two of them take the least memory.
constexpr int64_t delta_chunk(int64_t sequence) {
  int64_t chunk = 1;
  while (chunk * chunk < sequence) ++chunk;
  return chunk;
}

// States that one head's gradient holds at a time.
constexpr int64_t delta_states(int64_t sequence) {
  const int64_t chunk = delta_chunk(sequence);
  return (sequence + chunk - 1) / chunk + chunk;
}

// Flops for each element of a state and row: its decay, and multiply-adds of the lines for u and S.
inline constexpr double kDeltaStateFlops = 5;

// Checks inputs qkv, gates and starts from `first` on.
void check_delta_rule(const InferContext& context, int first);

// Bytes that a thread of a CPU needs for the gradients of a key head, with states of `columns`.
uint64_t delta_gradient_cpu_scratch(const GatedDeltaRuleAttributes& attributes, int64_t columns,
                                    DType dtype);

std::string print_delta_rule(const Attributes& attributes);

// Gates of a sample: strengths between 0.1 and 0.9, and decays.
ValueId sample_delta_gates(SampleBuilder& sample, int64_t rows, int64_t heads);

}  // namespace troupe
