#include "train/generation.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/error.h"
#include "base/random.h"
#include "program/verify.h"

namespace troupe {
namespace {

std::vector<double> read_row(const TensorView& logits, int64_t row, int32_t count) {
  std::vector<double> values(static_cast<size_t>(count));
  const int64_t begin = row * logits.shape.back();
  for (size_t i = 0; i < values.size(); ++i) {
    const int64_t at = begin + static_cast<int64_t>(i);
    switch (logits.dtype) {
      case DType::f64:
        values[i] = logits.as<double>()[at];
        break;
      case DType::f32:
        values[i] = logits.as<float>()[at];
        break;
      default:
        values[i] = logits.as<bf16>()[at];
        break;
    }
  }
  return values;
}

}  // namespace

int32_t sample_token(const std::vector<double>& logits, const GenerationOptions& options,
                     double draw) {
  std::vector<int32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return logits[static_cast<size_t>(a)] > logits[static_cast<size_t>(b)];
  });
  if (options.temperature <= 0) return order.front();
  if (options.top_k > 0 && static_cast<size_t>(options.top_k) < order.size()) {
    order.resize(static_cast<size_t>(options.top_k));
  }
  const double largest = logits[static_cast<size_t>(order.front())];
  std::vector<double> weights;
  weights.reserve(order.size());
  double sum = 0;
  for (const int32_t id : order) {
    weights.push_back(std::exp((logits[static_cast<size_t>(id)] - largest) / options.temperature));
    sum += weights.back();
  }
  if (options.top_p > 0 && options.top_p < 1) {
    double kept = 0;
    size_t count = 0;
    while (count < weights.size() && kept < options.top_p * sum) kept += weights[count++];
    order.resize(count);
    sum = kept;
  }
  double remaining = draw * sum;
  for (size_t i = 0; i < order.size(); ++i) {
    remaining -= weights[i];
    if (remaining < 0) return order[i];
  }
  return order.back();
}

std::vector<int32_t> generate(const ModelConfig& config, const ModelState& state,
                              const StateStorage& storage, ThreadPool& pool,
                              const std::vector<int32_t>& prompt, const GenerationOptions& options,
                              const std::function<bool(int32_t)>& emit) {
  TROUPE_CHECK(!prompt.empty(), "generation starts from a prompt");
  const InferenceStep step = build_logits_step(config, state, /*batch=*/1, options.context,
                                               /*with_loss=*/false);
  verify_program(*step.program);
  const auto interpreter = make_interpreter(
      *step.program, plan_memory(*step.program, pool.threads(), storage.device()), storage, pool);
  auto* tokens = interpreter->view(step.batch.tokens).as<int32_t>();
  const TensorView logits = interpreter->view(step.logits);

  std::vector<int32_t> text = prompt;
  std::vector<int32_t> generated;
  const auto context = static_cast<size_t>(options.context);
  for (int64_t i = 0; i < options.new_tokens; ++i) {
    const size_t visible = std::min(text.size(), context);
    std::copy(text.end() - static_cast<std::ptrdiff_t>(visible), text.end(), tokens);
    std::fill(tokens + visible, tokens + context, 0);  // attention is causal: never looked at
    interpreter->run();
    const std::vector<double> row =
        read_row(logits, static_cast<int64_t>(visible) - 1, options.vocabulary);
    const int32_t token = sample_token(
        row, options,
        random_uniform(options.seed, RandomStream::sampling, 0, static_cast<uint64_t>(i)));
    if (token == options.eod) break;
    text.push_back(token);
    generated.push_back(token);
    if (!emit(token)) break;
  }
  return generated;
}

}  // namespace troupe
