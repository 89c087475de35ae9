// What changes in the course of a run: learning rate, weight decay and global batch size, as
// Megatron's optimizer_param_scheduler and num_microbatches_calculator compute them.
//
// All lengths and positions are in samples (sequences), so that a schedule does not depend on the
// batch size. Plain values and pure functions, callable from any thread.
//
// An update uses the rate of the position that it reaches, which is the rate that Megatron logs for
// it. (Megatron applies the rate of the position before the update; its very first update, under a
// warm-up from 0, changes nothing.)
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "options/choices.h"

namespace troupe {

// Of one run: 2^38 sequences, whose tokens can be counted in 64 bits however long they are.
inline constexpr int64_t kMostSamples = int64_t{1} << 38;

enum class LrDecayStyle : uint8_t { constant, linear, cosine, inverse_square_root, wsd };
inline constexpr Choice<LrDecayStyle> kLrDecayStyles[] = {
    {"constant", LrDecayStyle::constant},
    {"linear", LrDecayStyle::linear},
    {"cosine", LrDecayStyle::cosine},
    {"inverse-square-root", LrDecayStyle::inverse_square_root},
    {"WSD", LrDecayStyle::wsd}};

enum class WsdDecayStyle : uint8_t { linear, cosine, exponential, minus_sqrt };
inline constexpr Choice<WsdDecayStyle> kWsdDecayStyles[] = {
    {"linear", WsdDecayStyle::linear},
    {"cosine", WsdDecayStyle::cosine},
    {"exponential", WsdDecayStyle::exponential},
    {"minus_sqrt", WsdDecayStyle::minus_sqrt}};

struct LearningRateSchedule {
  LrDecayStyle style = LrDecayStyle::linear;
  double init_lr = 0;  // where the warm-up begins
  double max_lr = 0;
  double min_lr = 0;
  double warmup_samples = 0;  // not whole when it is a fraction of the decay
  int64_t decay_samples = 0;  // where the decay ends, warm-up included
  WsdDecayStyle wsd_style = WsdDecayStyle::exponential;
  int64_t wsd_decay_samples = 0;  // length of the fall that ends at decay_samples

  // Linear from init_lr to max_lr at warmup_samples, then the decay, then min_lr (constant:
  // max_lr).
  double at(int64_t samples) const;

  bool operator==(const LearningRateSchedule&) const = default;
};

enum class IncreaseStyle : uint8_t { constant, linear, cosine };
inline constexpr Choice<IncreaseStyle> kIncreaseStyles[] = {{"constant", IncreaseStyle::constant},
                                                            {"linear", IncreaseStyle::linear},
                                                            {"cosine", IncreaseStyle::cosine}};

struct WeightDecaySchedule {
  IncreaseStyle style = IncreaseStyle::constant;
  double start = 0;
  double end = 0;
  int64_t samples = 0;  // where `end` is reached

  double at(int64_t samples_done) const;

  bool operator==(const WeightDecaySchedule&) const = default;
};

struct BatchSizeSchedule {
  struct Stage {
    int64_t first_sample = 0;
    int32_t batch_size = 1;

    bool operator==(const Stage&) const = default;
  };
  std::vector<Stage> stages;  // by first_sample, which rises; that of the first is 0

  // Samples of the step that begins after `consumed` samples.
  int32_t at(int64_t consumed) const;
  int32_t largest() const;
  // Whole steps between two positions, of which the first is one where a step begins.
  int64_t steps_between(int64_t from, int64_t to) const;
};

struct Schedules {
  LearningRateSchedule learning_rate;
  WeightDecaySchedule weight_decay;
  // Of the embedding and the output layer, where it is another.
  std::optional<LearningRateSchedule> decoupled_learning_rate = {};
};

// The first setting in which the two differ and that matters, as "--min-lr 0.1 instead of 0.2"
// (`before` instead of `after`); empty when they are the same schedule.
std::string schedule_difference(const Schedules& before, const Schedules& after);

// As one JSON object, and back. What to_json cannot have written is `failed`, naming `path`.
std::string to_json(const Schedules& schedules);
Schedules parse_schedules(const std::string& text, const std::string& path);

}  // namespace troupe
