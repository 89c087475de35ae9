// Activations and their gradients that are quantised as they are made, on a GPU: the codes are
// those of one operation after the other, bit for bit, in tiles and otherwise.
#include <cmath>
#include <gtest/gtest.h>

#include "cuda/gpu.h"
#include "support/activation_codes.h"
#include "support/sample_run.h"

namespace troupe::testing {
namespace {

std::vector<std::vector<double>> run_on_gpu(const ActivationCodes& form, bool as_made) {
  SampleRun run(activation_codes(form, as_made), {.dtype = DType::bf16, .device = Device::cuda});
  run.run();
  return run.results();
}

void expect_same(const ActivationCodes& form) {
  const auto found = run_on_gpu(form, true);
  const auto expected = run_on_gpu(form, false);
  ASSERT_EQ(found.size(), expected.size());
  for (size_t i = 0; i < found.size(); ++i) {
    if (i > 0 || !form.is_gradient) {
      EXPECT_EQ(found[i], expected[i]) << "result " << i;
      continue;
    }
    // Gradients of the router's weights, sums of f terms of order one in f32 in another order: off
    // by f 2^-24 of the sum of their magnitudes at most, which is some f.
    const auto f = static_cast<double>(form.f);
    ASSERT_EQ(found[i].size(), expected[i].size());
    for (size_t slot = 0; slot < found[i].size(); ++slot) {
      EXPECT_NEAR(found[i][slot], expected[i][slot], f * f * 0x1p-24) << "slot " << slot;
    }
  }
}

TEST(CudaQuantizeActivation, GivesTheCodesOfTheStoredActivation) {
  TROUPE_NEED_GPU();
  const QuantizeAttributes whole{.order = CodesOrder::both, .measures = true};
  const QuantizeAttributes lines{.rule = ScaleRule::power_of_two,
                                 .block = {1, 128},
                                 .order = CodesOrder::both,
                                 .transposed_block = {128, 1}};
  for (int function = 0; function <= static_cast<int>(ActivationFunction::squared_relu);
       ++function) {
    for (const bool gated : {true, false}) {
      ActivationCodes form{
          .activation = {.function = static_cast<ActivationFunction>(function), .gated = gated},
          .starts = {0, 0, 131, 131, 390, 400}};
      if (gated) form.activation.clamp = 1.5;
      SCOPED_TRACE(kActivation.print_attributes(Attributes(form.activation)));
      for (const bool is_gradient : {false, true}) {
        SCOPED_TRACE(is_gradient ? "gradient" : "activation");
        form.is_gradient = is_gradient;
        form.codes = lines;
        form.f = 384;
        expect_same(form);
        form.f = 200;  // blocks of gated gradients lie across the halves
        expect_same(form);
        form.codes = whole;
        form.f = 264;  // the last tile is not full
        expect_same(form);
        if (is_gradient) form.codes.format = DType::f8e5m2;
        form.f = 39;  // one step after the other
        expect_same(form);
      }
    }
  }
}

}  // namespace
}  // namespace troupe::testing
