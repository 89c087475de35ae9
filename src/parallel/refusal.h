// What layouts and models answer to what they cannot do: which setting cannot be as it is, the rule
// with its numbers, and the nearest values that keep it.
//
// A refusal names settings, not flags: options/refusals.h words it for people, and a search over
// layouts reads it without exceptions. Plain values; any thread.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "base/error.h"

namespace troupe {

// What a user can choose and a layout or a model can refuse.
enum class Setting : uint8_t {
  ranks,
  rank_order,
  tensor_parallel,
  sequence_parallel,
  context_parallel,
  context_exchange,
  pipeline_parallel,
  pipeline_layout,  // stages spelt out
  pipeline_schedule,
  virtual_stages,     // of each rank of the pipeline
  micro_batch_group,  // of the interleaved schedule
  first_stage_layers,
  last_stage_layers,
  count_embedding,  // as a layer of the pipeline
  count_loss,
  merge_micro_batches,  // PipelineShape::merged
  expert_parallel,
  expert_tensor_parallel,
  optimizer_instances,
  dispatch_node_ranks,
  global_batch_size,
  sequence_length,
  no_linear_bias,
  exp_avg_dtype,
  exp_avg_sq_dtype,
};
inline constexpr int kSettingCount = static_cast<int>(Setting::exp_avg_sq_dtype) + 1;

struct Refusal {
  Setting setting;  // what cannot be as it is
  // One message, where a name of the setting stands for each Setting: what was given, the rule with
  // its numbers, what to do.
  std::vector<std::variant<std::string, Setting>> message;
  // Values of `setting` that keep the rule: the next smaller and the next larger one. Empty where
  // there are none or the rule is not about a number.
  std::vector<int64_t> nearest = {};
};

// A value, or why there is none.
template <class T>
class [[nodiscard]] OrRefusal {
 public:
  OrRefusal(T value) : result_(std::move(value)) {}
  OrRefusal(Refusal refusal) : result_(std::move(refusal)) {}

  // Null: there is a value.
  const Refusal* refusal() const { return std::get_if<Refusal>(&result_); }
  // Must not have been refused.
  T& value() {
    TROUPE_CHECK(refusal() == nullptr, "a value that was not refused");
    return std::get<T>(result_);
  }

 private:
  std::variant<T, Refusal> result_;
};

// The values nearest to `value` among 1..limit for which `valid` holds: the next smaller and the
// next larger one, as far as there are any.
template <class Predicate>
std::vector<int64_t> nearest_values(int64_t value, int64_t limit, const Predicate& valid) {
  std::vector<int64_t> nearest;
  for (int64_t below = value < limit ? value - 1 : limit; below >= 1; --below) {
    if (!valid(below)) continue;
    nearest.push_back(below);
    break;
  }
  for (int64_t above = value + 1; above <= limit; ++above) {
    if (!valid(above)) continue;
    nearest.push_back(above);
    break;
  }
  return nearest;
}

// The divisors of `number` nearest to `value`.
std::vector<int64_t> nearest_divisors(int64_t number, int64_t value);

// The multiples of `unit` nearest to `value`, which is none.
std::vector<int64_t> nearest_multiples(int64_t unit, int64_t value);

// "4", "4 or 8"; empty for no values.
std::string text_of_values(const std::vector<int64_t>& values);

}  // namespace troupe
