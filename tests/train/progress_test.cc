// What a person reads while a run goes on.
#include "train/progress.h"

#include <cmath>
#include <cstdlib>
#include <fcntl.h>
#include <functional>
#include <gtest/gtest.h>
#include <limits>
#include <regex>
#include <sstream>
#include <sys/ioctl.h>
#include <unistd.h>

namespace troupe {
namespace {

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

TEST(IntervalOfLines, GivesAboutFiftyLines) {
  for (const int64_t steps : {1, 49, 50, 51, 360, 1000, 12345, 1'000'000'000}) {
    for (const int64_t logged : {1, 3, 10}) {
      const int64_t interval = interval_of_lines(steps, logged);
      EXPECT_EQ(interval % logged, 0);
      EXPECT_LE(steps / interval, 50) << steps << " " << logged;
      // The next smaller round number would be too many.
      if (interval > logged) {
        EXPECT_GT(steps / (interval / 2), 40) << steps << " " << logged;
      }
    }
  }
}

TEST(LossForComparison, IsInBitsOfAByteOrAPerplexity) {
  EXPECT_EQ(loss_for_comparison(0.6931471805599453, /*byte_tokens=*/true), "1.000 bits/byte");
  EXPECT_EQ(loss_for_comparison(0.0, /*byte_tokens=*/false), "perplexity 1");
  EXPECT_EQ(loss_for_comparison(-std::nan(""), /*byte_tokens=*/true), "nan bits/byte");
}

StepMetrics metrics_of(int64_t step, double tflops) {
  StepMetrics metrics;
  metrics.step = step;
  metrics.loss = 2;
  metrics.tokens = 100 * step;
  metrics.tokens_per_s = 1000;
  metrics.tflops_per_gpu = tflops;
  return metrics;
}

TEST(Progress, NeverShowsMoreThanTheLimit) {
  ::testing::internal::CaptureStderr();
  Progress progress({.last_step = 3, .last_token = 300, .matmul_limit = 1e12});
  progress.step(metrics_of(1, 0.5), /*logged=*/true);
  progress.step(metrics_of(2, 2.0), /*logged=*/true);
  progress.step(metrics_of(3, 1.0), /*logged=*/true);
  const std::vector<std::string> lines = lines_of(::testing::internal::GetCapturedStderr());
  ASSERT_EQ(lines.size(), 3U);
  EXPECT_NE(lines[0].find("| 50% of limit |"), std::string::npos) << lines[0];
  EXPECT_NE(lines[1].find("| 100% of limit |"), std::string::npos) << lines[1];
  EXPECT_NE(lines[2].find("| 50% of limit |"), std::string::npos) << lines[2];
}

TEST(Progress, ComparesWithThePlannedTimeWhereThereIsOne) {
  ::testing::internal::CaptureStderr();
  Progress progress({.last_step = 3, .last_token = 300, .matmul_limit = 1e12});
  StepMetrics metrics = metrics_of(1, 0.5);
  metrics.step_time_s = 3;
  progress.step(metrics, /*logged=*/true);
  metrics.planned_step_time_s = 2;
  progress.step(metrics, /*logged=*/true);
  metrics.rooms_lacked = 1;
  progress.step(metrics, /*logged=*/true);
  const std::vector<std::string> lines = lines_of(::testing::internal::GetCapturedStderr());
  ASSERT_EQ(lines.size(), 3U);
  EXPECT_EQ(lines[0].find("planned"), std::string::npos) << lines[0];
  EXPECT_NE(lines[1].find("| 1.50x planned time |"), std::string::npos) << lines[1];
  EXPECT_EQ(lines[2].find("planned"), std::string::npos) << "in rounds: " << lines[2];
}

// What a terminal of that many columns gets of a step that stays.
std::string on_terminal(unsigned short columns, const StepMetrics& metrics, int64_t last_step = 1) {
  const int screen = posix_openpt(O_RDWR | O_NOCTTY);
  EXPECT_TRUE(screen >= 0 && grantpt(screen) == 0 && unlockpt(screen) == 0);
  const int terminal = open(ptsname(screen), O_RDWR | O_NOCTTY);
  const winsize size{.ws_row = 24, .ws_col = columns, .ws_xpixel = 0, .ws_ypixel = 0};
  EXPECT_EQ(ioctl(terminal, TIOCSWINSZ, &size), 0);
  const int errors = dup(STDERR_FILENO);
  dup2(terminal, STDERR_FILENO);
  Progress({.last_step = last_step, .last_token = 100 * last_step, .matmul_limit = 1e12})
      .step(metrics, /*logged=*/true);
  dup2(errors, STDERR_FILENO);
  std::string text(4000, '\0');
  text.resize(static_cast<size_t>(std::max<ssize_t>(0, read(screen, text.data(), text.size()))));
  for (const int each : {errors, terminal, screen}) close(each);
  return text;
}

TEST(Progress, WhatMattersLeastIsLeftOutFirst) {
  StepMetrics metrics = metrics_of(1, 0.5);
  metrics.layers.resize(1);
  metrics.step_time_s = metrics.planned_step_time_s = 1;
  metrics.num_zeros = 3;
  metrics.params_norm = 2;
  std::vector<std::string> left = {"zeros",     "params norm", "perplexity", "lr",      "grad norm",
                                   "imbalance", "planned",     "of limit",   "tokens/s"};
  for (unsigned short columns = 250; columns >= 20; --columns) {
    const std::string text = on_terminal(columns, metrics);
    std::string shown = text.substr(text.find("step"));
    shown = std::regex_replace(shown, std::regex("\r?\n *"), " ");  // lines that stay are wrapped
    while (!left.empty() && shown.find("| " + left.front()) == std::string::npos &&
           shown.find(" " + left.front() + " |") == std::string::npos) {
      left.erase(left.begin());
    }
    for (const std::string& part : left) {
      EXPECT_NE(shown.find(part), std::string::npos) << columns << ": " << shown;
    }
    EXPECT_NE(shown.find("step 1/1 | loss 2.0000"), std::string::npos) << columns << ": " << shown;
    EXPECT_NE(shown.find("done"), std::string::npos) << columns << ": " << shown;
  }
  EXPECT_EQ(left, std::vector<std::string>{});
  metrics.rooms_lacked = 1;  // stays longer than all but the speed
  EXPECT_NE(on_terminal(60, metrics).find("in rounds"), std::string::npos);
}

TEST(Progress, AStepThatDoesNotStayIsTheLiveLine) {
  // Of 1,000 steps every twentieth stays.
  const std::string live = on_terminal(80, metrics_of(3, 0.5), 1000);
  EXPECT_NE(live.find("step    3/1000 | loss 2.0000"), std::string::npos) << live;
  const std::string stays = on_terminal(80, metrics_of(20, 0.5), 1000);
  EXPECT_NE(stays.find("step   20/1000 | loss 2.0000"), std::string::npos) << stays;
}

TEST(Progress, SaysWhyAnUpdateWasSkipped) {
  StepMetrics metrics = metrics_of(3, 0.5);
  metrics.skipped = true;
  metrics.grad_norm = 100;
  EXPECT_NE(on_terminal(120, metrics, 1000).find("update skipped: gradients too large"),
            std::string::npos);
  metrics.grad_norm = std::numeric_limits<double>::infinity();
  EXPECT_NE(on_terminal(120, metrics, 1000).find("update skipped: gradients not finite"),
            std::string::npos);
}

TEST(Progress, LinesHaveTheTimeWhereThereIsNoTerminal) {
  ::testing::internal::CaptureStderr();
  Progress progress({.last_step = 20, .last_token = 2000, .log_interval = 10, .matmul_limit = 1});
  for (int64_t step = 1; step <= 20; ++step) progress.step(metrics_of(step, 1), step % 10 == 0);
  progress.line("saved");
  const std::vector<std::string> lines = lines_of(::testing::internal::GetCapturedStderr());
  ASSERT_EQ(lines.size(), 3U) << "the logged steps and the note";
  for (const std::string& line : lines) {
    EXPECT_TRUE(std::regex_search(line, std::regex("^[0-9]{2}:[0-9]{2}:[0-9]{2} "))) << line;
  }
  EXPECT_NE(lines[0].find("step 10/20 | loss 2.0000 | perplexity 7.389"), std::string::npos)
      << lines[0];
}

TEST(Progress, TheTimeLeftIsThatOfTheTokensLeft) {
  ::testing::internal::CaptureStderr();
  Progress progress({.last_step = 100, .last_token = 10000, .matmul_limit = 1e12});
  // 100 tokens a step, 1000 a second.
  progress.step(metrics_of(60, 1), /*logged=*/true);
  progress.step(metrics_of(90, 1), /*logged=*/true);
  progress.step(metrics_of(100, 1), /*logged=*/true);
  const std::vector<std::string> lines = lines_of(::testing::internal::GetCapturedStderr());
  ASSERT_EQ(lines.size(), 3U);
  EXPECT_TRUE(lines[0].ends_with(" | 4 s left")) << lines[0];
  EXPECT_TRUE(lines[1].ends_with(" | 1 s left")) << lines[1];
  EXPECT_TRUE(lines[2].ends_with(" | done")) << lines[2];
}

StepMetrics loads_of(int32_t layers, int32_t experts) {
  StepMetrics metrics;
  for (int32_t layer = 0; layer < layers; ++layer) {
    RouterMetrics router;
    router.layer = layer;
    for (int32_t expert = 0; expert < experts; ++expert) router.rows.push_back(100);
    router.rows[0] += 10 * layer;  // later layers are worse
    metrics.layers.push_back(router);
  }
  return metrics;
}

TEST(ExpertLoadChart, HasALineForEachLayer) {
  const std::vector<std::string> lines = lines_of(expert_load_chart(loads_of(2, 4), 80));
  ASSERT_EQ(lines.size(), 4U);
  EXPECT_EQ(lines[1], "  layer 0  ████  largest/mean 1.00");
  EXPECT_EQ(lines[2], "  layer 1  ████  largest/mean 1.07");
  EXPECT_NE(lines[3].find("layer 1"), std::string::npos) << "the worst layer is named";
  EXPECT_EQ(expert_load_chart(StepMetrics(), 80), "");
}

TEST(ExpertLoadChart, OfALargeModelStaysSmall) {
  const std::vector<std::string> lines = lines_of(expert_load_chart(loads_of(48, 128), 80));
  EXPECT_LE(lines.size(), 14U);
  for (const std::string& line : lines) EXPECT_LE(columns_of(line), 80U) << line;
  EXPECT_NE(lines.back().find("layer 47"), std::string::npos) << lines.back();
  EXPECT_EQ(lines_of(expert_load_chart(loads_of(12, 4), 80))[0],
            "Expert loads of the last step: 4 experts in 12 layers");
  const std::vector<std::string> of_13 = lines_of(expert_load_chart(loads_of(13, 4), 80));
  EXPECT_EQ(of_13.size(), 14U);
  EXPECT_EQ(of_13[0],
            "Expert loads of the last step: 4 experts in 13 layers, the 12 least balanced");
  EXPECT_TRUE(of_13[1].starts_with("  layer  1")) << "layer 0 is balanced: " << of_13[1];
}

TEST(BlockChart, ShowsTheLargestOfNeighbours) {
  EXPECT_EQ(block_chart({0, 1, 4, 8}, 10), " ▁▄█");
  EXPECT_EQ(block_chart({0, 1, 4, 8}, 2), "▁█");
  EXPECT_EQ(block_chart({0, 0}, 2), "  ");
  EXPECT_EQ(block_chart({}, 2), "");
}

TEST(FitTo, CutsCharactersNotBytes) {
  EXPECT_EQ(fit_to("größer", 6), "größer");
  EXPECT_EQ(fit_to("größer", 5), "größ…");
  EXPECT_EQ(fit_to("ab", 1), "…");
  EXPECT_EQ(fit_to("ab", 0), "");
  EXPECT_EQ(fit_lines("abcd\nab\n", 3), "ab…\nab\n");
  EXPECT_EQ(fit_lines("abcd\nab\n", 0), "abcd\nab\n");
}

TEST(WrapText, BreaksAtBlanksAndIndents) {
  EXPECT_EQ(wrap_text("  one two three", 9, 2), "  one two\n    three");
  EXPECT_EQ(wrap_text("a  b\nlong line here", 9, 0), "a  b\nlong line\nhere");
  EXPECT_EQ(wrap_text("unbreakable", 4, 2), "unbreakable");
  EXPECT_EQ(wrap_text("a\n", 4, 2), "a\n");
  EXPECT_EQ(wrap_text("model   of three", 12, 8), "model   of\n        three") << "aligned";
}

TEST(FormatTimeLeft, HasWholeSeconds) {
  EXPECT_EQ(format_time_left(0.2), "0 s left");
  EXPECT_EQ(format_time_left(59.4), "59 s left");
  EXPECT_EQ(format_time_left(65), "1 min 05 s left");
}

RouterMetrics router_of(int32_t layer, std::vector<int64_t> rows) {
  RouterMetrics router;
  router.layer = layer;
  router.rows = std::move(rows);
  return router;
}

// What stands after the time of day.
std::vector<std::string> said_by(const std::function<void(Progress&)>& use,
                                 ProgressOptions options) {
  ::testing::internal::CaptureStderr();
  {
    Progress progress(options);
    use(progress);
  }
  std::vector<std::string> lines = lines_of(::testing::internal::GetCapturedStderr());
  for (std::string& line : lines) line = line.substr(std::min<size_t>(line.size(), 9));
  return lines;
}

TEST(Progress, SaysEachNumberOfAStep) {
  StepMetrics metrics = metrics_of(5, 0.5);
  metrics.lr = 0.00025;
  metrics.grad_norm = 1.25;
  metrics.layers = {router_of(0, {3, 1}), router_of(1, {1, 1})};
  metrics.step_time_s = 3;
  metrics.planned_step_time_s = 2;
  metrics.num_zeros = 0;
  metrics.params_norm = 7;
  const auto step = [&](Progress& progress) { progress.step(metrics, /*logged=*/true); };
  const ProgressOptions options{.last_step = 10, .last_token = 60500, .matmul_limit = 1e12};
  const std::string numbers =
      "step  5/10 | loss 2.0000 | perplexity 7.389 | lr 2.50e-04 | grad norm 1.250 | "
      "imbalance 1.50 | 1.0 k tokens/s | 50% of limit | ";
  const std::string more = "zeros 0 | params norm 7.000 | ";
  EXPECT_EQ(said_by(step, options),
            (std::vector{numbers + "1.50x planned time | " + more + "1 min 00 s left"}));
  metrics.rooms_lacked = 1;
  metrics.skipped = true;
  metrics.step = 10;
  EXPECT_EQ(said_by(step, options).front().substr(numbers.size()),
            more + "in rounds | update skipped: gradients too large | done");
  ProgressOptions quiet = options;
  quiet.quiet = true;
  EXPECT_TRUE(said_by(step, quiet).empty());
}

TEST(Progress, SaysLossesOfEvaluations) {
  const std::vector<EvaluationResult> results = {{.name = "", .loss = 2}, {.name = "b", .loss = 1}};
  const auto evaluate = [&](Progress& progress) {
    progress.evaluation(5, results);
    progress.test(10, results[1]);
  };
  ProgressOptions options{.last_step = 10, .last_token = 1000, .matmul_limit = 1e12};
  EXPECT_EQ(said_by(evaluate, options),
            (std::vector<std::string>{
                "step  5/10 | validation loss 2.0000 nats per token | perplexity 7.389",
                "step  5/10 | validation loss 1.0000 nats per token | perplexity 2.718 on b",
                "step 10/10 | test loss 1.0000 nats per token | perplexity 2.718 on b"}));
  options.quiet = true;
  EXPECT_TRUE(said_by(evaluate, options).empty());
}

// The first step counts least: it touches all memory. Then each counts a tenth at least.
TEST(Progress, TheTimeLeftIsSmoothed) {
  const auto steps = [](Progress& progress) {
    for (int64_t step = 1; step <= 30; ++step) {
      StepMetrics metrics = metrics_of(step, 1);
      metrics.tokens_per_s = step == 1 ? 10 : step <= 15 ? 100 : 50;
      progress.step(metrics, step == 1 || step == 2 || step == 15 || step >= 29);
    }
  };
  std::vector<std::string> lines =
      said_by(steps, {.last_step = 40, .last_token = 4000, .log_interval = 1, .matmul_limit = 1});
  for (std::string& line : lines) line = line.substr(line.rfind('|') + 2);
  EXPECT_EQ(lines, (std::vector<std::string>{"6 min 30 s left", "38 s left", "25 s left",
                                             "19 s left", "18 s left"}));
}

TEST(IntervalOfLines, AreRoundTimesTheLogInterval) {
  EXPECT_EQ(interval_of_lines(50, 1), 1);
  EXPECT_EQ(interval_of_lines(51, 1), 2);
  EXPECT_EQ(interval_of_lines(102, 1), 5);
  EXPECT_EQ(interval_of_lines(255, 1), 10);
  EXPECT_EQ(interval_of_lines(510, 1), 20);
  EXPECT_EQ(interval_of_lines(1529, 3), 30);
}

TEST(ExpertLoadChart, IsAsWideAsItMayBe) {
  StepMetrics metrics;
  metrics.layers = {router_of(2, {0, 4, 8, 8}), router_of(10, {5, 5, 5, 5})};
  EXPECT_EQ(expert_load_chart(metrics, 80),
            "Expert loads of the last step: 4 experts in 2 layers\n"
            "  layer  2   ▄██  largest/mean 1.60, 1 without tokens\n"
            "  layer 10  ████  largest/mean 1.00\n"
            "Worst: layer 2, its busiest expert has 1.60 times the mean load");
  metrics.layers = {router_of(0, std::vector<int64_t>(64, 1))};
  const auto blocks = [&](size_t columns) {
    const std::string text = expert_load_chart(metrics, columns);
    size_t count = 0;
    for (size_t at = text.find("█"); at != std::string::npos; at = text.find("█", at + 1)) ++count;
    return count;
  };
  const size_t taken = columns_of("  layer 0    largest/mean 1.00");
  EXPECT_EQ(blocks(200), 32U);
  EXPECT_EQ(blocks(taken + 31), 31U);
  EXPECT_EQ(blocks(taken + 9), 9U);
  EXPECT_EQ(blocks(taken + 8), 8U);
  EXPECT_EQ(blocks(taken + 7), 8U) << "at least";
  EXPECT_EQ(blocks(0), 8U);
}

TEST(WrapWords, KeepsWordsWhole) {
  EXPECT_EQ(wrap_words({"--a 1", "--b", "--c"}, 9, 0, 2), "--a 1 --b\n  --c");
  EXPECT_EQ(wrap_words({"--a 1", "--b"}, 8, 0, 2), "--a 1\n  --b");
  EXPECT_EQ(wrap_words({"größer", "als"}, 10, 0, 1), "größer als");
  EXPECT_EQ(wrap_words({"ab", "cd", "ef"}, 6, 3, 1), "   ab\n cd ef");
  EXPECT_EQ(wrap_words({"toolong", "x"}, 3, 1, 2), " toolong\n  x");
  EXPECT_EQ(wrap_words({}, 3, 2, 2), "  ");
}

TEST(WrapText, CountsTheMarginAndWhatStandsOnTheLine) {
  EXPECT_EQ(wrap_text("  aa bb cc dd", 8, 1), "  aa bb\n   cc dd");
  EXPECT_EQ(wrap_text("aa  bb cc dd", 8, 2), "aa  bb\n  cc dd");
  EXPECT_EQ(wrap_text("one two three four", 7, 0), "one two\nthree\nfour");
  EXPECT_EQ(wrap_text("toolongword next", 6, 2), "toolongword\n  next");
  EXPECT_EQ(wrap_text("      ", 3, 2), "      ");
  EXPECT_EQ(wrap_text("größer größer", 6, 0), "größer\ngrößer");
}

TEST(Counted, HasAnSForAllButOne) {
  EXPECT_EQ(counted(0, "step"), "0 steps");
  EXPECT_EQ(counted(1, "step"), "1 step");
  EXPECT_EQ(counted(2, "step"), "2 steps");
  EXPECT_EQ(counted(1, "entry", "entries"), "1 entry");
  EXPECT_EQ(counted(2, "entry", "entries"), "2 entries");
}

TEST(FormatTimeLeft, MinutesBeginWhereSecondsRoundToOne) {
  EXPECT_EQ(format_time_left(59.49), "59 s left");
  EXPECT_EQ(format_time_left(59.5), "1 min 00 s left");
  EXPECT_EQ(format_time_left(59.94), "1 min 00 s left");
  EXPECT_EQ(format_time_left(89.6), "1 min 30 s left");
}

}  // namespace
}  // namespace troupe
