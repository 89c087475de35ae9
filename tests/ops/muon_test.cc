// Muon's operations against formulas written out in double: newton_schulz by plain loops and by
// the singular values of what it gives, momentum and update by a scalar computation over steps.
#include "ops/optimizer/muon/muon.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <gtest/gtest.h>
#include <limits>
#include <memory>
#include <numeric>
#include <tuple>
#include <utility>
#include <vector>

#include "ops/optimizer/newton_schulz/newton_schulz.h"
#include "ops/value_test_support.h"
#include "program/verify.h"
#include "runtime/cpu/cpu_interpreter.h"

namespace troupe::testing {
namespace {

using Numbers = std::vector<double>;

struct PlainMatrix {
  int64_t rows = 0;
  int64_t columns = 0;
  Numbers values;

  double operator()(int64_t i, int64_t j) const {
    return values[static_cast<size_t>(i * columns + j)];
  }
};

PlainMatrix plain_transpose(const PlainMatrix& x) {
  PlainMatrix y{x.columns, x.rows, {}};
  for (int64_t j = 0; j < x.columns; ++j) {
    for (int64_t i = 0; i < x.rows; ++i) y.values.push_back(x(i, j));
  }
  return y;
}

PlainMatrix plain_product(const PlainMatrix& a, const PlainMatrix& b) {
  PlainMatrix c{a.rows, b.columns, {}};
  for (int64_t i = 0; i < a.rows; ++i) {
    for (int64_t j = 0; j < b.columns; ++j) {
      double sum = 0;
      for (int64_t k = 0; k < a.columns; ++k) sum += a(i, k) * b(k, j);
      c.values.push_back(sum);
    }
  }
  return c;
}

PlainMatrix plain_combination(double a, const PlainMatrix& x, double b, const PlainMatrix& y) {
  PlainMatrix sum = x;
  for (size_t i = 0; i < sum.values.size(); ++i) sum.values[i] = a * x.values[i] + b * y.values[i];
  return sum;
}

// The coefficients once more, as Emerging-Optimizers has them.
constexpr double kQuintic[5][3] = {{4.0848, -6.8946, 2.9270},
                                   {3.9505, -6.3029, 2.6377},
                                   {3.7418, -5.5913, 2.3037},
                                   {2.8769, -3.1427, 1.2046},
                                   {2.8366, -3.0525, 1.2012}};
constexpr double kSimple[3] = {3.4445, -4.7750, 2.0315};

// As it is described: transpose, normalise, iterate, transpose back. `store` is done to each
// matrix that is stored.
PlainMatrix plain_newton_schulz(
    PlainMatrix x, bool simple, int steps,
    const std::function<PlainMatrix(PlainMatrix)>& store = [](PlainMatrix m) { return m; }) {
  const bool tall = x.rows > x.columns;
  if (tall) x = plain_transpose(x);
  const double norm =
      std::sqrt(std::inner_product(x.values.begin(), x.values.end(), x.values.begin(), 0.0));
  for (double& value : x.values) value /= std::max(norm, 1e-15);
  x = store(x);
  for (int step = 0; step < steps; ++step) {
    const double* c = simple ? kSimple : kQuintic[step % 5];
    const PlainMatrix gram = store(plain_product(x, plain_transpose(x)));
    const PlainMatrix polynomial =
        store(plain_combination(c[1], gram, c[2], plain_product(gram, gram)));
    x = store(plain_combination(c[0], x, 1, plain_product(polynomial, x)));
  }
  return tall ? plain_transpose(x) : x;
}

// The eigenvalues of a symmetric matrix, by Jacobi's rotations.
Numbers eigenvalues(PlainMatrix a) {
  const int64_t n = a.rows;
  const auto at = [&](int64_t i, int64_t j) -> double& {
    return a.values[static_cast<size_t>(i * n + j)];
  };
  for (int sweep = 0; sweep < 12; ++sweep) {
    for (int64_t p = 0; p < n; ++p) {
      for (int64_t q = p + 1; q < n; ++q) {
        if (at(p, q) == 0) continue;
        const double angle = 0.5 * std::atan2(2 * at(p, q), at(q, q) - at(p, p));
        const double c = std::cos(angle);
        const double s = std::sin(angle);
        for (int64_t k = 0; k < n; ++k) {
          const auto [x, y] = std::pair(at(k, p), at(k, q));
          at(k, p) = c * x - s * y;
          at(k, q) = s * x + c * y;
        }
        for (int64_t k = 0; k < n; ++k) {
          const auto [x, y] = std::pair(at(p, k), at(q, k));
          at(p, k) = c * x - s * y;
          at(q, k) = s * x + c * y;
        }
      }
    }
  }
  Numbers values;
  for (int64_t i = 0; i < n; ++i) values.push_back(at(i, i));
  return values;
}

Numbers singular_values(const PlainMatrix& x) {
  Numbers values = eigenvalues(x.rows > x.columns ? plain_product(plain_transpose(x), x)
                                                  : plain_product(x, plain_transpose(x)));
  for (double& value : values) value = std::sqrt(std::max(0.0, value));
  return values;
}

Numbers run_newton_schulz(const Shape& shape, const Numbers& x,
                          const NewtonSchulzAttributes& attributes, DType dtype = DType::f64,
                          int threads = 2) {
  return run_sample(
      [&](SampleBuilder& sample) {
        sample.result_without_gradient(
            newton_schulz(sample.builder(), sample.values("x", shape, x, {.differentiable = false}),
                          attributes, "y"));
      },
      dtype, threads)[0];
}

PlainMatrix random_matrix(int64_t rows, int64_t columns, uint32_t number) {
  return {rows, columns, normal_numbers(rows * columns, number)};
}

Numbers orthogonalised(const PlainMatrix& x, const NewtonSchulzAttributes& attributes = {},
                       DType dtype = DType::f64) {
  return run_newton_schulz({x.rows, x.columns}, x.values, attributes, dtype);
}

void expect_numbers_near(const Numbers& actual, const Numbers& expected, double tolerance) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    ASSERT_NEAR(actual[i], expected[i], tolerance) << "element " << i;
  }
}

constexpr NewtonSchulzAttributes kSimpleSteps{.coefficients = NewtonSchulzCoefficients::simple};
constexpr NewtonSchulzAttributes kBrainFloat{.arithmetic = NewtonSchulzArithmetic::bf16};

TEST(NewtonSchulz, IsItsFormula) {
  for (const auto& [rows, columns] :
       {std::pair(7, 19), std::pair(40, 12), std::pair(16, 16), std::pair(1, 9), std::pair(9, 1)}) {
    SCOPED_TRACE(::testing::Message() << rows << " x " << columns);
    const PlainMatrix x = random_matrix(rows, columns, 1);
    expect_numbers_near(orthogonalised(x), plain_newton_schulz(x, false, 5).values, 1e-12);
    expect_numbers_near(orthogonalised(x, kSimpleSteps), plain_newton_schulz(x, true, 5).values,
                        1e-12);
    expect_numbers_near(orthogonalised(x, {.steps = 10}), plain_newton_schulz(x, false, 10).values,
                        1e-10);
    NewtonSchulzAttributes other = kSimpleSteps;
    other.steps = 2;
    other.sections[0].scale = 3;
    const PlainMatrix twice = plain_newton_schulz(x, true, 2);
    expect_numbers_near(orthogonalised(x, other), plain_combination(3, twice, 0, twice).values,
                        1e-12);
  }
}

// More work than a tile of a product has.
TEST(NewtonSchulz, LargeProductsAreThoseOfTheirTiles) {
  const PlainMatrix x = random_matrix(204, 207, 1);
  NewtonSchulzAttributes one_step = kSimpleSteps;
  one_step.steps = 1;
  expect_numbers_near(orthogonalised(x, one_step), plain_newton_schulz(x, true, 1).values, 1e-12);
}

// The squares of its elements are summed in pieces of 32,768.
TEST(NewtonSchulz, TheNormIsThatOfAllPieces) {
  const PlainMatrix x = random_matrix(9, 8000, 8);
  NewtonSchulzAttributes one_step = kSimpleSteps;
  one_step.steps = 1;
  expect_numbers_near(orthogonalised(x, one_step), plain_newton_schulz(x, true, 1).values, 1e-12);
}

// The iteration maps each singular value by itself. Five steps on a fine grid of [0.003, 1] give
// values in [0.9778, 1.1450] with the five triples and in [0.6818, 1.2024] with the single one; the
// matrices here have no singular value below 0.003 of their norm.
TEST(NewtonSchulz, SingularValuesComeNearOne) {
  for (const auto& [rows, columns] : {std::pair(24, 60), std::pair(60, 24), std::pair(30, 36)}) {
    SCOPED_TRACE(::testing::Message() << rows << " x " << columns);
    const PlainMatrix x = random_matrix(rows, columns, 2);
    const double norm =
        std::sqrt(std::inner_product(x.values.begin(), x.values.end(), x.values.begin(), 0.0));
    const Numbers before = singular_values(x);
    ASSERT_GT(*std::min_element(before.begin(), before.end()), 0.003 * norm);
    const auto expect_within = [&](const Numbers& y, double least, double most) {
      const Numbers values = singular_values({rows, columns, y});
      EXPECT_GE(*std::min_element(values.begin(), values.end()), least);
      EXPECT_LE(*std::max_element(values.begin(), values.end()), most);
    };
    expect_within(orthogonalised(x), 0.97, 1.15);
    expect_within(orthogonalised(x, kSimpleSteps), 0.68, 1.21);
    expect_within(orthogonalised(x, {}, DType::f32), 0.97, 1.15);
    expect_within(orthogonalised(x, kBrainFloat, DType::f32), 0.9, 1.2);
  }
}

TEST(NewtonSchulz, TheTransposeGivesTheTranspose) {
  for (const auto& [rows, columns] : {std::pair(11, 29), std::pair(18, 18)}) {
    const PlainMatrix x = random_matrix(rows, columns, 3);
    const PlainMatrix y{rows, columns, orthogonalised(x)};
    expect_numbers_near(orthogonalised(plain_transpose(x)), plain_transpose(y).values, 1e-13);
  }
}

TEST(NewtonSchulz, ABatchIsItsMatricesOneByOne) {
  constexpr int64_t kMuonElements = 37 * 21;
  const Numbers x = normal_numbers(3 * kMuonElements, 4);
  for (const DType dtype : {DType::f64, DType::f32}) {
    const Numbers together = run_newton_schulz({3, 37, 21}, x, {}, dtype);
    for (int64_t i = 0; i < 3; ++i) {
      const auto part = [&](const Numbers& of) {
        return Numbers(of.begin() + i * kMuonElements, of.begin() + (i + 1) * kMuonElements);
      };
      EXPECT_EQ(run_newton_schulz({37, 21}, part(x), {}, dtype), part(together)) << i;
    }
  }
}

TEST(NewtonSchulz, SectionsAreMatricesByThemselves) {
  constexpr int64_t kMuonColumns = 24;
  const NewtonSchulzAttributes attributes{.sections = {{{40, 2}, {10, 1}, {5, 0.25}}}};
  const Numbers x = normal_numbers(2 * 55 * kMuonColumns, 5);
  const Numbers together = run_newton_schulz({2, 55, kMuonColumns}, x, attributes);
  int64_t first = 0;
  for (int64_t matrix = 0; matrix < 2; ++matrix) {
    for (const NewtonSchulzSection& section : attributes.sections) {
      if (section.rows == 0) continue;
      const int64_t end = first + section.rows * kMuonColumns;
      NewtonSchulzAttributes whole;
      whole.sections[0].scale = section.scale;
      EXPECT_EQ(run_newton_schulz({section.rows, kMuonColumns},
                                  Numbers(x.begin() + first, x.begin() + end), whole),
                Numbers(together.begin() + first, together.begin() + end))
          << matrix << " " << section.rows;
      first = end;
    }
  }
}

TEST(NewtonSchulz, ZerosStayZeros) {
  for (const NewtonSchulzAttributes& attributes : {NewtonSchulzAttributes{}, kBrainFloat}) {
    const Numbers zeros(6 * 11, 0.0);
    EXPECT_EQ(run_newton_schulz({6, 11}, zeros, attributes, DType::f32), zeros);
  }
}

// The direction counts, not the size: norms from 1e-12 to 1e12, whose squares f32 does not hold.
TEST(NewtonSchulz, TheSizeOfXDoesNotMatter) {
  const PlainMatrix x = random_matrix(8, 20, 6);
  const Numbers y = orthogonalised(x, {}, DType::f32);
  for (const double size : {1e-12, 1e12, 1e30}) {
    expect_numbers_near(orthogonalised(plain_combination(size, x, 0, x), {}, DType::f32), y, 1e-5);
  }
}

double relative_distance(const Numbers& actual, const Numbers& reference) {
  double squares = 0;
  double differences = 0;
  for (size_t i = 0; i < reference.size(); ++i) {
    squares += reference[i] * reference[i];
    differences += (actual[i] - reference[i]) * (actual[i] - reference[i]);
  }
  return std::sqrt(differences / squares);
}

// In bf16 results are those with a rounding wherever X, A or the polynomial is stored. Few bits of
// such small matrices round to the other side because sums are in f32, which changes a result by
// less than 0.1 %; one rounding less changes it by 0.6 % or more.
TEST(NewtonSchulz, BrainFloatIsRoundedWhenItIsStored) {
  const auto rounded = [](PlainMatrix m) {
    for (double& value : m.values) value = static_cast<double>(bf16(value));
    return m;
  };
  for (const auto& [rows, columns] : {std::pair(8, 20), std::pair(17, 10), std::pair(24, 60)}) {
    const PlainMatrix x = random_matrix(rows, columns, 7);
    const Numbers narrow = orthogonalised(x, kBrainFloat, DType::f32);
    EXPECT_LT(relative_distance(narrow, plain_newton_schulz(x, false, 5, rounded).values), 2e-3);
    for (const double value : narrow) EXPECT_EQ(value, static_cast<double>(bf16(value)));
  }
}

// The roundings change 0.6 % of the result, as the header says.
TEST(NewtonSchulz, BrainFloatIsNearTheOthers) {
  const PlainMatrix x = random_matrix(48, 96, 7);
  const double off = relative_distance(orthogonalised(x, kBrainFloat, DType::f32),
                                       orthogonalised(x, {}, DType::f32));
  EXPECT_GT(off, 1e-3);
  EXPECT_LT(off, 0.015);
}

TEST(NewtonSchulz, ThreadsChangeNoBit) {
  const Numbers x = normal_numbers(2 * 190 * 340, 8);
  for (const NewtonSchulzAttributes& attributes : {NewtonSchulzAttributes{}, kBrainFloat}) {
    EXPECT_EQ(run_newton_schulz({2, 190, 340}, x, attributes, DType::f32, 1),
              run_newton_schulz({2, 190, 340}, x, attributes, DType::f32, 4));
  }
}

TEST(MuonScale, FollowsTheSizesOfTheMatrix) {
  EXPECT_DOUBLE_EQ(muon_scale(MuonScale::spectral, 64, 16), 8);
  EXPECT_DOUBLE_EQ(muon_scale(MuonScale::spectral, 16, 64, 0.2), 1.6);
  EXPECT_DOUBLE_EQ(muon_scale(MuonScale::unit_rms_norm, 64, 16), 2);
  EXPECT_DOUBLE_EQ(muon_scale(MuonScale::unit_rms_norm, 16, 64), 0.5);
  EXPECT_DOUBLE_EQ(muon_scale(MuonScale::shape_scaling, 64, 16), 2);
  EXPECT_DOUBLE_EQ(muon_scale(MuonScale::shape_scaling, 16, 64, 3), 3);
}

constexpr int64_t kMuonRows = 6;
constexpr int64_t kMuonColumns = 7001;  // several chunks and a tail
constexpr int64_t kMuonElements = kMuonRows * kMuonColumns;
constexpr double kMuonLearningRate = 0.02;
constexpr double kMuonWeightDecay = 0.1;

Numbers muon_numbers(uint32_t stream) {
  Numbers values = normal_numbers(kMuonElements, stream);
  for (double& value : values) value = static_cast<double>(bf16(value));  // the same in all dtypes
  return values;
}

void write_state(const TensorView& view, const double* values) {
  for (int64_t i = 0; i < view.shape.elements(); ++i) {
    if (view.dtype == DType::f64) view.as<double>()[i] = values[i];
    if (view.dtype == DType::f32) view.as<float>()[i] = static_cast<float>(values[i]);
    if (view.dtype == DType::bf16) view.as<bf16>()[i] = bf16(values[i]);
  }
}

Numbers read_state(const TensorView& view) {
  Numbers values;
  for (int64_t i = 0; i < view.shape.elements(); ++i) {
    if (view.dtype == DType::f64) values.push_back(view.as<double>()[i]);
    if (view.dtype == DType::f32) values.push_back(static_cast<double>(view.as<float>()[i]));
    if (view.dtype == DType::bf16) values.push_back(static_cast<double>(view.as<bf16>()[i]));
  }
  return values;
}

struct MuonOptions {
  DType dtype = DType::f32;  // of the parameter
  DType gradient_dtype = DType::f32;
  MuonMomentumAttributes momentum{};
  MuonUpdateAttributes update{};
  int64_t rows = kMuonRows;  // of momentum and master
  int threads = 2;
};

// A program that changes a parameter by an update that is given, and a momentum by a gradient.
class MuonStep {
 public:
  explicit MuonStep(const MuonOptions& options)
      : pool_(options.threads), first_(options.update.first) {
    const DType wide = accumulation_dtype(options.dtype);
    const Shape shape{kMuonRows, kMuonColumns};
    const Shape shard{options.rows, kMuonColumns};
    auto table = std::make_shared<StateTable>();
    gradient_ = table->add({"d_w", options.gradient_dtype, shape, Role::gradient});
    parameter_ = table->add({"w", options.dtype, shape, Role::parameter, gradient_});
    momentum_ = table->add({"w.momentum", wide, shard, Role::optimizer});
    const bool has_master = options.dtype == DType::bf16;
    master_ = has_master ? table->add({"w.master", wide, shard, Role::optimizer}) : parameter_;

    program_ = std::make_unique<Program>(table);
    Builder builder(*program_);
    y_ = builder.input("y", wide, shape);
    learning_rate_ = builder.input("learning_rate", DType::f64, {1});
    weight_decay_ = builder.input("weight_decay", DType::f64, {1});
    coefficient_ = builder.input("coefficient", DType::f64, {1});
    skip_ = builder.input("skip", DType::i32, {1});
    muon_update(builder,
                {.update = y_,
                 .parameter = builder.state(parameter_),
                 .master = has_master ? builder.state(master_) : ValueId{},
                 .learning_rate = learning_rate_,
                 .weight_decay = weight_decay_,
                 .skip = skip_},
                options.update, "w");
    u_ = muon_momentum(builder,
                       {.gradient = builder.state(gradient_),
                        .momentum = builder.state(momentum_),
                        .coefficient = coefficient_,
                        .skip = skip_},
                       options.momentum, "u");
    verify_program(*program_);
    storage_ = std::make_unique<StateStorage>(table);
    interpreter_ = std::make_unique<CpuInterpreter>(
        *program_, plan_memory(*program_, options.threads), *storage_, pool_);
  }

  // Starts from this parameter and no momentum.
  void set_parameter(const Numbers& values) {
    write_state(storage_->view(parameter_), values.data());
    write_state(storage_->view(master_), values.data() + first_);
  }

  void run(const Numbers& gradient, const Numbers& y, double coefficient = 1, int32_t skip = 0) {
    write_state(storage_->view(gradient_), gradient.data());
    write_state(interpreter_->view(y_), y.data());
    *interpreter_->view(learning_rate_).as<double>() = kMuonLearningRate;
    *interpreter_->view(weight_decay_).as<double>() = kMuonWeightDecay;
    *interpreter_->view(coefficient_).as<double>() = coefficient;
    *interpreter_->view(skip_).as<int32_t>() = skip;
    interpreter_->run();
  }

  Numbers parameter() const { return read_state(storage_->view(parameter_)); }
  Numbers master() const { return read_state(storage_->view(master_)); }
  Numbers momentum() const { return read_state(storage_->view(momentum_)); }
  Numbers u() const { return read_state(interpreter_->view(u_)); }

 private:
  ThreadPool pool_;
  int64_t first_;
  StateId parameter_, gradient_, momentum_, master_;
  ValueId y_, u_, learning_rate_, weight_decay_, coefficient_, skip_;
  std::unique_ptr<Program> program_;
  std::unique_ptr<StateStorage> storage_;
  std::unique_ptr<CpuInterpreter> interpreter_;
};

std::vector<MuonOptions> muon_variants() {
  return {{.dtype = DType::f64, .gradient_dtype = DType::f64},
          {.dtype = DType::f32},
          {.dtype = DType::bf16},
          {.dtype = DType::bf16, .gradient_dtype = DType::bf16}};
}

// The scalar computation over three steps, with clipping.
TEST(Muon, IsItsFormula) {
  for (MuonOptions options : muon_variants()) {
    for (const bool nesterov : {false, true}) {
      for (const bool decay : {false, true}) {
        options.momentum = {.beta = 0.95, .nesterov = nesterov};
        options.update = {.scale = 1.5, .decay = decay};
        MuonStep step(options);
        Numbers p = muon_numbers(0);
        Numbers m(kMuonElements, 0.0);
        Numbers u(kMuonElements, 0.0);
        step.set_parameter(p);
        for (uint32_t number = 1; number <= 3; ++number) {
          const double coefficient = 1.0 / number;
          const Numbers gradient = muon_numbers(number);
          const Numbers y = muon_numbers(10 + number);
          step.run(gradient, y, coefficient);
          for (size_t i = 0; i < p.size(); ++i) {
            const double g = coefficient * gradient[i];
            m[i] = 0.95 * m[i] + 0.05 * g;
            u[i] = nesterov ? 0.05 * g + 0.95 * m[i] : m[i];
            if (decay) p[i] -= kMuonLearningRate * kMuonWeightDecay * p[i];
            p[i] -= kMuonLearningRate * 1.5 * y[i];
          }
        }
        // f32 rounds each of a few operations on numbers under 6 by 2^-24 of them.
        const double tolerance = options.dtype == DType::f64 ? 1e-14 : 3e-6;
        expect_numbers_near(step.momentum(), m, tolerance);
        expect_numbers_near(step.u(), u, tolerance);
        expect_numbers_near(step.master(), p, tolerance);
        Numbers rounded = step.master();
        for (double& value : rounded) value = static_cast<double>(bf16(value));
        EXPECT_EQ(step.parameter(), options.dtype == DType::bf16 ? rounded : step.master());
      }
    }
  }
}

TEST(Muon, SkippingChangesNothing) {
  for (MuonOptions options : muon_variants()) {
    options.momentum.nesterov = true;
    MuonStep step(options);
    step.set_parameter(muon_numbers(0));
    step.run(muon_numbers(1), muon_numbers(2));
    const auto [parameter, master, momentum] =
        std::tuple(step.parameter(), step.master(), step.momentum());
    const Numbers bad(kMuonElements, std::numeric_limits<double>::quiet_NaN());
    step.run(bad, bad, /*coefficient=*/1, /*skip=*/1);
    EXPECT_EQ(step.parameter(), parameter);
    EXPECT_EQ(step.master(), master);
    EXPECT_EQ(step.momentum(), momentum);
    EXPECT_EQ(step.u(), momentum);
  }
}

// Stretches of the elements become what they become in the whole; the others stay as they are.
TEST(Muon, AShardIsUpdatedAsInTheWhole) {
  MuonOptions options{.dtype = DType::bf16, .momentum = {.nesterov = true}};
  const auto run = [&](MuonStep& step) {
    step.set_parameter(muon_numbers(0));
    for (uint32_t i = 1; i <= 2; ++i) step.run(muon_numbers(i), muon_numbers(10 + i));
  };
  MuonStep whole(options);
  run(whole);
  for (const auto& [row, rows] :
       {std::pair<int64_t, int64_t>(0, 2), std::pair<int64_t, int64_t>(3, 3)}) {
    const int64_t begin = row * kMuonColumns;
    const int64_t end = begin + rows * kMuonColumns;
    options.rows = rows;
    options.momentum.first = begin;
    options.update.first = begin;
    MuonStep part(options);
    run(part);
    const auto shard = [&](const Numbers& of) {
      return Numbers(of.begin() + begin, of.begin() + end);
    };
    EXPECT_EQ(part.momentum(), shard(whole.momentum()));
    EXPECT_EQ(part.u(), shard(whole.u()));
    EXPECT_EQ(part.master(), shard(whole.master()));
    Numbers expected = muon_numbers(0);
    const Numbers updated = whole.parameter();
    std::copy(updated.begin() + begin, updated.begin() + end, expected.begin() + begin);
    EXPECT_EQ(part.parameter(), expected);
  }
}

TEST(Muon, ThreadsChangeNoBit) {
  const auto results = [](int threads) {
    MuonStep step({.momentum = {.nesterov = true}, .threads = threads});
    step.set_parameter(muon_numbers(0));
    step.run(muon_numbers(1), muon_numbers(2));
    return std::tuple(step.parameter(), step.momentum(), step.u());
  };
  EXPECT_EQ(results(1), results(4));
}

}  // namespace
}  // namespace troupe::testing
