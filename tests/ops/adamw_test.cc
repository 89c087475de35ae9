// AdamW against a naive computation in double over several steps, and its rules for skipping,
// decay, bf16 parameters and gradients, and moments in fewer bits. (The generic tests cannot run
// it: it changes state.)
#include "ops/optimizer/adamw/adamw.h"

#include <algorithm>
#include <cmath>
#include <gtest/gtest.h>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/random.h"
#include "ops/optimizer/adamw/moment_blocks.h"
#include "program/verify.h"
#include "runtime/cpu/cpu_interpreter.h"

namespace troupe::testing {
namespace {

constexpr double kLearningRate = 0.01;
constexpr double kWeightDecay = 0.1;
constexpr int64_t kRows = 5;
constexpr int64_t kColumns = 8001;  // several chunks and a tail
constexpr int64_t kElements = kRows * kColumns;

std::vector<double> normals(uint32_t stream) {
  std::vector<double> values;
  for (uint64_t i = 0; i < kElements; ++i) {
    values.push_back(static_cast<float>(random_normal(8, RandomStream::test, stream, i)));
  }
  return values;
}

void write(const TensorView& view, const std::vector<double>& values) {
  for (size_t i = 0; i < values.size(); ++i) {
    if (view.dtype == DType::f64) view.as<double>()[i] = values[i];
    if (view.dtype == DType::f32) view.as<float>()[i] = static_cast<float>(values[i]);
    if (view.dtype == DType::bf16) view.as<bf16>()[i] = bf16(values[i]);
  }
}

std::vector<double> read(const TensorView& view) {
  std::vector<double> values(static_cast<size_t>(view.shape.elements()));
  for (size_t i = 0; i < values.size(); ++i) {
    if (view.dtype == DType::f64) values[i] = view.as<double>()[i];
    if (view.dtype == DType::f32) values[i] = static_cast<double>(view.as<float>()[i]);
    if (view.dtype == DType::bf16) values[i] = static_cast<double>(view.as<bf16>()[i]);
  }
  return values;
}

// A program that is one AdamW update, with its state.
class Update {
 public:
  // Moments and master have `rows` rows.
  Update(DType dtype, const AdamWAttributes& attributes, int threads = 2, int64_t rows = kRows)
      : Update(dtype, accumulation_dtype(dtype), accumulation_dtype(dtype), attributes, threads,
               rows) {}
  Update(DType dtype, DType exp_avg, DType exp_avg_sq, const AdamWAttributes& attributes,
         int threads = 2, int64_t rows = kRows, std::optional<DType> gradient_dtype = {})
      : pool_(threads), first_(attributes.first) {
    const DType sums = accumulation_dtype(dtype);
    const Shape shape{kRows, kColumns};
    auto table = std::make_shared<StateTable>();
    const StateId gradient = table->add({.name = "d_w",
                                         .dtype = gradient_dtype.value_or(sums),
                                         .shape = shape,
                                         .role = Role::gradient});
    parameter_ = table->add({.name = "w",
                             .dtype = dtype,
                             .shape = shape,
                             .role = Role::parameter,
                             .gradient = gradient});
    gradient_ = gradient;
    const auto add = [&](const std::string& name, DType type) {
      return table->add(
          {.name = name, .dtype = type, .shape = {rows, kColumns}, .role = Role::optimizer});
    };
    exp_avg_ = add("w.exp_avg", exp_avg);
    exp_avg_sq_ = add("w.exp_avg_sq", exp_avg_sq);
    if (dtype == DType::bf16) master_ = add("w.master", sums);
    const auto add_scales = [&](const std::string& name, DType type) {
      if (type != DType::f8e4m3) return StateId{};
      return table->add({.name = name,
                         .dtype = DType::u8,
                         .shape = moment_scales_shape({rows, kColumns}),
                         .role = Role::optimizer});
    };
    exp_avg_scale_ = add_scales("w.exp_avg_scale", exp_avg);
    exp_avg_sq_scale_ = add_scales("w.exp_avg_sq_scale", exp_avg_sq);

    program_ = std::make_unique<Program>(table);
    Builder builder(*program_);
    const AdamWTensors tensors{.parameter = builder.state(parameter_),
                               .gradient = builder.state(gradient_),
                               .exp_avg = builder.state(exp_avg_),
                               .exp_avg_sq = builder.state(exp_avg_sq_),
                               .master = state_of(builder, master_),
                               .exp_avg_scale = state_of(builder, exp_avg_scale_),
                               .exp_avg_sq_scale = state_of(builder, exp_avg_sq_scale_)};
    scalars_ = {.learning_rate = builder.input("learning_rate", DType::f64, {1}),
                .weight_decay = builder.input("weight_decay", DType::f64, {1}),
                .step = builder.input("step", DType::i64, {1}),
                .coefficient = builder.input("coefficient", DType::f64, {1}),
                .skip = builder.input("skip", DType::i32, {1})};
    adamw(builder, tensors, scalars_, attributes, "w");
    verify_program(*program_);
    storage_ = std::make_unique<StateStorage>(table);
    interpreter_ = std::make_unique<CpuInterpreter>(*program_, plan_memory(*program_, threads),
                                                    *storage_, pool_);
  }

  // Starts from this parameter and zero moments.
  void set_parameter(const std::vector<double>& values) {
    write(storage_->view(parameter_), values);
    if (!master_.valid()) return;
    const TensorView master = storage_->view(master_);
    const auto first = values.begin() + first_;
    write(master, std::vector<double>(first, first + master.shape.elements()));
  }

  void set_moments(const std::vector<double>& exp_avg, const std::vector<double>& exp_avg_sq) {
    write(storage_->view(exp_avg_), exp_avg);
    write(storage_->view(exp_avg_sq_), exp_avg_sq);
  }

  void run(int64_t step, const std::vector<double>& gradient, double coefficient = 1,
           int32_t skip = 0) {
    write(storage_->view(gradient_), gradient);
    *interpreter_->view(scalars_.learning_rate).as<double>() = kLearningRate;
    *interpreter_->view(scalars_.weight_decay).as<double>() = kWeightDecay;
    *interpreter_->view(scalars_.step).as<int64_t>() = step;
    *interpreter_->view(scalars_.coefficient).as<double>() = coefficient;
    *interpreter_->view(scalars_.skip).as<int32_t>() = skip;
    interpreter_->run();
  }

  std::vector<double> parameter() const { return read(storage_->view(parameter_)); }
  std::vector<double> gradient() const { return read(storage_->view(gradient_)); }
  std::vector<double> exp_avg() const { return read_moment(exp_avg_, exp_avg_scale_); }
  std::vector<double> exp_avg_sq() const {
    std::vector<double> values = read_moment(exp_avg_sq_, exp_avg_sq_scale_);
    for (double& value : values) value = exp_avg_sq_scale_.valid() ? value * value : value;
    return values;
  }
  TensorView mean_codes() const { return storage_->view(exp_avg_); }
  TensorView mean_scales() const { return storage_->view(exp_avg_scale_); }
  TensorView square_codes() const { return storage_->view(exp_avg_sq_); }
  TensorView square_scales() const { return storage_->view(exp_avg_sq_scale_); }
  std::vector<double> master() const { return read(storage_->view(master_)); }

 private:
  static ValueId state_of(Builder& builder, StateId id) {
    return id.valid() ? builder.state(id) : ValueId{};
  }

  std::vector<double> read_moment(StateId id, StateId scale) const {
    const TensorView view = storage_->view(id);
    if (!scale.valid()) return read(view);
    const auto* codes = view.as<f8e4m3>();
    const auto* scales = storage_->view(scale).as<uint8_t>();
    std::vector<double> values;
    for (int64_t i = 0; i < view.shape.elements(); ++i) {
      const int64_t block = i / kColumns * moment_blocks(kColumns) + i % kColumns / kMomentBlock;
      values.push_back(std::ldexp(static_cast<double>(codes[i]), scales[block] - 127));
    }
    return values;
  }

  ThreadPool pool_;
  int64_t first_;
  StateId parameter_, gradient_, exp_avg_, exp_avg_sq_, master_, exp_avg_scale_, exp_avg_sq_scale_;
  std::unique_ptr<Program> program_;
  AdamWScalars scalars_;
  std::unique_ptr<StateStorage> storage_;
  std::unique_ptr<CpuInterpreter> interpreter_;
};

struct NaiveAdamW {
  AdamWAttributes attributes;
  std::vector<double> parameter;
  std::vector<double> exp_avg = std::vector<double>(kElements, 0.0);
  std::vector<double> exp_avg_sq = std::vector<double>(kElements, 0.0);

  void run(int64_t step, const std::vector<double>& gradient, double coefficient) {
    const double beta1 = attributes.beta1;
    const double beta2 = attributes.beta2;
    for (size_t i = 0; i < parameter.size(); ++i) {
      const double g = coefficient * gradient[i];
      if (attributes.decay) parameter[i] -= kLearningRate * kWeightDecay * parameter[i];
      exp_avg[i] = beta1 * exp_avg[i] + (1 - beta1) * g;
      exp_avg_sq[i] = beta2 * exp_avg_sq[i] + (1 - beta2) * g * g;
      const double m_hat = exp_avg[i] / (1 - std::pow(beta1, step));
      const double v_hat = exp_avg_sq[i] / (1 - std::pow(beta2, step));
      parameter[i] -= kLearningRate * m_hat / (std::sqrt(v_hat) + attributes.epsilon);
    }
  }
};

double largest_difference(const std::vector<double>& a, const std::vector<double>& b) {
  double largest = 0;
  for (size_t i = 0; i < a.size(); ++i) largest = std::max(largest, std::abs(a[i] - b[i]));
  return largest;
}

void expect_trajectory(DType dtype, bool decay, double tolerance) {
  const AdamWAttributes attributes{.beta1 = 0.9, .beta2 = 0.95, .epsilon = 1e-8, .decay = decay};
  Update update(dtype, attributes);
  NaiveAdamW naive{.attributes = attributes, .parameter = normals(0)};
  update.set_parameter(naive.parameter);
  for (uint32_t step = 1; step <= 4; ++step) {
    const auto gradient = normals(step);
    const double coefficient = step == 3 ? 0.25 : 1.0;
    update.run(step, gradient, coefficient);
    naive.run(step, gradient, coefficient);
    EXPECT_EQ(update.gradient(), gradient) << "the gradient is only read";
  }
  EXPECT_LE(largest_difference(dtype == DType::bf16 ? update.master() : update.parameter(),
                               naive.parameter),
            tolerance);
  EXPECT_LE(largest_difference(update.exp_avg(), naive.exp_avg), tolerance);
  EXPECT_LE(largest_difference(update.exp_avg_sq(), naive.exp_avg_sq), tolerance);
}

// Values up to about 5, a few roundings in each of four steps: 5 * 4 * 3 times the unit roundoff
// (1.1e-16 in double, 6e-8 in single precision).
constexpr double kDoubleTolerance = 1e-14;
constexpr double kSingleTolerance = 4e-6;

TEST(AdamW, AgreesWithANaiveComputation) {
  for (const bool decay : {true, false}) {
    SCOPED_TRACE(decay ? "with decay" : "without decay");
    expect_trajectory(DType::f64, decay, kDoubleTolerance);
    expect_trajectory(DType::f32, decay, kSingleTolerance);
    expect_trajectory(DType::bf16, decay, kSingleTolerance);
  }
}

TEST(AdamW, FirstStepMovesByTheLearningRate) {
  // With zero moments m_hat / sqrt(v_hat) is the sign of the gradient.
  Update update(DType::f64, {.decay = true});
  update.set_parameter(std::vector<double>(kElements, 2.0));
  std::vector<double> gradient(kElements, 3.0);
  gradient[1] = -0.5;
  update.run(1, gradient);
  const double decayed = 2.0 * (1 - kLearningRate * kWeightDecay);
  // Epsilon shortens the step by 1e-8 / |g|.
  EXPECT_NEAR(update.parameter()[0], decayed - kLearningRate, 1e-9);
  EXPECT_NEAR(update.parameter()[1], decayed + kLearningRate, 1e-9);
}

TEST(AdamW, ABrainFloatParameterIsTheRoundedMaster) {
  Update update(DType::bf16, {});
  const auto start = normals(0);
  update.set_parameter(start);
  update.run(1, normals(1));
  const auto parameter = update.parameter();
  const auto master = update.master();
  for (size_t i = 0; i < parameter.size(); ++i) {
    ASSERT_EQ(parameter[i], static_cast<double>(bf16(master[i]))) << i;
  }
  EXPECT_GT(largest_difference(master, start), kLearningRate / 2) << "nothing was updated";
}

TEST(AdamW, NothingChangesWhenTheStepIsSkipped) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    Update update(dtype, {});
    update.set_parameter(normals(0));
    update.run(1, normals(1));
    const auto parameter = update.parameter();
    const auto exp_avg = update.exp_avg();
    const auto exp_avg_sq = update.exp_avg_sq();
    const std::vector<double> bad(kElements, std::numeric_limits<double>::quiet_NaN());
    update.run(2, bad, /*coefficient=*/1, /*skip=*/1);
    EXPECT_EQ(update.parameter(), parameter);
    EXPECT_EQ(update.exp_avg(), exp_avg);
    EXPECT_EQ(update.exp_avg_sq(), exp_avg_sq);
  }
}

std::vector<double> rounded(std::vector<double> values) {
  for (double& value : values) value = static_cast<double>(bf16(value));
  return values;
}

// An update with narrow moments is one with wide moments that start from the narrow ones, and are
// rounded afterwards.
TEST(AdamW, NarrowMomentsAreRoundedWhenTheyAreStored) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const auto& [mean, square] :
         {std::pair(DType::bf16, DType::bf16), std::pair(DType::bf16, DType::f32),
          std::pair(DType::f32, DType::bf16)}) {
      SCOPED_TRACE(std::string(name_of(dtype)) + " " + std::string(name_of(mean)) + " " +
                   std::string(name_of(square)));
      Update narrow(dtype, mean, square, {});
      Update wide(dtype, {});
      narrow.set_parameter(normals(0));
      wide.set_parameter(normals(0));
      for (uint32_t step = 1; step <= 3; ++step) {
        wide.set_moments(narrow.exp_avg(), narrow.exp_avg_sq());
        narrow.run(step, normals(step));
        wide.run(step, normals(step));
        const auto stored = [](DType type, const std::vector<double>& values) {
          return type == DType::bf16 ? rounded(values) : values;
        };
        EXPECT_EQ(narrow.exp_avg(), stored(mean, wide.exp_avg()));
        EXPECT_EQ(narrow.exp_avg_sq(), stored(square, wide.exp_avg_sq()));
        EXPECT_EQ(narrow.parameter(), wide.parameter());
        if (dtype == DType::bf16) {
          EXPECT_EQ(narrow.master(), wide.master());
        }
      }
    }
  }
}

TEST(AdamW, ABrainFloatGradientIsTheSameNumberInFewerBits) {
  for (const DType moments : {DType::f32, DType::bf16, DType::f8e4m3}) {
    SCOPED_TRACE(name_of(moments));
    Update narrow(DType::bf16, moments, moments, {}, 2, kRows, DType::bf16);
    Update wide(DType::bf16, moments, moments, {});
    narrow.set_parameter(normals(0));
    wide.set_parameter(normals(0));
    for (uint32_t step = 1; step <= 2; ++step) {
      narrow.run(step, normals(step), 0.5);
      wide.run(step, rounded(normals(step)), 0.5);
    }
    EXPECT_EQ(narrow.master(), wide.master());
    EXPECT_EQ(narrow.parameter(), wide.parameter());
    EXPECT_EQ(narrow.exp_avg(), wide.exp_avg());
    EXPECT_EQ(narrow.exp_avg_sq(), wide.exp_avg_sq());
  }
}

// The codes of magnitudes, ascending: from the definition of the format.
std::vector<double> magnitudes_of_codes() {
  std::vector<double> values;
  for (int code = 0; code < 127; ++code) {
    const int exponent = code / 8;
    const double mantissa = code % 8 / 8.0;
    values.push_back(exponent == 0 ? std::ldexp(mantissa, -6)
                                   : std::ldexp(1 + mantissa, exponent - 7));
  }
  return values;
}

// What a moment in 8 bits is to become, written a second time: the least scale, then of the two
// codes around each element the one that is drawn.
void expect_blocks(const std::vector<double>& values, bool is_root, int64_t step,
                   const TensorView& codes, const TensorView& scales) {
  const std::vector<double> table = magnitudes_of_codes();
  const int64_t rows = codes.shape[0];
  const int64_t blocks = (kColumns + 31) / 32;
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t begin = row * kColumns + block * 32;
      const int64_t end = std::min(begin + 32, (row + 1) * kColumns);
      double largest = 0;
      for (int64_t i = begin; i < end; ++i) {
        largest = std::max(largest, std::abs(values[static_cast<size_t>(i)]));
      }
      int scale = 1;
      while (std::ldexp(448, scale - 127) < largest) ++scale;
      ASSERT_EQ(scales.as<uint8_t>()[row * blocks + block], scale) << row << " " << block;
      for (int64_t i = begin; i < end; ++i) {
        const double value = values[static_cast<size_t>(i)];
        const double scaled = std::ldexp(std::abs(value), 127 - scale);
        const auto above = std::upper_bound(table.begin(), table.end(), scaled);
        auto expected = static_cast<uint64_t>(above - table.begin() - 1);
        if (above != table.end()) {
          const double part = (scaled - *(above - 1)) / (*above - *(above - 1));
          const auto place = static_cast<uint64_t>(i - begin);
          const uint32_t draw = random_words(static_cast<uint64_t>(step), RandomStream::moments,
                                             is_root ? 1 : 0, place / 4)[place % 4] >>
                                12;
          if (std::floor(part * 0x1p20) + draw >= 0x1p20) ++expected;
        }
        if (is_root && value > 0) expected = std::max<uint64_t>(expected, 1);
        if (std::signbit(value)) expected |= 0x80U;
        ASSERT_EQ(codes.as<f8e4m3>()[i].bits, expected) << "element " << i << ", " << value;
      }
    }
  }
}

// Gradients of which some are zero, and some much smaller than others of their block.
std::vector<double> uneven_gradient(uint32_t step) {
  std::vector<double> gradient = normals(step);
  for (size_t i = 0; i < gradient.size(); ++i) {
    if (i % 7 == 3) gradient[i] *= 1e-5;
    if (i % 11 == 5) gradient[i] = 0;
    if (i / 64 % 5 == 2) gradient[i] = 0;  // whole blocks
    gradient[i] = static_cast<float>(gradient[i]);
  }
  return gradient;
}

// An update with moments in 8 bits is one with wide moments that start from what these stand for;
// each element becomes one of the codes beside it, as drawn.
TEST(AdamW, MomentsInEightBitsAreDrawnFromTheirBlocks) {
  constexpr DType kF8 = DType::f8e4m3;
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const auto& [mean, square] : {std::pair(kF8, kF8), std::pair(kF8, DType::f32),
                                       std::pair(DType::bf16, kF8), std::pair(DType::f32, kF8)}) {
      SCOPED_TRACE(std::string(name_of(dtype)) + " " + std::string(name_of(mean)) + " " +
                   std::string(name_of(square)));
      Update narrow(dtype, mean, square, {});
      Update wide(dtype, {});
      narrow.set_parameter(normals(0));
      wide.set_parameter(normals(0));
      for (uint32_t step = 1; step <= 3; ++step) {
        wide.set_moments(narrow.exp_avg(), narrow.exp_avg_sq());
        narrow.run(step, uneven_gradient(step));
        wide.run(step, uneven_gradient(step));
        EXPECT_EQ(narrow.parameter(), wide.parameter());
        if (dtype == DType::bf16) {
          EXPECT_EQ(narrow.master(), wide.master());
        }
        if (mean == kF8) {
          expect_blocks(wide.exp_avg(), false, step, narrow.mean_codes(), narrow.mean_scales());
        }
        if (square == kF8) {
          std::vector<double> roots = wide.exp_avg_sq();
          for (double& root : roots) root = std::sqrt(static_cast<float>(root));
          expect_blocks(roots, true, step, narrow.square_codes(), narrow.square_scales());
        }
      }
    }
  }
}

// Mean and deviation of a[i] / b[i] where b is not 0.
struct Ratio {
  double mean = 0;
  double deviation = 0;
};
Ratio ratio_of(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  double squares = 0;
  double count = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    if (b[i] == 0) continue;
    const double ratio = a[i] / b[i];
    sum += ratio;
    squares += ratio * ratio;
    ++count;
  }
  return {sum / count, std::sqrt(squares / count - sum * sum / count / count)};
}
std::vector<double> roots(std::vector<double> values) {
  for (double& value : values) value = std::sqrt(value);
  return values;
}

// Though an update changes the root by less than a tenth of the distance to the next code, it
// follows: upwards from zero, and down when gradients become small. moment_blocks.h derives a
// deviation of 18 % at most around the root that it would be in f32, once what was before is
// forgotten (800 updates leave 0.03 % of its square), and a root 3 % too large at most. Elements at
// the same place of their blocks share what is drawn, so that the mean over all has a deviation of
// its own, 14 % / sqrt(32).
TEST(AdamW, TheRootInEightBitsFollowsTheGradients) {
  const AdamWAttributes attributes{.beta1 = 0.9, .beta2 = 0.99};
  Update narrow(DType::f32, DType::f8e4m3, DType::f8e4m3, attributes);
  Update wide(DType::f32, attributes);
  int64_t step = 0;
  for (const double size : {1.0, 0.25}) {
    std::vector<std::vector<double>> gradients;
    for (uint32_t i = 0; i < 16; ++i) {
      gradients.push_back(normals(i));
      for (double& value : gradients.back()) value = static_cast<float>(value * size);
    }
    for (int i = 0; i < 800; ++i) {
      const std::vector<double>& gradient = gradients[static_cast<size_t>(++step % 16)];
      narrow.run(step, gradient);
      wide.run(step, gradient);
    }
    const Ratio ratio = ratio_of(roots(narrow.exp_avg_sq()), roots(wide.exp_avg_sq()));
    EXPECT_NEAR(ratio.mean, 1, 0.05) << size;
    EXPECT_LT(ratio.deviation, 0.18) << size;
  }
}

TEST(AdamW, WhatIsNotFiniteStaysSoInEightBits) {
  Update update(DType::f32, DType::f8e4m3, DType::f8e4m3, {});
  update.set_parameter(normals(0));
  std::vector<double> gradient = normals(1);
  gradient[0] = 3e38;  // its square is infinite in f32
  gradient[100] = std::nan("");
  update.run(1, gradient);
  EXPECT_TRUE(std::isinf(static_cast<float>(update.exp_avg_sq()[0])));
  EXPECT_TRUE(std::isnan(update.exp_avg()[100]));
  EXPECT_TRUE(std::isnan(update.exp_avg_sq()[100]));
  EXPECT_TRUE(std::isfinite(update.exp_avg_sq()[200]));
}

// Stretches of the elements, updated one by one, become what they become together.
TEST(AdamW, AShardIsUpdatedAsInTheWhole) {
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16}) {
    Update whole(dtype, {});
    whole.set_parameter(normals(0));
    for (uint32_t step = 1; step <= 2; ++step) whole.run(step, normals(step));
    for (const auto& [row, rows] :
         {std::pair<int64_t, int64_t>(0, 2), std::pair<int64_t, int64_t>(2, 3)}) {
      const int64_t begin = row * kColumns;
      const int64_t end = begin + rows * kColumns;
      Update part(dtype, {.first = begin}, 2, rows);
      part.set_parameter(normals(0));
      const std::vector<double> start = part.parameter();
      for (uint32_t step = 1; step <= 2; ++step) part.run(step, normals(step));
      const auto same = [&](const std::vector<double>& own, const std::vector<double>& of_whole) {
        return std::equal(own.begin(), own.end(), of_whole.begin() + begin, of_whole.begin() + end);
      };
      EXPECT_TRUE(same(part.exp_avg(), whole.exp_avg()));
      EXPECT_TRUE(same(part.exp_avg_sq(), whole.exp_avg_sq()));
      if (dtype == DType::bf16) {
        EXPECT_TRUE(same(part.master(), whole.master()));
      }
      const std::vector<double> found = part.parameter();
      const std::vector<double> expected = whole.parameter();
      for (int64_t i = 0; i < kElements; ++i) {
        const auto at = static_cast<size_t>(i);
        ASSERT_EQ(found[at], begin <= i && i < end ? expected[at] : start[at]) << i;
      }
    }
  }
}

TEST(AdamW, ThreadsChangeNoBit) {
  std::vector<std::vector<double>> results;
  for (const int threads : {1, 3}) {
    Update update(DType::f32, {}, threads);
    update.set_parameter(normals(0));
    for (uint32_t step = 1; step <= 2; ++step) update.run(step, normals(step));
    results.push_back(update.parameter());
  }
  EXPECT_EQ(results[0], results[1]);
}

}  // namespace
}  // namespace troupe::testing
