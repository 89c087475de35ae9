// The whole stack on a GPU against Hugging Face transformers: what `troupe verify --device cuda`
// does, for every reference model in every compute type.
#include <algorithm>
#include <filesystem>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <string>
#include <vector>

#include "cuda/gpu.h"
#include "train/verify_reference.h"

namespace troupe::testing {
namespace {

struct Case {
  std::string fixture;
  DType dtype;
};

// Where the source folder was when this was built, or, on a machine that only runs it, below the
// current folder.
std::string fixture_folder() {
  const std::string built = TROUPE_FIXTURE_DIR "/hf/";
  return std::filesystem::exists(built) ? built : "tests/fixtures/hf/";
}

std::vector<Case> all_cases() {
  std::vector<std::string> names;
  std::error_code error;  // a missing folder gives no cases, and no test, which gtest reports
  for (const auto& entry : std::filesystem::directory_iterator(fixture_folder(), error)) {
    // Its reference is rounded more than the tolerances are: QwenNextReference
    // (tests/train/verify_reference_test.cc).
    if (entry.path().filename() == "qwen3_next") continue;
    if (entry.is_directory()) names.push_back(entry.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  std::vector<Case> cases;
  for (const std::string& name : names) {
    for (const DType dtype : {DType::f32, DType::f64, DType::bf16}) cases.push_back({name, dtype});
  }
  return cases;
}

class CudaReference : public ::testing::TestWithParam<Case> {};

// What `troupe verify` accepts.
TEST_P(CudaReference, Agrees) {
  TROUPE_NEED_GPU();
  const DType dtype = GetParam().dtype;
  const ReferenceComparison result =
      verify_reference(fixture_folder() + GetParam().fixture, dtype,
                       /*with_oracle=*/true, {.spec = {.device = Device::cuda}});
  report(fmt::format(
      "reference {:<26} {:<4} {} logits {:.1e} loss {:.1e} gradients {:.1e} ({}), all {:.1e} "
      "trajectory {:.1e} oracle {}",
      GetParam().fixture, name_of(dtype), result.pass ? "pass" : "FAIL", result.logits_max_abs,
      std::abs(result.loss - result.loss_ref), result.grad_worst_rel, result.grad_worst_name,
      result.grad_all_rel, result.trajectory_max_abs,
      result.oracle_identical ? "identical" : "DIFFERS"));
  EXPECT_TRUE(result.oracle_identical);
  EXPECT_TRUE(result.pass);
}

INSTANTIATE_TEST_SUITE_P(Models, CudaReference, ::testing::ValuesIn(all_cases()),
                         [](const ::testing::TestParamInfo<Case>& info) {
                           return info.param.fixture + "_" + std::string(name_of(info.param.dtype));
                         });

}  // namespace
}  // namespace troupe::testing
