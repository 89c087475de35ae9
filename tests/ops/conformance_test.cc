// What every operation must satisfy, generated from its samples: the derivative agrees with finite
// differences; padding never matters; f32 and bf16 agree with f64; the number of threads, and reuse
// of memory, change no bit.
#include <cmath>
#include <gtest/gtest.h>
#include <set>
#include <string>
#include <vector>

#include "ops/registry.h"
#include "support/sample_run.h"

namespace troupe::testing {
namespace {

struct Case {
  const OpSpec* spec;
  OpSample sample;
};

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  for (const OpSpec* spec : all_operations()) {
    if (spec->samples == nullptr) continue;
    for (const OpSample& sample : spec->samples()) cases.push_back({spec, sample});
  }
  return cases;
}

std::string case_name(const ::testing::TestParamInfo<Case>& info) {
  std::string name = std::string(info.param.spec->name) + "_" + info.param.sample.name;
  for (char& c : name) {
    if (std::isalnum(static_cast<unsigned char>(c)) == 0) c = '_';
  }
  return name;
}

double norm(const std::vector<double>& values) {
  double sum = 0;
  for (const double value : values) sum += value * value;
  return std::sqrt(sum);
}

// Largest L2 norm of the difference over the L2 norm of the reference (or 1 where that is tiny).
void expect_close(const std::vector<std::vector<double>>& actual,
                  const std::vector<std::vector<double>>& reference, double tolerance,
                  const std::string& what) {
  ASSERT_EQ(actual.size(), reference.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    ASSERT_EQ(actual[i].size(), reference[i].size()) << what << " " << i;
    std::vector<double> difference(actual[i].size());
    for (size_t j = 0; j < difference.size(); ++j) difference[j] = actual[i][j] - reference[i][j];
    const double scale = std::max(norm(reference[i]), 1e-3);
    EXPECT_LE(norm(difference) / scale, tolerance) << what << " " << i;
    EXPECT_FALSE(std::isnan(norm(difference))) << what << " " << i << " holds NaN";
  }
}

void expect_identical(const SampleRun& a, const SampleRun& b, const std::string& what) {
  EXPECT_EQ(a.results(), b.results()) << what << ": results differ";
  EXPECT_EQ(a.gradients(), b.gradients()) << what << ": gradients differ";
}

class Conformance : public ::testing::TestWithParam<Case> {};

// Central differences with step h: the error is h^2 f'''/6 + eps |f| / h. With h = 1e-5 and f, f'''
// of order one to a hundred that is below 1e-8; 1e-6 leaves room for steep samples.
TEST_P(Conformance, DerivativeAgreesWithFiniteDifferences) {
  if (GetParam().spec->differentiate == nullptr) return;
  constexpr double kStep = 1e-5;
  constexpr double kTolerance = 1e-6;
  SampleRun run(GetParam().sample, {.dtype = DType::f64});
  run.run();
  const auto gradients = run.gradients();
  SampleRun forward(GetParam().sample, {.dtype = DType::f64, .backward = false});
  bool checked = false;
  for (size_t i = 0; i < run.inputs().size(); ++i) {
    if (!run.inputs()[i].differentiable) continue;
    double largest = 1.0;
    for (const double value : gradients[i]) largest = std::max(largest, std::abs(value));
    const int64_t live = run.live_elements(run.inputs()[i].id);
    for (int64_t j = 0; j < live; ++j) {
      forward.run(i, j, kStep);
      const double above = forward.objective();
      forward.run(i, j, -kStep);
      const double below = forward.objective();
      const double numeric = (above - below) / (2 * kStep);
      // An input that no result depends on has no gradient; then the differences must be zero.
      const double analytic = gradients[i].empty() ? 0.0 : gradients[i][static_cast<size_t>(j)];
      ASSERT_NEAR(analytic, numeric, kTolerance * largest)
          << run.program().value(run.inputs()[i].id).name << " element " << j;
      checked = true;
    }
  }
  EXPECT_TRUE(checked) << "the sample has no differentiable input";
}

// Frozen inputs and first layers need no gradient: the others' must not hang on them.
TEST_P(Conformance, EachGradientAloneIsThatAmongAll) {
  if (GetParam().spec->differentiate == nullptr) return;
  SampleRun all(GetParam().sample, {.dtype = DType::f64});
  all.run();
  const auto gradients = all.gradients();
  for (size_t i = 0; i < all.inputs().size(); ++i) {
    if (!all.inputs()[i].differentiable) continue;
    SampleRun alone(GetParam().sample, {.dtype = DType::f64, .only_gradient = i});
    alone.run();
    EXPECT_EQ(alone.gradients()[i], gradients[i])
        << "of " << all.program().value(all.inputs()[i].id).name;
  }
}

// Programs, profiles and messages are read by these names. One of several results of an operation
// has a point in its name; a cotangent that a rule hands through keeps its own.
TEST_P(Conformance, GradientsAreNamedAfterTheirInputs) {
  if (GetParam().spec->differentiate == nullptr) return;
  const SampleRun run(GetParam().sample, {.dtype = DType::f64});
  for (size_t i = 0; i < run.inputs().size(); ++i) {
    const ValueId gradient = run.gradient_ids()[i];
    if (!gradient.valid() || run.program().value(gradient).role == Role::input) continue;
    const std::string& input = run.program().value(run.inputs()[i].id).name;
    const std::string& name = run.program().value(gradient).name;
    EXPECT_TRUE(name.find('.') != std::string::npos || name == "d_" + input)
        << name << ", " << input;
  }
}

TEST_P(Conformance, PaddingNeverMatters) {
  SampleRun poisoned(GetParam().sample, {.dtype = DType::f32, .poison_padding = true});
  SampleRun clean(GetParam().sample, {.dtype = DType::f32, .poison_padding = false});
  poisoned.run();
  clean.run();
  expect_identical(poisoned, clean, "NaN and zero padding");
}

// What lies between tensors is neither read, where it would make results NaN, nor written.
TEST_P(Conformance, StaysInsideItsTensors) {
  const SampleRunOptions options = {.dtype = DType::f32, .threads = 2, .oracle = true};
  SampleRun guarded(GetParam().sample, options);
  SampleRun plain(GetParam().sample, options);
  guarded.fill_gaps();
  guarded.run();
  plain.run();
  EXPECT_EQ(guarded.find_written_gap(), "") << "the memory after this value was written";
  expect_identical(guarded, plain, "NaN and zero between tensors");
}

// Narrow types need scratch memory for their operands in wide ones.
TEST_P(Conformance, StaysInsideItsScratchMemory) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    SampleRun run(GetParam().sample, {.dtype = dtype, .threads = 2, .oracle = true});
    EXPECT_EQ(run.find_overrun(), "") << name_of(dtype);
  }
}

// f32 arithmetic over sums of some hundred terms of order one: relative error near 1e-6.
TEST_P(Conformance, SinglePrecisionAgreesWithDouble) {
  SampleRun single(GetParam().sample, {.dtype = DType::f32});
  SampleRun reference(GetParam().sample, {.dtype = DType::f64});
  single.run();
  reference.run();
  expect_close(single.results(), reference.results(), 2e-5, "result");
  expect_close(single.gradients(), reference.gradients(), 2e-5, "gradient");
}

// Inputs are rounded in both runs, so only the roundings inside the operation and of its results
// differ: a few times 2^-9 = 0.002 relative in bf16; in f16 2^-12, and more of what is below 2^-14.
// Samples of numbers beyond f16 are not for it.
TEST_P(Conformance, HalfPrecisionAgreesWithDouble) {
  constexpr double kLargestF16 = 65504;
  for (const auto& [dtype, tolerance] :
       {std::pair(DType::bf16, 1e-2), std::pair(DType::f16, 2.5e-3)}) {
    SCOPED_TRACE(name_of(dtype));
    SampleRun rounded(GetParam().sample, {.dtype = dtype, .rounded_to = dtype});
    SampleRun reference(GetParam().sample, {.dtype = DType::f64, .rounded_to = dtype});
    if (dtype == DType::f16 && reference.largest_input() > kLargestF16) continue;
    rounded.run();
    reference.run();
    expect_close(rounded.results(), reference.results(), tolerance, "result");
    expect_close(rounded.gradients(), reference.gradients(), tolerance, "gradient");
  }
}

TEST_P(Conformance, ThreadsChangeNoBit) {
  for (const DType dtype : {DType::f32, DType::f64, DType::bf16}) {
    SampleRun one(GetParam().sample, {.dtype = dtype, .threads = 1});
    SampleRun three(GetParam().sample, {.dtype = dtype, .threads = 3});
    one.run();
    three.run();
    expect_identical(one, three, "1 and 3 threads");
  }
}

TEST_P(Conformance, PlannedRunEqualsOracle) {
  for (const DType dtype : {DType::f32, DType::f64, DType::bf16}) {
    SampleRun planned(GetParam().sample, {.dtype = dtype});
    SampleRun oracle(GetParam().sample, {.dtype = dtype, .oracle = true});
    planned.run();
    oracle.run();
    expect_identical(planned, oracle, "planned run and oracle");
  }
}

INSTANTIATE_TEST_SUITE_P(Operations, Conformance, ::testing::ValuesIn(all_cases()), case_name);

// Every kind is exercised: it has samples of its own, or occurs in those of another kind.
TEST(Registry, EveryKindIsExercised) {
  std::set<const OpSpec*> seen;
  for (const Case& c : all_cases()) {
    const SampleRun run(c.sample, {});
    for (int32_t i = 0; i < run.program().op_count(); ++i) seen.insert(run.program().op(i).spec);
  }
  // Neither state nor other ranks can be declared by a sample; these have tests of their own.
  const std::set<std::string> own_tests = {"adamw",
                                           "amax_history_update",
                                           "all_gather",
                                           "all_reduce",
                                           "clone_experts",
                                           "copy_to_ranks",
                                           "exchange_counts",
                                           "expert_bias_update",
                                           "finish_send",
                                           "gather_parameter",
                                           "gather_shards",
                                           "heads_to_sequence",
                                           "muon_momentum",
                                           "muon_update",
                                           "prefix_sum",
                                           "push_rows",
                                           "push_rows_back",
                                           "receive",
                                           "reduce_scatter",
                                           "reduce_shards",
                                           "return_clones",
                                           "return_rows",
                                           "ring_attention",
                                           "ring_attention_gradient",
                                           "send",
                                           "send_rows",
                                           "sequence_to_heads",
                                           "sum_over_ranks",
                                           "sum_parameter_gradient"};
  for (const OpSpec* spec : all_operations()) {
    EXPECT_TRUE(seen.contains(spec) || own_tests.contains(spec->name))
        << spec->name << " occurs in no sample";
  }
}

TEST(Registry, KindsAreComplete) {
  std::set<std::string> names;
  for (const OpSpec* spec : all_operations()) {
    ASSERT_NE(spec->name, nullptr);
    EXPECT_TRUE(names.insert(spec->name).second) << spec->name << " is registered twice";
    EXPECT_NE(spec->infer, nullptr) << spec->name;
    EXPECT_NE(spec->cost, nullptr) << spec->name;
    EXPECT_NE(spec->cpu.kernel, nullptr) << spec->name;
  }
}

}  // namespace
}  // namespace troupe::testing
