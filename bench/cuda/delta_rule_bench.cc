// The gated delta rule in bf16 on a GPU, with Qwen3-Next's heads: how far it and its gradients are
// from fp32, and how fast it is. Exits with 1 if results are wrong.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "cuda/device_run.h"
#include "ops/attention/delta_gates/delta_gates.h"
#include "ops/attention/gated_delta_rule/gated_delta_rule.h"

namespace troupe {
namespace {

// Keys, states and results of a chunk are rounded to bf16, 2^-9 each, relative.
constexpr double kTolerance = 1e-2;

// Operations 1 and 2 are the rule and its gradient; operation 0 makes gates of normal numbers, as
// models have them.
struct Values {
  ValueId out;
  ValueId d_qkv;
  ValueId d_gates;
};

Values emit(Builder& builder, int32_t sequences, const GatedDeltaRuleAttributes& a, DType dtype) {
  const int64_t rows = int64_t{sequences} * a.sequence;
  const int32_t heads = a.value_heads;
  const DType wide = accumulation_dtype(dtype);
  const ValueId gates =
      delta_gates(builder, builder.input("x", dtype, {rows, 2 * int64_t{heads}}),
                  builder.input("decay_log", wide, {heads}), builder.input("bias", wide, {heads}),
                  {.heads = heads, .group_heads = heads / a.key_heads}, "gates");
  const ValueId qkv = builder.input("qkv", dtype, {rows, a.row_size()});
  const ValueId d_out = builder.input("d_out", dtype, {rows, a.value_size()});
  const ValueId none;
  const ValueId out = gated_delta_rule(builder, qkv, gates, {}, a, "out");
  const auto gradients = builder.emit(kGatedDeltaRuleGradient, Attributes(a),
                                      {d_out, qkv, gates, none, none}, "d_qkv");
  return {out, gradients[0], gradients[1]};
}

double distance(const std::vector<double>& actual, const std::vector<double>& reference) {
  double difference = 0;
  double norm = 0;
  for (size_t i = 0; i < reference.size(); ++i) {
    difference += (actual[i] - reference[i]) * (actual[i] - reference[i]);
    norm += reference[i] * reference[i];
  }
  return std::sqrt(difference / norm);
}

bool measure(int32_t sequences, int32_t sequence) {
  const GatedDeltaRuleAttributes attributes{
      .sequence = sequence, .key_heads = 16, .value_heads = 32, .key_dim = 128, .value_dim = 128};
  Values values;
  DeviceRun run(
      [&](Builder& builder) { values = emit(builder, sequences, attributes, DType::bf16); }, 1);
  run.run();
  Values exact;
  DeviceRun reference(
      [&](Builder& builder) { exact = emit(builder, sequences, attributes, DType::f32); }, 1);
  reference.run();
  const auto off = [&](ValueId own, ValueId other) {
    return distance(run.numbers(own), reference.numbers(other));
  };
  const double out = off(values.out, exact.out);
  const double d_qkv = off(values.d_qkv, exact.d_qkv);
  const double d_gates = off(values.d_gates, exact.d_gates);
  const bool good = out < kTolerance && d_qkv < kTolerance && d_gates < kTolerance;
  std::printf("%d x %-8d %9.3f %9.3f %7.0f   %.1e %.1e %.1e  %s\n", sequences, sequence,
              run.seconds(1) * 1e3, run.seconds(2) * 1e3,
              static_cast<double>(run.scratch_bytes()) / (1 << 20), out, d_qkv, d_gates,
              good ? "good" : "WRONG");
  return good;
}

int measure_all() {
  std::printf("%-12s %9s %9s %7s   %s\n", "", "fwd ms", "bwd ms", "MiB",
              "off from fp32: out, d_qkv, d_gates");
  bool good = true;
  for (const int32_t sequences : {1, 2, 4}) good = measure(sequences, 4096) && good;
  return good ? EXIT_SUCCESS : EXIT_FAILURE;
}

}  // namespace
}  // namespace troupe

int main() {
  try {
    return troupe::measure_all();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return EXIT_FAILURE;
  }
}
