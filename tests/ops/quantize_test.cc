// Codes and scales against the formulas of the recipes, written out here, and products of operands
// in 8 bits against plain sums of what the codes stand for.
#include "ops/precision/quantize/quantize.h"

#include <algorithm>
#include <cmath>
#include <gtest/gtest.h>
#include <string>
#include <vector>

#include "ops/experts/permute/permute.h"
#include "ops/precision/quantized_grouped_linear/quantized_grouped_linear.h"
#include "ops/precision/quantized_linear/quantized_linear.h"
#include "ops/precision/quantized_product.h"
#include "support/activation_codes.h"
#include "value_test_support.h"

namespace troupe::testing {
namespace {

using Numbers = std::vector<double>;

constexpr DType kE4 = DType::f8e4m3;
constexpr DType kE5 = DType::f8e5m2;

// The identity [n, n] in e4m3, by which a product shows what codes stand for.
Codes identity(SampleBuilder& sample, int64_t n) {
  Numbers ones(static_cast<size_t>(n * n), 0);
  for (int64_t i = 0; i < n; ++i) ones[static_cast<size_t>(i * n + i)] = 1;
  SampleBuilder::Options constant;
  constant.differentiable = false;
  const ValueId one = sample.values("one", {n, n}, ones, constant);
  return quantize(sample.builder(), one, {}, {}, {kE4, ScaleRule::power_of_two, {}}, "one_q").rows;
}

// What the codes of x [rows, columns] stand for, in f64. With `starts`, rows belong to experts.
Numbers quantized_numbers(const Numbers& x, int64_t rows, int64_t columns,
                          const QuantizeAttributes& attributes,
                          const std::vector<int32_t>& starts = {}) {
  return run_sample([&](SampleBuilder& sample) {
    SampleBuilder::Options constant;
    constant.differentiable = false;
    const ValueId values = sample.values("x", {rows, columns}, x, constant);
    const Codes one = identity(sample, columns);
    ValueId offsets;
    if (!starts.empty()) {
      offsets = sample.integers("offsets", {static_cast<int64_t>(starts.size())}, starts);
    }
    const Codes q = quantize(sample.builder(), values, offsets, {}, attributes, "q").rows;
    QuantizedProductAttributes product{.compute = DType::f64};
    product.operands[0].block = attributes.block;
    if (starts.empty()) {
      sample.result_without_gradient(
          sample.builder().emit(kQuantizedLinear, Attributes(product),
                                {q.codes, one.codes, q.scales, one.scales, ValueId{}}, "y")[0]);
      return;
    }
    // The same of each expert.
    const auto experts = static_cast<int64_t>(starts.size()) - 1;
    Numbers ones(static_cast<size_t>(experts * columns * columns), 0);
    for (int64_t i = 0; i < experts * columns; ++i) {
      ones[static_cast<size_t>(i * columns + i % columns)] = 1;
    }
    const ValueId each = sample.values("each", {experts, columns, columns}, ones, constant);
    const Codes all =
        quantize(sample.builder(), each, {}, {}, {kE4, ScaleRule::power_of_two, {}}, "each_q").rows;
    sample.result_without_gradient(
        sample.builder().emit(kQuantizedGroupedLinear, Attributes(product),
                              {q.codes, all.codes, q.scales, all.scales, offsets}, "y")[0]);
  })[0];
}

double e4m3(double value) {
  return f8e4m3::nearest(static_cast<float>(value));
}
double e5m2(double value) {
  return f8e5m2::nearest(static_cast<float>(value));
}

double largest_of(const Numbers& x) {
  double largest = 0;
  for (const double value : x) largest = std::max(largest, std::fabs(value));
  return largest;
}

// Of the elements whose `block` has the same number.
template <class Block>
Numbers in_blocks(const Numbers& x, const Block& block, const auto& round) {
  Numbers result(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    Numbers members;
    for (size_t j = 0; j < x.size(); ++j) {
      if (block(j) == block(i)) members.push_back(x[j]);
    }
    result[i] = round(x[i], largest_of(members));
  }
  return result;
}

// The least power of two with which the largest number is not above 448.
double power_scale(double amax) {
  if (amax == 0) return 1;
  double scale = 0x1p-100;
  while (amax / scale > 448) scale *= 2;
  return scale;
}
double round_power(double value, double amax) {
  return e4m3(value / power_scale(amax)) * power_scale(amax);
}

TEST(Quantize, OneScaleOfATensor) {
  const Numbers x = normal_numbers(35, 1);
  const float f = 448 / static_cast<float>(largest_of(x));
  const float wide = 57344 / static_cast<float>(largest_of(x));
  const Numbers found = quantized_numbers(x, 5, 7, {kE4, ScaleRule::ratio, {}});
  const Numbers found_e5m2 = quantized_numbers(x, 5, 7, {kE5, ScaleRule::ratio, {}});
  for (size_t i = 0; i < x.size(); ++i) {
    const auto narrow = static_cast<float>(x[i]);
    EXPECT_EQ(found[i], e4m3(narrow * f) * double{1 / f}) << i;
    EXPECT_EQ(found_e5m2[i], e5m2(narrow * wide) * double{1 / wide}) << i;
    EXPECT_NEAR(found[i], x[i], std::fabs(x[i]) * 0x1p-4 + largest_of(x) * 0x1p-18) << i;
  }
}

// With a scale from elsewhere: what is too large saturates, and is what is measured.
TEST(Quantize, ByALargestElementOfBefore) {
  const Numbers x = {0.25, -3, 0.5, 1, 7, -0.001};
  const auto found = run_sample([&](SampleBuilder& sample) {
    SampleBuilder::Options constant;
    constant.differentiable = false;
    const ValueId values = sample.values("x", {2, 3}, x, constant);
    constant.dtype = DType::f32;
    const ValueId before = sample.values("before", {1, 1}, {1}, constant);
    const Quantized q = quantize(sample.builder(), values, {}, before, {.measures = true}, "q");
    const Codes one = identity(sample, 3);
    sample.result_without_gradient(q.amax);
    sample.result_without_gradient(sample.builder().emit(
        kQuantizedLinear, Attributes(QuantizedProductAttributes{.compute = DType::f64}),
        {q.rows.codes, one.codes, q.rows.scales, one.scales, ValueId{}}, "y")[0]);
  });
  EXPECT_EQ(found[0], Numbers{7});
  const double scale = 1 / 448.0F;
  for (size_t i = 0; i < x.size(); ++i) {
    const double inside = std::clamp(x[i], -1.0, 1.0);
    EXPECT_EQ(found[1][i], e4m3(inside * 448) * scale) << x[i];
  }
}

TEST(Quantize, BlocksAlongRowsAndColumnsAndSquares) {
  const int64_t columns = 13;
  const Numbers x = normal_numbers(11 * columns, 2);
  for (const BlockShape block : {BlockShape{1, 4}, BlockShape{4, 1}, BlockShape{4, 4}}) {
    SCOPED_TRACE(to_string(block));
    const auto of = [&](size_t i) {
      const auto row = static_cast<int64_t>(i) / columns;
      const auto column = static_cast<int64_t>(i) % columns;
      return row / block.rows * 1000 + column / block.columns;
    };
    const Numbers expected = in_blocks(x, of, round_power);
    EXPECT_EQ(quantized_numbers(x, 11, columns, {kE4, ScaleRule::power_of_two, block}), expected);
    EXPECT_EQ(quantized_numbers(x, 11, columns, {kE4, ScaleRule::exponent, block}), expected);
  }
}

// Blocks of rows begin with each expert's first row.
TEST(Quantize, ExpertsShareNoScale) {
  const int64_t columns = 3;
  const std::vector<int32_t> starts = {0, 0, 7, 7, 8, 16};
  Numbers x = normal_numbers(16 * columns, 3);
  for (size_t i = 0; i < 21; ++i) x[i] *= 1000;  // of the first expert with rows
  const auto expert = [&](size_t i) {
    const auto row = static_cast<int32_t>(i / 3);
    return std::upper_bound(starts.begin(), starts.end(), row) - starts.begin() - 1;
  };
  const auto of = [&](size_t i) {
    const auto row = static_cast<int64_t>(i / 3);
    const int64_t begin = starts[static_cast<size_t>(expert(i))];
    return (expert(i) * 100 + (row - begin) / 4) * 10 + static_cast<int64_t>(i % 3);
  };
  EXPECT_EQ(quantized_numbers(x, 16, columns, {kE4, ScaleRule::power_of_two, {4, 1}}, starts),
            in_blocks(x, of, round_power));
  const Numbers whole = quantized_numbers(x, 16, columns, {kE4, ScaleRule::ratio, {}}, starts);
  const Numbers expected = in_blocks(x, expert, [](double value, double amax) {
    const float f = 448 / static_cast<float>(amax);
    return e4m3(static_cast<float>(value) * f) * double{1 / f};
  });
  EXPECT_EQ(whole, expected);
}

// A weight gradient of transposed codes is the sum over each expert's own rows: experts with 0, 1,
// 128, 129 and 2 rows, so that blocks of 128 rows are empty, full, and begun anew.
TEST(Quantize, TransposedCodesBeginAtEachExpertsFirstRow) {
  const std::vector<int32_t> starts = {0, 0, 1, 129, 258, 260};
  const int64_t rows = 265, outputs = 3, inputs = 5;
  const QuantizeAttributes across{
      kE4, ScaleRule::power_of_two, {}, CodesOrder::transposed, {128, 1}};
  const Numbers x = normal_numbers(rows * inputs, 12);
  const Numbers dy = normal_numbers(rows * outputs, 13);
  const auto found = run_sample([&](SampleBuilder& sample) {
    SampleBuilder::Options constant;
    constant.differentiable = false;
    Builder& builder = sample.builder();
    const ValueId offsets = sample.integers("offsets", {6}, starts);
    constant.rows = offsets;
    constant.rows_element = 5;
    const ValueId xs = sample.values("x", {rows, inputs}, x, constant);
    const ValueId dys = sample.values("dy", {rows, outputs}, dy, constant);
    const Codes of_x = quantize(builder, xs, offsets, {}, across, "x_q").transposed;
    const Codes of_dy = quantize(builder, dys, offsets, {}, across, "dy_q").transposed;
    EXPECT_EQ(builder.value(of_x.codes).shape, Shape({265 / 128 + 5, inputs, 128}));
    const auto form = [&](ValueId value) {
      return QuantizedProductAttributes::transposed({128, 1}, builder.value(value).shape);
    };
    const QuantizedProductAttributes attributes{.compute = DType::f64,
                                                .operands = {form(dys), form(xs)}};
    sample.result_without_gradient(builder.emit(
        kQuantizedGroupedLinearWeightGradient, Attributes(attributes),
        {of_dy.codes, of_x.codes, of_dy.scales, of_x.scales, offsets, ValueId{}}, "dw")[0]);
  })[0];
  const QuantizeAttributes in_rows{kE4, ScaleRule::power_of_two, {128, 1}};
  const Numbers x_codes = quantized_numbers(x, rows, inputs, in_rows, starts);
  const Numbers dy_codes = quantized_numbers(dy, rows, outputs, in_rows, starts);
  for (size_t e = 0; e < 5; ++e) {
    for (int64_t n = 0; n < outputs; ++n) {
      for (int64_t k = 0; k < inputs; ++k) {
        double sum = 0;
        for (int64_t row = starts[e]; row < starts[e + 1]; ++row) {
          sum += dy_codes[static_cast<size_t>(row * outputs + n)] *
                 x_codes[static_cast<size_t>(row * inputs + k)];
        }
        // Sums of 129 products below 16.
        EXPECT_NEAR(found[(e * 3 + static_cast<size_t>(n)) * 5 + static_cast<size_t>(k)], sum,
                    1e-12)
            << e << " " << n << " " << k;
      }
    }
  }
}

// Of permuted rows, or gathered as they are quantised: scales, largest elements, what codes in rows
// stand for, and of transposed codes the sums of products of two columns over each expert's rows.
std::vector<Numbers> of_permuted_rows(bool gathers, BlockShape along_rows, BlockShape along_columns,
                                      bool measures) {
  return run_sample([&](SampleBuilder& sample) {
    Builder& builder = sample.builder();
    constexpr int64_t kColumns = 20;
    // Expert 2 has no rows, and each other one fillers.
    const ValueId indices = sample.integers("indices", {5, 2}, {3, 0, 1, 3, 0, 1, 3, -1, 0, 3});
    const Routing routing = route(builder, indices, {.experts = 4, .row_multiple = 4}, "routing");
    SampleBuilder::Options constant;
    constant.differentiable = false;
    const ValueId x = sample.tensor("x", {5, kColumns}, constant);
    QuantizeAttributes attributes{.rule = ScaleRule::power_of_two,
                                  .block = along_rows,
                                  .order = CodesOrder::both,
                                  .transposed_block = along_columns,
                                  .measures = measures};
    ValueId amax;
    if (measures) {
      SampleBuilder::Options before = constant;
      before.dtype = DType::f32;
      amax = sample.values("amax", {4, 1}, Numbers(4, 0.5), before);
    }
    if (gathers) attributes.top_k = 2;
    const Quantized q =
        gathers ? quantize(builder, x, routing.offsets, amax, attributes, "q", routing.row_slot)
                : quantize(builder, permute(builder, x, routing, "rows"), routing.offsets, amax,
                           attributes, "q");
    if (measures) sample.result_without_gradient(q.amax);
    show_codes(sample, q, routing.offsets, 4, along_rows, along_columns);
  });
}

TEST(Quantize, GathersTheRowsThatPermuteWouldStore) {
  EXPECT_EQ(of_permuted_rows(true, {1, 8}, {8, 1}, false),
            of_permuted_rows(false, {1, 8}, {8, 1}, false));
  EXPECT_EQ(of_permuted_rows(true, {}, {}, true), of_permuted_rows(false, {}, {}, true));
}

TEST(Quantize, GivesActivationsTheCodesThatTheyWouldHaveOnceStored) {
  const QuantizeAttributes in_blocks{.rule = ScaleRule::power_of_two,
                                     .block = {1, 8},
                                     .order = CodesOrder::both,
                                     .transposed_block = {8, 1}};
  for (const bool is_gradient : {false, true}) {
    SCOPED_TRACE(is_gradient);
    ActivationCodes form{.is_gradient = is_gradient,
                         .activation = {.clamp = 1.5},
                         .codes = in_blocks,
                         .f = 12,
                         .starts = {0, 5, 5, 13}};
    const auto run = [&](bool as_made) {
      return run_sample(activation_codes(form, as_made).build);
    };
    const std::vector<Numbers> blocks = run(true);
    EXPECT_EQ(blocks, run(false));
    EXPECT_NE(largest_of(blocks.back()), 0) << "the case shows nothing";
    form.codes = {.order = CodesOrder::both, .measures = true};
    EXPECT_EQ(run(true), run(false));
  }
}

// Wherever blocks are cut, a power of two leaves what the codes stand for alone, except elements
// that are so small that their codes have no exponent: docs/low_precision.md.
TEST(Quantize, OtherBlocksMoveOnlySmallNumbers) {
  Numbers x = normal_numbers(64, 4);
  for (size_t i = 0; i < x.size(); ++i) x[i] *= std::ldexp(1.0, -static_cast<int>(i % 24));
  const double amax = largest_of(x);
  const Numbers one = quantized_numbers(x, 1, 64, {kE4, ScaleRule::power_of_two, {1, 64}});
  const Numbers other = quantized_numbers(x, 1, 64, {kE4, ScaleRule::power_of_two, {1, 24}});
  bool differs = false;
  for (size_t i = 0; i < x.size(); ++i) {
    if (std::fabs(x[i]) > amax * 0x1p-13) {
      EXPECT_EQ(one[i], other[i]) << i;
    } else {
      EXPECT_NEAR(one[i], other[i], amax * 0x1p-16) << i;
      differs = differs || one[i] != other[i];
    }
  }
  EXPECT_TRUE(differs) << "the case shows nothing";
}

TEST(Quantize, ZerosAndNumbersThatAreNone) {
  const Numbers zeros(8, 0.0);
  for (const ScaleRule rule : {ScaleRule::ratio, ScaleRule::power_of_two, ScaleRule::exponent}) {
    EXPECT_EQ(quantized_numbers(zeros, 2, 4, {kE4, rule, {}}), zeros);
  }
  Numbers x = {1, 2, 3, std::nan("")};
  const Numbers found = quantized_numbers(x, 2, 2, {kE4, ScaleRule::ratio, {}});
  EXPECT_TRUE(std::isnan(found[3]));
}

// With the amax of other tensors beside one's own, the largest of all counts.
TEST(Quantize, TheLargestOfAllPartsCounts) {
  const Numbers x = normal_numbers(6, 5);
  const auto scale_with = [&](double other) {
    return run_sample([&](SampleBuilder& sample) {
      SampleBuilder::Options constant;
      constant.differentiable = false;
      const ValueId values = sample.values("x", {2, 3}, x, constant);
      SampleBuilder::Options narrow = constant;
      narrow.dtype = DType::f32;
      const ValueId amax = sample.values("amax", {2, 1}, {largest_of(x), other}, narrow);
      sample.result_without_gradient(
          quantize(sample.builder(), values, {}, amax, {kE4, ScaleRule::ratio, {}}, "q")
              .rows.scales);
    })[0][0];
  };
  EXPECT_EQ(scale_with(0), 1 / (448 / static_cast<float>(largest_of(x))));
  EXPECT_EQ(scale_with(44800), 1 / (448 / 44800.0F));
}

// All three products, of operands with scales of their own, against sums written out.
TEST(QuantizedLinear, IsTheProductOfWhatCodesStandFor) {
  const int64_t rows = 6, inputs = 10, outputs = 4;
  const Numbers x = normal_numbers(rows * inputs, 6);
  const Numbers w = normal_numbers(outputs * inputs, 7);
  const Numbers dy = normal_numbers(rows * outputs, 8);
  const QuantizeAttributes along{kE4, ScaleRule::power_of_two, {1, 4}};
  const QuantizeAttributes across{kE4, ScaleRule::power_of_two, {4, 1}};
  const QuantizeAttributes square{kE4, ScaleRule::power_of_two, {4, 4}};
  const auto results = run_sample([&](SampleBuilder& sample) {
    SampleBuilder::Options constant;
    constant.differentiable = false;
    Builder& builder = sample.builder();
    const ValueId xs = sample.values("x", {rows, inputs}, x, constant);
    const ValueId ws = sample.values("w", {outputs, inputs}, w, constant);
    const ValueId dys = sample.values("dy", {rows, outputs}, dy, constant);
    using Form = QuantizedProductAttributes;
    const auto in_both = [&](ValueId value, QuantizeAttributes in_rows, BlockShape columns) {
      in_rows.order = CodesOrder::both;
      in_rows.transposed_block = columns;
      return quantize(builder, value, {}, {}, in_rows, "q");
    };
    const auto product = [&](const OpSpec& kind, Codes one, const Form::Operand& of_one,
                             Codes other, const Form::Operand& of_other, bool has_last) {
      std::vector<ValueId> operands = {one.codes, other.codes, one.scales, other.scales};
      if (has_last) operands.emplace_back();
      const Form attributes{.compute = DType::f64, .operands = {of_one, of_other}};
      sample.result_without_gradient(builder.emit(kind, Attributes(attributes), operands, "y")[0]);
    };
    const Quantized of_x = in_both(xs, along, across.block);
    const Quantized of_w = in_both(ws, square, square.block);
    const Quantized of_dy = in_both(dys, along, across.block);
    const auto transposed = [&](ValueId value, BlockShape block) {
      return Form::transposed(block, builder.value(value).shape);
    };
    product(kQuantizedLinear, of_x.rows, {along.block}, of_w.rows, {square.block}, true);
    product(kQuantizedLinearDataGradient, of_dy.rows, {along.block}, of_w.transposed,
            transposed(ws, square.block), false);
    product(kQuantizedLinearWeightGradient, of_dy.transposed, transposed(dys, across.block),
            of_x.transposed, transposed(xs, across.block), true);
  });
  const Numbers x_rows = quantized_numbers(x, rows, inputs, along);
  const Numbers x_columns = quantized_numbers(x, rows, inputs, across);
  const Numbers dy_rows = quantized_numbers(dy, rows, outputs, along);
  const Numbers dy_columns = quantized_numbers(dy, rows, outputs, across);
  const Numbers weight = quantized_numbers(w, outputs, inputs, square);
  const auto at = [](const Numbers& values, int64_t row, int64_t columns, int64_t column) {
    return values[static_cast<size_t>(row * columns + column)];
  };
  for (int64_t t = 0; t < rows; ++t) {
    for (int64_t n = 0; n < outputs; ++n) {
      double sum = 0;
      for (int64_t k = 0; k < inputs; ++k)
        sum += at(x_rows, t, inputs, k) * at(weight, n, inputs, k);
      EXPECT_NEAR(at(results[0], t, outputs, n), sum, 1e-13);
    }
    for (int64_t k = 0; k < inputs; ++k) {
      double sum = 0;
      for (int64_t n = 0; n < outputs; ++n) {
        sum += at(dy_rows, t, outputs, n) * at(weight, n, inputs, k);
      }
      EXPECT_NEAR(at(results[1], t, inputs, k), sum, 1e-13);
    }
  }
  for (int64_t n = 0; n < outputs; ++n) {
    for (int64_t k = 0; k < inputs; ++k) {
      double sum = 0;
      for (int64_t t = 0; t < rows; ++t) {
        sum += at(dy_columns, t, outputs, n) * at(x_columns, t, inputs, k);
      }
      EXPECT_NEAR(at(results[2], n, inputs, k), sum, 1e-13);
    }
  }
}

}  // namespace
}  // namespace troupe::testing
