// Every operation with a CUDA kernel against the CPU, generated from the samples of its folder and
// from larger ones: results and gradients agree, NaN in the padding changes nothing, a second run
// and a run without any reuse of memory give the same bits. One test, and one line of the report,
// for each kind and dtype.
#include <cctype>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <map>
#include <string>
#include <vector>

#include "base/error.h"
#include "cuda/gpu.h"
#include "cuda/large_samples.h"
#include "cuda/sample_variants.h"
#include "ops/registry.h"
#include "runtime/device_memory.h"
#include "support/distance.h"
#include "support/sample_run.h"

namespace troupe::testing {
namespace {

struct Case {
  const OpSpec* spec;
  DType dtype;
};

bool is_large(const OpSpec& spec) {
  for (const LargeSample& large : large_samples()) {
    if (large.spec == &spec) return true;
  }
  return false;
}

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  for (const OpSpec* spec : all_operations()) {
    if (spec->samples == nullptr && !is_large(*spec)) continue;
    for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16})
      cases.push_back({spec, dtype});
  }
  return cases;
}

std::vector<OpSample> samples_of(const OpSpec& spec) {
  std::vector<OpSample> samples;
  if (spec.samples != nullptr) samples = spec.samples();
  for (const LargeSample& large : large_samples()) {
    if (large.spec == &spec) samples.push_back(large.sample);
  }
  return samples;
}

// Both sides round at the same places, so only the order of sums, and in types of 2 bytes single
// roundings that fall to the other side, may differ: f16 has 8 times the mantissa of bf16, and less
// below 2^-14. Sums have up to some thousand terms of order one.
double tolerance_of(DType dtype) {
  if (dtype == DType::f64) return 1e-11;
  if (dtype == DType::f32) return 2e-5;
  return dtype == DType::f16 ? 2.5e-3 : 1e-2;
}

struct Worst {
  double distance = 0;
  std::string where = "nothing";
};

void compare(const std::vector<std::vector<double>>& actual,
             const std::vector<std::vector<double>>& reference, const std::string& what,
             Worst& worst) {
  for (size_t i = 0; i < reference.size(); ++i) {
    const double off = distance(actual[i], reference[i]);
    if (off < worst.distance || (off == 0 && worst.distance == 0)) continue;
    worst = {off, fmt::format("{} {}", what, i)};
  }
}

constexpr double kLargestF16 = 65504;

class CudaOperation : public ::testing::TestWithParam<Case> {};

TEST_P(CudaOperation, AgreesWithTheCpu) {
  TROUPE_NEED_GPU();
  const OpSpec& spec = *GetParam().spec;
  const DType dtype = GetParam().dtype;
  const double tolerance = tolerance_of(dtype);
  Worst worst_of_all;
  int failures = 0;
  int count = 0;
  for (const OpSample& sample : samples_of(spec)) {
    std::vector<std::string> faults;
    SampleRun cpu(sample, {.dtype = dtype});
    if (dtype == DType::f16 && cpu.largest_input() > kLargestF16) continue;
    ++count;
    try {
      cpu.run();
      SampleRun gpu(sample, {.dtype = dtype, .device = Device::cuda});
      gpu.run();
      Worst worst;
      compare(gpu.results(), cpu.results(), "result", worst);
      compare(gpu.gradients(), cpu.gradients(), "gradient", worst);
      if (!(worst.distance <= tolerance)) {
        faults.push_back(fmt::format("off by {:.2e} in {}", worst.distance, worst.where));
      }
      if (!(worst.distance <= worst_of_all.distance)) {
        worst_of_all = {worst.distance, fmt::format("'{}' {}", sample.name, worst.where)};
      }
      const auto results = gpu.results();
      const auto gradients = gpu.gradients();
      const auto same = [&](SampleRun& other, const std::string& what) {
        other.run();
        // NaN results would not even be equal to themselves; they are off already.
        if (other.results() != results || other.gradients() != gradients) faults.push_back(what);
      };
      same(gpu, "a second run gives other bits");
      SampleRun clean(sample, {.dtype = dtype, .poison_padding = false, .device = Device::cuda});
      same(clean, "padding matters");
      SampleRun oracle(sample, {.dtype = dtype, .oracle = true, .device = Device::cuda});
      same(oracle, "the oracle gives other bits");
    } catch (const UserError& error) {
      faults.push_back(error.what());
    }
    if (faults.empty()) continue;
    ++failures;
    for (const std::string& fault : faults) {
      ADD_FAILURE() << spec.name << " " << name_of(dtype) << " sample '" << sample.name
                    << "': " << fault;
    }
  }
  report(fmt::format("{:<34} {:<4} {:>2} samples, {} failed, worst {:.2e} of {:.0e} in {}",
                     spec.name, name_of(dtype), count, failures, worst_of_all.distance, tolerance,
                     worst_of_all.where));
}

INSTANTIATE_TEST_SUITE_P(Operations, CudaOperation, ::testing::ValuesIn(all_cases()),
                         [](const ::testing::TestParamInfo<Case>& info) {
                           return std::string(info.param.spec->name) + "_" +
                                  std::string(name_of(info.param.dtype));
                         });

// Samples are meant for kernels that are chosen by sizes and dtypes.
TEST(CudaOperations, SamplesGetTheKernelsThatTheyClaim) {
  TROUPE_NEED_GPU();
  const DeviceTraits gpu = device_traits(0);
  if (gpu.major() != 9) GTEST_SKIP() << "the table is that of Hopper";
  EXPECT_EQ(missing_variants(gpu), std::set<std::string>());
}

TEST(CudaOperations, AreComplete) {
  for (const OpSpec* spec : all_operations()) {
    EXPECT_NE(spec->cuda, nullptr) << spec->name;
  }
}

}  // namespace
}  // namespace troupe::testing
