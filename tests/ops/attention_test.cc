// Attention with dropout, documents and values of another size than keys, forward and backward,
// against the formulas of its header computed plainly in double: the whole matrix of scores at
// once, so that blocks have no part in it.
#include "ops/attention/attention/attention.h"

#include <algorithm>
#include <cmath>
#include <gtest/gtest.h>
#include <vector>

#include "ops/attention/attention/document_starts.h"
#include "ops/cpu/dropout_mask.h"
#include "ops/value_test_support.h"

namespace troupe::testing {
namespace {

using Numbers = std::vector<double>;

constexpr int64_t kStep = 17;

// Sequences of one block, of several, and of no multiple of four.
AttentionAttributes attributes_of(int32_t sequence, int32_t window, double probability) {
  return {.batch = 2,
          .sequence = sequence,
          .heads = 4,
          .groups = 2,
          .head_dim = 6,
          .scale = 0.4,
          .window = window,
          .substream = 9,
          .seed = 21,
          .probability = probability};
}

struct Reference {
  Numbers out, lse, d_qkv;
};

using Begins = std::vector<int64_t>;  // rows at which a document begins

// The header's sums, one probability after the other. Each one's word is drawn on its own.
Reference naive_attention(const AttentionAttributes& a, const Numbers& qkv, const Numbers& d_out,
                          const Begins& begins) {
  const DropoutMask mask(a.seed, a.substream, kStep, a.probability);
  const int64_t d = a.head_dim;
  const int64_t e = a.value_size();
  const int64_t width = (a.heads + a.groups) * d + a.groups * e;
  const int64_t padded = (a.sequence + 3) / 4 * 4;
  Reference result;
  result.out.assign(static_cast<size_t>(a.batch * a.sequence * a.heads * e), 0);
  result.lse.assign(static_cast<size_t>(a.batch * a.sequence * a.heads), 0);
  result.d_qkv.assign(qkv.size(), 0);
  for (int64_t b = 0; b < a.batch; ++b) {
    for (int64_t h = 0; h < a.heads; ++h) {
      const int64_t group = h / (a.heads / a.groups);
      for (int64_t i = 0; i < a.sequence; ++i) {
        const int64_t row = b * a.sequence + i;
        const double* q = qkv.data() + row * width + h * d;
        const double* go = d_out.data() + (row * a.heads + h) * e;
        double* out = result.out.data() + (row * a.heads + h) * e;
        double* dq = result.d_qkv.data() + row * width + h * d;
        const auto key_at = [&](int64_t j) {
          return (b * a.sequence + j) * width + (a.heads + group) * d;
        };
        const auto value_at = [&](int64_t j) {
          return (b * a.sequence + j) * width + (a.heads + a.groups) * d + group * e;
        };
        const auto dot = [](const double* x, const double* y, int64_t size) {
          double sum = 0;
          for (int64_t c = 0; c < size; ++c) sum += x[c] * y[c];
          return sum;
        };
        int64_t first = a.window == 0 ? 0 : std::max<int64_t>(0, i - a.window + 1);
        for (const int64_t begin : begins) {
          if (begin <= row) first = std::max(first, begin - b * a.sequence);
        }
        Numbers p;
        double total = 0;
        for (int64_t j = first; j <= i; ++j) {
          p.push_back(std::exp(a.scale * dot(q, qkv.data() + key_at(j), d)));
          total += p.back();
        }
        result.lse[static_cast<size_t>(row * a.heads + h)] = std::log(total);
        Numbers factor;
        for (int64_t j = first; j <= i; ++j) {
          const int64_t element = ((b * a.heads + h) * a.sequence + i) * padded + j;
          uint32_t word = 0;
          mask.draw(static_cast<uint64_t>(element), 1, &word);
          factor.push_back(mask.keeps(word) ? 1 / (1 - a.probability) : 0);
          const auto at = static_cast<size_t>(j - first);
          p[at] /= total;
          const double* v = qkv.data() + value_at(j);
          for (int64_t c = 0; c < e; ++c) out[c] += factor[at] * p[at] * v[c];
        }
        // dp_j = factor_j go . v_j,  ds_j = p_j (dp_j - sum over k of p_k dp_k)
        double along = 0;
        for (int64_t j = first; j <= i; ++j) {
          const auto at = static_cast<size_t>(j - first);
          along += p[at] * factor[at] * dot(go, qkv.data() + value_at(j), e);
        }
        for (int64_t j = first; j <= i; ++j) {
          const auto at = static_cast<size_t>(j - first);
          const double ds = p[at] * (factor[at] * dot(go, qkv.data() + value_at(j), e) - along);
          const double* k = qkv.data() + key_at(j);
          double* dk = result.d_qkv.data() + key_at(j);
          double* dv = result.d_qkv.data() + value_at(j);
          for (int64_t c = 0; c < d; ++c) {
            dq[c] += a.scale * ds * k[c];
            dk[c] += a.scale * ds * q[c];
          }
          for (int64_t c = 0; c < e; ++c) dv[c] += factor[at] * p[at] * go[c];
        }
      }
    }
  }
  return result;
}

struct AttentionData {
  explicit AttentionData(const AttentionAttributes& a)
      : rows(int64_t{a.batch} * a.sequence),
        width(a.fused().query_stride()),
        out_width(a.out_row()),
        qkv(normal_numbers(rows * width, 0)),
        d_out(normal_numbers(rows * out_width, 1)) {}
  int64_t rows, width, out_width;
  Numbers qkv, d_out;
};

// out, lse and d_qkv.
std::vector<Numbers> run_attention(const AttentionAttributes& a, const AttentionData& data,
                                   int64_t step_number, int threads, const Begins& begins = {}) {
  return run_sample(
      [&](SampleBuilder& sample) {
        const ValueId qkv = sample.values("qkv", {data.rows, data.width}, data.qkv, {});
        const ValueId d_out = sample.values("d_out", {data.rows, data.out_width}, data.d_out, {});
        const ValueId step =
            a.probability > 0 ? sample.integers64("step", {1}, {step_number}) : ValueId{};
        ValueId starts;
        if (!begins.empty()) {
          starts = sample.integers("starts", {data.rows},
                                   document_starts(a.batch, a.sequence, {}, begins));
        }
        const AttentionAttributes fused = a.fused();
        const auto forward = sample.builder().emit(kAttention, Attributes(fused),
                                                   {qkv, qkv, step, starts, {}}, "context");
        const auto d_qkv =
            sample.builder().emit(kAttentionGradient, Attributes(fused),
                                  {d_out, qkv, qkv, forward[0], forward[1], step, starts}, "d_qkv");
        for (const ValueId id : {forward[0], forward[1], d_qkv[0]}) sample.result(id);
      },
      DType::f64, threads);
}

void expect_formula(const AttentionAttributes& a, const Begins& begins) {
  const AttentionData data(a);
  const Reference expected = naive_attention(a, data.qkv, data.d_out, begins);
  const auto results = run_attention(a, data, kStep, 2, begins);
  const auto expect_near = [](const Numbers& actual, const Numbers& reference, const char* what) {
    ASSERT_EQ(actual.size(), reference.size());
    // Double arithmetic over sums of some hundred terms up to a hundred, in another order.
    for (size_t i = 0; i < actual.size(); ++i) {
      ASSERT_NEAR(actual[i], reference[i], 1e-11) << what << " " << i;
    }
  };
  expect_near(results[0], expected.out, "out");
  expect_near(results[1], expected.lse, "lse");
  expect_near(results[2], expected.d_qkv, "d_qkv");
}

TEST(Attention, AgreesWithItsFormula) {
  for (const double probability : {0.0, 0.3}) {
    for (const int32_t sequence : {1, 30, 301}) {
      // Of the windows of 2 and 130 tokens the last query that sees a block of 128 keys is the
      // first of another block.
      for (const int32_t window : {0, 2, 130, 150}) {
        SCOPED_TRACE(::testing::Message() << "probability " << probability << ", sequence "
                                          << sequence << ", window " << window);
        expect_formula(attributes_of(sequence, window, probability), {});
      }
    }
  }
}

TEST(Attention, TakesValuesOfAnotherSize) {
  for (const int32_t value_dim : {2, 9}) {
    for (const double probability : {0.0, 0.3}) {
      AttentionAttributes a = attributes_of(301, 130, probability);
      a.value_dim = value_dim;
      SCOPED_TRACE(::testing::Message() << "values of " << value_dim << ", " << probability);
      expect_formula(a, {});
      expect_formula(a, {128, 250, 429});
    }
  }
}

// Rows of two sequences of 301 tokens. Documents of one token at the ends of a sequence and of a
// block of 128; of whole blocks; across blocks; and the second sequence whole.
TEST(Attention, KeepsToDocuments) {
  const std::vector<Begins> all = {{1, 127, 128, 129, 256, 300, 302, 350, 429, 601},
                                   {128, 256, 429, 557},
                                   {100, 200, 250},
                                   {301}};
  for (const Begins& begins : all) {
    for (const double probability : {0.0, 0.3}) {
      for (const int32_t window : {0, 2, 130}) {
        SCOPED_TRACE(::testing::Message() << "probability " << probability << ", window " << window
                                          << ", documents at " << begins.front() << ", ...");
        expect_formula(attributes_of(301, window, probability), begins);
      }
    }
  }
}

// What other documents hold has no part in the bits of one, not even where blocks are shared.
TEST(Attention, DocumentsDoNotTouchEachOther) {
  const AttentionAttributes a = attributes_of(301, 0, 0.3);
  const Begins begins = {90, 200, 301};
  AttentionData data(a);
  const auto before = run_attention(a, data, kStep, 2, begins);
  for (int64_t row = 0; row < data.rows; ++row) {
    if (row >= 90 && row < 200) continue;
    for (int64_t c = 0; c < data.width; ++c)
      data.qkv[static_cast<size_t>(row * data.width + c)] *= -3;
    for (int64_t c = 0; c < data.out_width; ++c) {
      data.d_out[static_cast<size_t>(row * data.out_width + c)] *= 7;
    }
  }
  const auto after = run_attention(a, data, kStep, 2, begins);
  for (size_t result = 0; result < before.size(); ++result) {
    const auto width = static_cast<int64_t>(before[result].size()) / data.rows;
    for (int64_t i = 90 * width; i < 200 * width; ++i) {
      ASSERT_EQ(after[result][static_cast<size_t>(i)], before[result][static_cast<size_t>(i)])
          << "result " << result << " element " << i;
    }
  }
  EXPECT_NE(after[0], before[0]);
}

TEST(Attention, DropoutLeavesTheStatisticsOfTheSoftmax) {
  const AttentionAttributes with = attributes_of(150, 0, 0.4);
  const AttentionAttributes without = attributes_of(150, 0, 0);
  const AttentionData data(with);
  const auto dropped = run_attention(with, data, kStep, 1);
  const auto plain = run_attention(without, data, kStep, 1);
  EXPECT_EQ(dropped[1], plain[1]) << "lse";
  EXPECT_NE(dropped[0], plain[0]) << "out";
}

TEST(Attention, DropoutIsAFunctionOfTheStep) {
  const AttentionAttributes a = attributes_of(150, 0, 0.4);
  const AttentionData data(a);
  const auto first = run_attention(a, data, kStep, 1);
  EXPECT_EQ(run_attention(a, data, kStep, 3), first) << "same step, more threads";
  EXPECT_NE(run_attention(a, data, kStep + 1, 1)[0], first[0]) << "the next step";
}

// With equal scores and all values 1, an output is the share of its keys that are kept, over
// 1 - r: its mean over the masks is 1.
TEST(Attention, DropoutKeepsTheRightShare) {
  constexpr double kProbability = 0.25;
  const AttentionAttributes a = attributes_of(200, 0, kProbability);
  AttentionData data(a);
  std::fill(data.qkv.begin(), data.qkv.end(), 1.0);
  const auto results = run_attention(a, data, kStep, 1);
  double kept = 0;
  double keys = 0;
  for (int64_t row = 0; row < data.rows; ++row) {
    const double visible = static_cast<double>(row % a.sequence + 1);
    for (int64_t h = 0; h < a.heads; ++h) {
      const auto at = static_cast<size_t>((row * a.heads + h) * a.head_dim);
      kept += results[0][at] * (1 - kProbability) * visible;
      keys += visible;
    }
  }
  // Five standard deviations of independent draws.
  EXPECT_NEAR(kept, keys * (1 - kProbability),
              5 * std::sqrt(keys * kProbability * (1 - kProbability)));
}

}  // namespace
}  // namespace troupe::testing
