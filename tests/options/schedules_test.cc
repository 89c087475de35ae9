// Schedules of learning rate, weight decay and batch size, against values worked out by hand and
// against Megatron's formulas written a second time.
#include <cmath>
#include <gtest/gtest.h>
#include <numbers>
#include <string>
#include <vector>

#include "base/error.h"
#include "options/schedule_options.h"

namespace troupe {
namespace {

LearningRateSchedule cosine() {
  return {.style = LrDecayStyle::cosine,
          .max_lr = 0.01,
          .min_lr = 0.001,
          .warmup_samples = 100,
          .decay_samples = 1100};
}

TEST(LearningRate, RisesLinearlyFromZero) {
  const LearningRateSchedule schedule = cosine();
  EXPECT_EQ(schedule.at(0), 0);
  EXPECT_DOUBLE_EQ(schedule.at(1), 0.01 / 100);
  EXPECT_DOUBLE_EQ(schedule.at(25), 0.0025);
  EXPECT_DOUBLE_EQ(schedule.at(100), 0.01);
}

TEST(LearningRate, FallsAsACosine) {
  const LearningRateSchedule schedule = cosine();
  // min + (max - min) * (1 + cos(pi x)) / 2 at x = 1/4, 1/2, 3/4, 1 of the way.
  EXPECT_DOUBLE_EQ(schedule.at(350), 0.001 + 0.009 * 0.5 * (1 + std::sqrt(0.5)));
  EXPECT_DOUBLE_EQ(schedule.at(600), 0.0055);
  EXPECT_DOUBLE_EQ(schedule.at(850), 0.001 + 0.009 * 0.5 * (1 - std::sqrt(0.5)));
  EXPECT_DOUBLE_EQ(schedule.at(1100), 0.001);
}

TEST(LearningRate, StaysAtTheMinimumAfterTheDecay) {
  EXPECT_EQ(cosine().at(1101), 0.001);
  EXPECT_EQ(cosine().at(1'000'000'000'000), 0.001);
}

TEST(LearningRate, NeverRisesAfterTheWarmup) {
  const LearningRateSchedule schedule = cosine();
  for (int64_t samples = 100; samples < 1200; ++samples) {
    ASSERT_LE(schedule.at(samples + 1), schedule.at(samples)) << samples;
    ASSERT_GE(schedule.at(samples), schedule.min_lr) << samples;
  }
}

TEST(LearningRate, ConstantAfterTheWarmup) {
  LearningRateSchedule schedule = cosine();
  schedule.style = LrDecayStyle::constant;
  EXPECT_DOUBLE_EQ(schedule.at(50), 0.005);
  EXPECT_EQ(schedule.at(101), 0.01);
  EXPECT_EQ(schedule.at(600), 0.01);
  EXPECT_EQ(schedule.at(100000), 0.01);
}

TEST(LearningRate, WithoutWarmupTheFirstUpdateIsOnTheCosine) {
  LearningRateSchedule schedule = cosine();
  schedule.warmup_samples = 0;
  schedule.decay_samples = 10;
  EXPECT_DOUBLE_EQ(schedule.at(1), 0.001 + 0.009 * 0.5 * (1 + std::cos(std::numbers::pi / 10)));
}

TEST(LearningRate, WarmupThatFillsTheDecay) {
  LearningRateSchedule schedule = cosine();
  schedule.decay_samples = 100;
  EXPECT_DOUBLE_EQ(schedule.at(100), 0.01);
  EXPECT_EQ(schedule.at(101), 0.001);
}

// Megatron's OptimizerParamScheduler.get_lr, line by line.
struct MegatronRate {
  std::string style;
  std::string wsd_style;
  double init = 0;
  double max = 0;
  double min = 0;
  double warmup = 0;
  double decay = 0;
  double wsd = 0;

  double at(double n) const {
    if (warmup > 0 && n <= warmup) return init + (max - init) * n / warmup;
    if (style == "constant") return max;
    if (n > decay) return min;
    if (style == "inverse-square-root") {
      const double w = warmup > 1 ? warmup : 1;
      const double m = n > 1 ? n : 1;
      const double rate = max * std::pow(w, 0.5) / std::pow(m, 0.5);
      return rate > min ? rate : min;
    }
    const double ratio = (n - warmup) / (decay - warmup);
    double c = 0;
    if (style == "linear") c = 1 - ratio;
    if (style == "cosine") c = 0.5 * (std::cos(std::numbers::pi * ratio) + 1);
    if (style == "WSD") {
      const double begin = decay - wsd;
      const double r = (n - begin) / wsd;
      c = 1;
      if (n > begin && wsd_style == "linear") c = 1 - r;
      if (n > begin && wsd_style == "cosine") c = 0.5 * (std::cos(std::numbers::pi * r) + 1);
      if (n > begin && wsd_style == "exponential") c = 2 * std::pow(0.5, r) - 1;
      if (n > begin && wsd_style == "minus_sqrt") c = 1 - std::sqrt(r);
    }
    return min + c * (max - min);
  }
};

Options sampled_options() {
  Options options;
  options.command = Command::train;
  options.train_samples = 1000;
  options.lr = 0.01;
  return options;
}

// Both sides round a handful of operations on numbers up to 0.01; cancellation near the minimum
// leaves an absolute error of that size.
constexpr double kRounding = 1e-16;

TEST(LearningRate, EveryStyleEverywhere) {
  for (const auto& [style, decay_style] : kLrDecayStyles) {
    for (const auto& [wsd_style, wsd_decay_style] : kWsdDecayStyles) {
      for (const int64_t warmup : {0, 1, 100}) {
        Options options = sampled_options();
        options.lr_decay_style = decay_style;
        options.lr_decay_samples = 900;
        options.lr_warmup_samples = warmup;
        options.lr_warmup_init = 0.002;
        options.min_lr = 0.0005;
        if (style == "WSD") {
          options.lr_wsd_decay_style = wsd_decay_style;
          options.lr_wsd_decay_samples = 300;
        }
        check_schedules(options);
        const LearningRateSchedule schedule = make_schedules(options).learning_rate;
        const MegatronRate expected = {std::string(style),
                                       std::string(wsd_style),
                                       0.002,
                                       0.01,
                                       0.0005,
                                       double(warmup),
                                       900,
                                       300};
        for (int64_t n = 0; n <= 1100; ++n) {
          ASSERT_NEAR(schedule.at(n), expected.at(static_cast<double>(n)), kRounding)
              << style << " " << wsd_style << " after " << n << " with a warm-up of " << warmup;
        }
      }
    }
  }
}

TEST(LearningRate, WsdStaysUpAndComesDown) {
  Options options = sampled_options();
  options.lr_decay_style = LrDecayStyle::wsd;
  options.lr_wsd_decay_samples = 200;
  options.lr_warmup_samples = 100;
  options.min_lr = 0.001;
  const LearningRateSchedule schedule = make_schedules(options).learning_rate;
  EXPECT_DOUBLE_EQ(schedule.at(101), 0.01);
  EXPECT_DOUBLE_EQ(schedule.at(800), 0.01);
  EXPECT_LT(schedule.at(801), 0.01);
  // Exponential is Megatron's default: half way down, c = 2 * 0.5^0.5 - 1.
  EXPECT_NEAR(schedule.at(900), 0.001 + 0.009 * (std::sqrt(2.0) - 1), kRounding);
  EXPECT_NEAR(schedule.at(1000), 0.001, kRounding);
}

TEST(LearningRate, StepsCountTheirSamples) {
  Options options;
  options.command = Command::train;
  options.train_iters = 50;
  options.micro_batch_size = 2;
  options.global_batch_size = 8;
  options.lr = 0.01;
  options.lr_warmup_iters = 5;
  options.lr_decay_style = LrDecayStyle::wsd;
  options.lr_wsd_decay_iters = 10;
  LearningRateSchedule schedule = make_schedules(options).learning_rate;
  EXPECT_EQ(schedule.warmup_samples, 40);
  EXPECT_EQ(schedule.decay_samples, 400);
  EXPECT_EQ(schedule.wsd_decay_samples, 80);
  options.lr_warmup_iters = 0;
  options.lr_warmup_fraction = 0.03;
  options.lr_decay_iters = 40;
  schedule = make_schedules(options).learning_rate;
  EXPECT_EQ(schedule.decay_samples, 320);
  EXPECT_DOUBLE_EQ(schedule.warmup_samples, 9.6);
  EXPECT_DOUBLE_EQ(schedule.at(8), 0.01 * 8 / 9.6);
  EXPECT_EQ(schedule.at(16), 0.01);
}

TEST(LearningRate, DefaultsAreMegatrons) {
  const Schedules schedules = make_schedules(sampled_options());
  EXPECT_EQ(schedules.learning_rate.style, LrDecayStyle::linear);
  EXPECT_EQ(schedules.learning_rate.min_lr, 0);
  EXPECT_EQ(schedules.learning_rate.decay_samples, 1000);
  EXPECT_EQ(schedules.weight_decay.at(0), 0.01);
  EXPECT_EQ(schedules.weight_decay.at(2000), 0.01);
}

// The same shape between other ends; the least rate is that of all others unless it is given.
TEST(LearningRate, MayBeAnotherOneForEmbeddingAndOutput) {
  Options options = sampled_options();
  options.lr = 0.5;
  options.min_lr = 0.1;
  options.lr_warmup_samples = 10;
  EXPECT_FALSE(make_schedules(options).decoupled_learning_rate.has_value());
  options.decoupled_lr = 2.0;
  const Schedules schedules = make_schedules(options);
  ASSERT_TRUE(schedules.decoupled_learning_rate.has_value());
  EXPECT_EQ(schedules.learning_rate.at(10), 0.5);
  EXPECT_EQ(schedules.decoupled_learning_rate->at(5), 1.0);
  EXPECT_EQ(schedules.decoupled_learning_rate->at(10), 2.0);
  EXPECT_EQ(schedules.decoupled_learning_rate->at(5000), 0.1);
  options.decoupled_min_lr = 0.25;
  EXPECT_EQ(make_schedules(options).decoupled_learning_rate->at(5000), 0.25);
}

TEST(WeightDecay, EveryStyleEverywhere) {
  for (const auto& [name, style] : kIncreaseStyles) {
    if (style == IncreaseStyle::constant) continue;
    Options options = sampled_options();
    options.start_weight_decay = 0.02;
    options.end_weight_decay = 0.1;
    options.weight_decay_incr_style = style;
    const WeightDecaySchedule schedule = make_schedules(options).weight_decay;
    EXPECT_EQ(schedule.at(0), 0.02);
    EXPECT_DOUBLE_EQ(schedule.at(500), 0.06);
    EXPECT_DOUBLE_EQ(schedule.at(1000), 0.1);
    EXPECT_EQ(schedule.at(1001), 0.1);
    for (int64_t n = 0; n <= 1000; ++n) {
      const double r = static_cast<double>(n) / 1000;
      const double c =
          style == IncreaseStyle::linear ? r : 0.5 * (std::cos(std::numbers::pi * (1 - r)) + 1);
      ASSERT_NEAR(schedule.at(n), 0.02 + c * (0.1 - 0.02), kRounding) << name << " after " << n;
    }
  }
}

// Megatron's RampupBatchsizeNumMicroBatchesCalculator.update.
int32_t megatron_ramp(int32_t start, int32_t increment, int64_t samples, int32_t end,
                      int64_t consumed) {
  if (consumed > samples) return end;
  const int64_t increments = (end - start) / increment;
  // int(consumed / (samples / increments)), exactly.
  return static_cast<int32_t>(start + consumed * increments / samples * increment);
}

TEST(BatchSize, RampIsMegatrons) {
  for (const int64_t samples : {1, 7, 100, 257, 1000}) {
    Options options = sampled_options();
    options.micro_batch_size = 2;
    options.global_batch_size = 32;
    options.rampup_batch_size = "4 4 " + std::to_string(samples);
    const BatchSizeSchedule schedule = make_batch_sizes(options, 16);
    EXPECT_EQ(schedule.largest(), 32);
    for (int64_t consumed = 0; consumed <= 1200; ++consumed) {
      ASSERT_EQ(schedule.at(consumed), megatron_ramp(4, 4, samples, 32, consumed))
          << "after " << consumed << " of " << samples;
    }
  }
}

TEST(BatchSize, RampOfALongRun) {
  Options options = sampled_options();
  options.global_batch_size = 1024;
  options.rampup_batch_size = "32 32 100000000000";
  const BatchSizeSchedule schedule = make_batch_sizes(options, 16);
  // 31 increments: the second one begins at ceil(1e11 / 31).
  EXPECT_EQ(schedule.at(3225806452), 32 + 32);
  EXPECT_EQ(schedule.at(3225806451), 32);
  EXPECT_EQ(schedule.at(99999999999), 1024 - 32);
  EXPECT_EQ(schedule.at(100000000000), 1024);
}

TEST(BatchSize, StepsAreInTokens) {
  Options options = sampled_options();
  options.step_batch_size_schedule = "0:8 1K:16 0.0025M:4";
  const BatchSizeSchedule schedule = make_batch_sizes(options, 100);
  EXPECT_EQ(schedule.stages, (std::vector<BatchSizeSchedule::Stage>{{0, 8}, {10, 16}, {25, 4}}));
  EXPECT_EQ(schedule.largest(), 16);
  EXPECT_EQ(schedule.at(9), 8);
  EXPECT_EQ(schedule.at(10), 16);
  EXPECT_EQ(schedule.at(24), 16);
  EXPECT_EQ(schedule.at(1000000), 4);
}

TEST(BatchSize, StepsBetweenPositions) {
  Options options = sampled_options();
  options.global_batch_size = 12;
  options.rampup_batch_size = "4 4 20";  // 4 from 0, 8 from 10, 12 from 20
  const BatchSizeSchedule schedule = make_batch_sizes(options, 16);
  for (int64_t end = 0; end < 200; ++end) {
    // By hand: as many whole steps as end no later than there, from each of their beginnings.
    std::vector<int64_t> begins = {0};
    while (begins.back() + schedule.at(begins.back()) <= end) {
      begins.push_back(begins.back() + schedule.at(begins.back()));
    }
    for (size_t i = 0; i < begins.size(); ++i) {
      ASSERT_EQ(schedule.steps_between(begins[i], end), static_cast<int64_t>(begins.size() - 1 - i))
          << "from " << begins[i] << " to " << end;
    }
  }
}

template <class Change>
std::string refusal_after(const Change& change) {
  Options options = sampled_options();
  options.micro_batch_size = 4;
  change(options);
  try {
    check_schedules(options);
  } catch (const UserError& error) {
    EXPECT_EQ(error.status(), ExitStatus::bad_request);
    return error.what();
  }
  return "accepted";
}

TEST(Schedules, ContradictionsAreRefused) {
  const auto expect = [](const std::string& message, const std::string& part) {
    EXPECT_NE(message.find(part), std::string::npos) << message;
  };
  EXPECT_EQ(refusal_after([](Options&) {}), "accepted");
  expect(refusal_after([](Options& o) { o.train_iters = 5; }), "exclude each other");
  expect(refusal_after([](Options& o) { o.lr_decay_iters = 5; }), "Use --lr-decay-samples");
  expect(refusal_after([](Options& o) { o.lr_warmup_iters = 5; }), "Use --lr-warmup-samples");
  expect(refusal_after([](Options& o) {
           o.train_samples.reset();
           o.train_iters = 5;
           o.lr_warmup_samples = 2;
         }),
         "Use --lr-warmup-iters");
  expect(refusal_after([](Options& o) {
           o.train_samples.reset();
           o.train_iters = 5;
           o.rampup_batch_size = "4 4 10";
           o.global_batch_size = 8;
         }),
         "Use --train-samples");
  expect(refusal_after([](Options& o) {
           o.lr_warmup_samples = 5;
           o.lr_warmup_fraction = 0.1;
         }),
         "--lr-warmup-fraction and --lr-warmup-samples");
  expect(refusal_after([](Options& o) {
           o.train_samples.reset();
           o.train_iters = 5;
           o.lr_wsd_decay_samples = 2;
         }),
         "--lr-wsd-decay-samples does not go with --train-iters. Use --lr-wsd-decay-iters");
  expect(refusal_after([](Options& o) { o.lr_wsd_decay_iters = 2; }),
         "--lr-wsd-decay-iters does not go with --train-samples. Use --lr-wsd-decay-samples");
  expect(refusal_after([](Options& o) { o.train_tokens = 1e9; }),
         "--train-tokens: it belongs to --gpus.");
  expect(refusal_after([](Options& o) {
           o.train_tokens = 1e9;
           o.gpus = "8xh100";
         }),
         "--train-tokens and --train-samples exclude each other");
  expect(refusal_after([](Options& o) {
           o.train_samples.reset();
           o.train_iters = 5;
           o.train_tokens = 1e9;
           o.gpus = "8xh100";
         }),
         "--train-tokens and --train-iters exclude each other");
  expect(refusal_after([](Options& o) { o.lr_warmup_init = 1; }), "--lr-warmup-init 1");
  expect(refusal_after([](Options& o) { o.decoupled_min_lr = 1; }), "needs --decoupled-lr");
  expect(refusal_after([](Options& o) {
           o.decoupled_lr = 1;
           o.decoupled_min_lr = 2;
         }),
         "--decoupled-min-lr 2 is larger than --decoupled-lr 1");
  expect(refusal_after([](Options& o) { o.lr_decay_style = LrDecayStyle::wsd; }),
         "--lr-wsd-decay-samples N");
  expect(refusal_after([](Options& o) {
           o.lr_decay_style = LrDecayStyle::wsd;
           o.lr_wsd_decay_samples = 901;
           o.lr_warmup_samples = 100;
         }),
         "--lr-wsd-decay-samples 901");
  expect(refusal_after([](Options& o) { o.end_weight_decay = 1; }), "--weight-decay-incr-style");
  expect(refusal_after([](Options& o) { o.weight_decay_incr_style = IncreaseStyle::linear; }),
         "--start-weight-decay");
  expect(refusal_after([](Options& o) {
           o.weight_decay_incr_style = IncreaseStyle::linear;
           o.start_weight_decay = 0.2;
           o.end_weight_decay = 0.1;
         }),
         "--start-weight-decay 0.2 is larger than --end-weight-decay 0.1");
  expect(refusal_after([](Options& o) { o.global_batch_size = 6; }), "--global-batch-size 6");
  expect(refusal_after([](Options& o) { o.rampup_batch_size = "4 4 10"; }),
         "--global-batch-size N");
  for (const char* ramp : {"4 4", "4 4 10 10", "4 x 10", "0 4 10", "4 4 10.5", "4 4 -1"}) {
    expect(refusal_after([&](Options& o) {
             o.rampup_batch_size = ramp;
             o.global_batch_size = 8;
           }),
           "three whole numbers");
  }
  expect(refusal_after([](Options& o) {
           o.rampup_batch_size = "4 3 10";
           o.global_batch_size = 8;
         }),
         "does not reach");
  expect(refusal_after([](Options& o) {
           o.rampup_batch_size = "4 2 10";
           o.global_batch_size = 8;
         }),
         "size 6 is not a multiple of --micro-batch-size 4");
  for (const char* steps : {"0:4 x", "0:4 5Q:8", "0:4 8", "0:4 5:0", "0:4 1.5:8"}) {
    expect(refusal_after([&](Options& o) { o.step_batch_size_schedule = steps; }), "TOKENS:SIZE");
  }
  expect(refusal_after([](Options& o) { o.step_batch_size_schedule = "5:4"; }), "must be 0");
  expect(refusal_after([](Options& o) { o.step_batch_size_schedule = "0:4 7:8 7:12"; }),
         "must rise");
  expect(refusal_after([](Options& o) {
           o.step_batch_size_schedule = "0:4 7:8";
           o.global_batch_size = 4;
         }),
         "largest size is 8");
  expect(refusal_after([](Options& o) {
           o.rampup_batch_size = "4 4 10";
           o.global_batch_size = 8;
           o.step_batch_size_schedule = "0:4 7:8";
         }),
         "--rampup-batch-size and --step-batch-size-schedule exclude each other");
  expect(refusal_after([](Options& o) {
           o.step_batch_size_schedule = "0:4 7:8";
           o.decrease_batch_size_if_needed = true;
         }),
         "--decrease-batch-size-if-needed goes with one global batch size");
  expect(refusal_after([](Options& o) {
           o.rampup_batch_size = "4 4 9223372036854775807";
           o.global_batch_size = 8;
         }),
         "9223372036854775807 samples in 1 increments are too many");
}

// Each just as large as it may be, and a little larger.
TEST(Schedules, LimitsAreKeptToTheLastNumber) {
  struct Case {
    std::string good;
    std::string bad;
    void (*set)(Options& options, const std::string& value);
    std::string refused;
  };
  static const auto number = [](const std::string& text) { return std::stod(text); };
  static const auto whole = [](const std::string& text) { return std::stoll(text); };
  const Case cases[] = {
      {"0.5", "0.51",
       [](Options& o, const std::string& v) {
         o.lr = 0.5;
         o.min_lr = number(v);
       },
       "--min-lr 0.51 is larger than --lr 0.5."},
      {"0.5", "0.51",
       [](Options& o, const std::string& v) {
         o.lr = 0.5;
         o.lr_warmup_init = number(v);
       },
       "--lr-warmup-init 0.51 is larger than --lr 0.5."},
      {"0.5", "0.51",
       [](Options& o, const std::string& v) {
         o.decoupled_lr = 0.5;
         o.decoupled_min_lr = number(v);
       },
       "--decoupled-min-lr 0.51 is larger than --decoupled-lr 0.5."},
      {"0", "0.01",
       [](Options& o, const std::string& v) {
         o.decoupled_lr = 0;
         o.min_lr = number(v);
       },
       "--min-lr 0.01 is larger than --decoupled-lr 0."},
      {"0.5", "0.51",
       [](Options& o, const std::string& v) {
         o.weight_decay_incr_style = IncreaseStyle::cosine;
         o.start_weight_decay = number(v);
         o.end_weight_decay = 0.5;
       },
       "--start-weight-decay 0.51 is larger than --end-weight-decay 0.5."},
      {"999", "1000", [](Options& o, const std::string& v) { o.lr_warmup_samples = whole(v); },
       "--lr-warmup-samples 1000 leaves nothing of the 1000 samples of --train-samples; the "
       "warm-up must be shorter."},
      {"49", "50",
       [](Options& o, const std::string& v) {
         o.lr_decay_samples = 50;
         o.lr_warmup_samples = whole(v);
       },
       "--lr-warmup-samples 50 leaves nothing of the 50 samples of --lr-decay-samples; the warm-up "
       "must be shorter."},
      {"4", "5",
       [](Options& o, const std::string& v) {
         o.train_samples.reset();
         o.train_iters = 5;
         o.lr_warmup_iters = whole(v);
       },
       "--lr-warmup-iters 5 leaves nothing of the 5 steps of --train-iters; the warm-up must be "
       "shorter."},
      {"900", "901",
       [](Options& o, const std::string& v) {
         o.lr_decay_style = LrDecayStyle::wsd;
         o.lr_warmup_samples = 100;
         o.lr_wsd_decay_samples = whole(v);
       },
       "--lr-wsd-decay-samples 901 is longer than what the warm-up leaves of the 1000 samples of "
       "--train-samples."},
      {"750", "751",
       [](Options& o, const std::string& v) {
         o.lr_decay_style = LrDecayStyle::wsd;
         o.lr_warmup_fraction = 0.25;
         o.lr_wsd_decay_samples = whole(v);
       },
       "--lr-wsd-decay-samples 751 is longer than what the warm-up leaves of the 1000 samples of "
       "--train-samples."},
      {"7", "8",
       [](Options& o, const std::string& v) {
         o.train_samples.reset();
         o.train_iters = 9;
         o.lr_decay_iters = 8;
         o.lr_decay_style = LrDecayStyle::wsd;
         o.lr_warmup_iters = 1;
         o.lr_wsd_decay_iters = whole(v);
       },
       "--lr-wsd-decay-iters 8 is longer than what the warm-up leaves of the 8 steps of "
       "--lr-decay-iters."},
      {"68719476736", "68719476737",
       [](Options& o, const std::string& v) {
         o.train_samples.reset();
         o.train_iters = 9;
         o.lr_decay_iters = whole(v);
       },
       "--lr-decay-iters 68719476737 with steps of 4 sequences is more than the 274877906944 "
       "sequences that a run may take."},
      {"274877906944", "274877906945",
       [](Options& o, const std::string& v) { o.lr_decay_samples = whole(v); },
       "--lr-decay-samples 274877906945 is more than the 274877906944 sequences that a run may "
       "take."},
      {"274877906944", "274877906945",
       [](Options& o, const std::string& v) {
         o.global_batch_size = 8;
         o.rampup_batch_size = "4 4 " + v;
       },
       "--rampup-batch-size 4 4 274877906945: 274877906945 samples in 1 increments are too many; "
       "at most 274877906944 and 1048576."},
      {"4194308", "4194312",
       [](Options& o, const std::string& v) {
         o.global_batch_size = static_cast<int32_t>(whole(v));
         o.rampup_batch_size = "4 4 10";
       },
       "--rampup-batch-size 4 4 10: 10 samples in 1048577 increments are too many; at most "
       "274877906944 and 1048576."},
      {"8", "12",
       [](Options& o, const std::string& v) {
         o.global_batch_size = 8;
         o.rampup_batch_size = v + " 4 10";
       },
       "--rampup-batch-size 12 4 10: 12 plus multiples of 4 does not reach --global-batch-size 8."},
      {"9000T", "9001T",
       [](Options& o, const std::string& v) { o.step_batch_size_schedule = "0:4 " + v + ":8"; },
       "--step-batch-size-schedule 0:4 9001T:8: '9001T:8' is not TOKENS:SIZE, as in 250B:1536."},
      {"2K", "1K",
       [](Options& o, const std::string& v) {
         o.step_batch_size_schedule = "0K:4 1000:8 " + v + ":12";
       },
       "--step-batch-size-schedule 0K:4 1000:8 1K:12: the thresholds must rise."},
      {"0.5K", "0.5",
       [](Options& o, const std::string& v) { o.step_batch_size_schedule = "0:4 " + v + ":8"; },
       "--step-batch-size-schedule 0:4 0.5:8: '0.5:8' is not TOKENS:SIZE, as in 250B:1536."},
  };
  for (const Case& each : cases) {
    EXPECT_EQ(refusal_after([&](Options& o) { each.set(o, each.good); }), "accepted")
        << each.refused;
    EXPECT_EQ(refusal_after([&](Options& o) { each.set(o, each.bad); }), each.refused);
  }
}

TEST(Schedules, TheLongestRunIsAccepted) {
  const auto of_iters = [](int64_t iters) {
    return refusal_after([&](Options& o) {
      o.train_samples.reset();
      o.train_iters = iters;
    });
  };
  EXPECT_EQ(of_iters(kMostSamples / 4), "accepted");
  EXPECT_EQ(of_iters(kMostSamples / 4 + 1),
            "--train-iters 68719476737 with steps of 4 sequences is more than the 274877906944 "
            "sequences that a run may take.");
  EXPECT_EQ(refusal_after([](Options& o) { o.train_samples = kMostSamples; }), "accepted");
  EXPECT_EQ(refusal_after([](Options& o) { o.train_samples = kMostSamples + 1; }),
            "--train-samples 274877906945 is more than the 274877906944 sequences that a run may "
            "take.");
}

TEST(Schedules, EveryNumberThatARateDependsOnIsCompared) {
  Options before = sampled_options();
  before.lr_decay_style = LrDecayStyle::wsd;
  before.lr_wsd_decay_samples = 30;
  before.lr_decay_samples = 1000;
  before.lr_warmup_samples = 100;
  before.decoupled_lr = 0.02;
  before.decoupled_min_lr = 0.001;
  before.start_weight_decay = 0.1;
  before.end_weight_decay = 0.2;
  before.weight_decay_incr_style = IncreaseStyle::linear;
  const auto expect = [&](const char* difference, const auto& change) {
    Options after = before;
    change(after);
    EXPECT_EQ(schedule_difference(make_schedules(before), make_schedules(after)), difference);
  };
  expect("", [](Options&) {});
  expect("--lr 0.01 instead of 0.02", [](Options& o) { o.lr = 0.02; });
  expect("--lr-decay-style WSD instead of linear",
         [](Options& o) { o.lr_decay_style = LrDecayStyle::linear; });
  expect("a warm-up (samples) of 100 instead of 50", [](Options& o) { o.lr_warmup_samples = 50; });
  expect("--decoupled-lr 0.02 instead of 0.03", [](Options& o) { o.decoupled_lr = 0.03; });
  expect("--decoupled-min-lr 0.001 instead of 0.002",
         [](Options& o) { o.decoupled_min_lr = 0.002; });
  expect("--lr-warmup-init 0 instead of 0.005", [](Options& o) { o.lr_warmup_init = 0.005; });
  expect("--min-lr 0 instead of 0.0005", [](Options& o) { o.min_lr = 0.0005; });
  expect(
      "a decay of the learning rate (--lr-decay-iters; if unset, --train-iters) to sample 1000 "
      "instead of 900",
      [](Options& o) { o.lr_decay_samples = 900; });
  expect("--lr-wsd-decay-style exponential instead of cosine",
         [](Options& o) { o.lr_wsd_decay_style = WsdDecayStyle::cosine; });
  expect("a fall at the end (samples) of 30 instead of 40",
         [](Options& o) { o.lr_wsd_decay_samples = 40; });
  expect("--weight-decay-incr-style linear instead of cosine",
         [](Options& o) { o.weight_decay_incr_style = IncreaseStyle::cosine; });
  expect("a weight decay of 0.2 instead of 0.3", [](Options& o) { o.end_weight_decay = 0.3; });
  expect("--start-weight-decay 0.1 instead of 0.05",
         [](Options& o) { o.start_weight_decay = 0.05; });
  expect("an end of the weight decay's change (samples) at 1000 instead of 2000",
         [](Options& o) { o.train_samples = 2000; });
}

TEST(Schedules, SurviveAFileAndNameWhatDiffers) {
  Options options = sampled_options();
  options.lr = 0.1 + 0.2;
  options.lr_decay_style = LrDecayStyle::wsd;
  options.lr_wsd_decay_style = WsdDecayStyle::cosine;
  options.lr_wsd_decay_samples = 30;
  options.lr_warmup_fraction = 0.01;
  options.start_weight_decay = 0.1;
  options.end_weight_decay = 0.2;
  options.weight_decay_incr_style = IncreaseStyle::cosine;
  const Schedules schedules = make_schedules(options);
  const Schedules read = parse_schedules(to_json(schedules), "index.json");
  EXPECT_EQ(read.learning_rate, schedules.learning_rate);
  EXPECT_EQ(read.weight_decay, schedules.weight_decay);
  EXPECT_EQ(schedule_difference(read, schedules), "");
  options.min_lr = 0.125;
  EXPECT_EQ(schedule_difference(schedules, make_schedules(options)), "--min-lr 0 instead of 0.125");
  options.min_lr = 0;
  options.decoupled_lr = 7;
  const Schedules decoupled = make_schedules(options);
  EXPECT_EQ(parse_schedules(to_json(decoupled), "index.json").decoupled_learning_rate,
            decoupled.decoupled_learning_rate);
  EXPECT_EQ(schedule_difference(decoupled, schedules),
            "--decoupled-lr 7 instead of 0.30000000000000004");
  // What a schedule does not use may differ.
  options = sampled_options();
  options.lr_decay_style = LrDecayStyle::constant;
  Options longer = options;
  longer.train_samples = 2000;
  EXPECT_EQ(schedule_difference(make_schedules(options), make_schedules(longer)), "");
  EXPECT_THROW(parse_schedules("{}", "index.json"), UserError);
  EXPECT_THROW(parse_schedules("[]", "index.json"), UserError);
}

}  // namespace
}  // namespace troupe
