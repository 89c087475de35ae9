#include "train/generation.h"

#include <algorithm>
#include <cmath>
#include <fmt/format.h>
#include <map>
#include <numeric>
#include <utility>

#include "base/error.h"
#include "base/random.h"
#include "comm/bytes.h"

namespace troupe {
namespace {

std::vector<double> read_row(const TensorView& logits, int64_t row) {
  std::vector<double> values(static_cast<size_t>(logits.shape.back()));
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
      case DType::f16:
        values[i] = logits.as<f16>()[at];
        break;
      default:
        values[i] = logits.as<bf16>()[at];
        break;
    }
  }
  return values;
}

// The row of the whole vocabulary, of which the ranks of one replica have parts; on rank 0.
std::vector<double> gather_row(std::vector<double> own, const RankSession& session) {
  if (session.group() == nullptr) return own;
  std::string bytes;
  if (session.part().dense().dp == 0) append_bytes(bytes, own);
  const std::vector<std::string> all = session.group()->gather(session.rank(), std::move(bytes));
  // The vocabulary is cut in the order of tp.
  std::map<int32_t, std::vector<double>> pieces;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].empty()) continue;
    std::vector<double> piece = ByteReader(all[rank]).take_values<double>();
    if (piece.empty()) continue;  // of a stage without logits
    pieces[session.layout().dense_place(static_cast<int32_t>(rank)).tp] = std::move(piece);
  }
  std::vector<double> row;
  for (const auto& [tp, piece] : pieces) row.insert(row.end(), piece.begin(), piece.end());
  return row;
}

// On all ranks what rank 0 says.
int32_t of_rank_0(int32_t value, const RankSession& session) {
  return static_cast<int32_t>(session.exchange(static_cast<uint64_t>(value)).front());
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

int32_t context_of_text(int64_t text, int32_t sequence, int32_t tp) {
  const int32_t most = std::max(tp, sequence / tp * tp);
  return static_cast<int32_t>(std::min<int64_t>(most, (text + tp - 1) / tp * tp));
}

GenerationPlan plan_generation(const ModelConfig& config, const RankSession& session,
                               int32_t context) {
  GenerationPlan plan;
  plan.step = build_logits_step(config, session.state(), /*batch=*/1, context, /*with_loss=*/false);
  plan.memory = session.plan(*plan.step.program);
  return plan;
}

std::vector<int32_t> generate(GenerationPlan plan, RankSession& session,
                              const std::vector<int32_t>& prompt, const GenerationOptions& options,
                              const std::function<bool(int32_t)>& emit) {
  TROUPE_CHECK(!prompt.empty(), "generation starts from a prompt");
  const InferenceStep& step = plan.step;
  const auto interpreter = session.interpreter(*step.program, std::move(plan.memory));

  std::vector<int32_t> text = prompt;
  std::vector<int32_t> generated;
  const auto context = static_cast<size_t>(options.context);
  for (int64_t i = 0; i < options.new_tokens; ++i) {
    const size_t visible = std::min(text.size(), context);
    if (step.batch.tokens.valid()) {
      auto* const tokens = interpreter->view(step.batch.tokens).as<int32_t>();
      std::copy(text.end() - static_cast<std::ptrdiff_t>(visible), text.end(), tokens);
      std::fill(tokens + visible, tokens + context, 0);  // attention is causal: never looked at
    }
    interpreter->run();
    std::vector<double> own;
    if (step.logits.valid()) {
      own = read_row(interpreter->view(step.logits), static_cast<int64_t>(visible) - 1);
    }
    std::vector<double> row = gather_row(std::move(own), session);
    int32_t token = 0;
    if (session.leads()) {
      TROUPE_CHECK(static_cast<int64_t>(row.size()) >= options.vocabulary,
                   "some logits are on no rank");
      row.resize(static_cast<size_t>(options.vocabulary));
      if (!std::all_of(row.begin(), row.end(), [](double logit) { return std::isfinite(logit); })) {
        throw_failed(
            fmt::format("The logits of new token {} are not finite: the model has diverged. "
                        "Take an earlier checkpoint (--ckpt-step).",
                        i + 1));
      }
      token = sample_token(
          row, options,
          random_uniform(options.seed, RandomStream::sampling, 0, static_cast<uint64_t>(i)));
    }
    token = of_rank_0(token, session);
    if (token == options.eod) break;
    text.push_back(token);
    generated.push_back(token);
    const int32_t goes_on = session.leads() && emit(token) ? 1 : 0;
    if (of_rank_0(goes_on, session) == 0) break;
  }
  return generated;
}

void check_generation_layout(const ModelConfig& config, const Layout& layout) {
  if (layout.cp() > 1) {
    throw_bad_request(
        fmt::format("--context-parallel-size {}: troupe generate does not cut a text that grows. "
                    "Leave the flag out; --tensor-model-parallel-size, "
                    "--expert-model-parallel-size and --pipeline-model-parallel-size spread the "
                    "model over ranks.",
                    layout.cp()));
  }
  const bool moe = config.num_experts > 0;
  const int32_t replicas = moe ? layout.edp() : layout.dp();
  if (replicas > 1) {
    throw_bad_request(fmt::format(
        "--ranks {}: {} ranks would hold the same part of the model, and a text has no use for "
        "them. Use --ranks {}, or spread the model with --tensor-model-parallel-size{} or "
        "--pipeline-model-parallel-size.",
        layout.world_size(), replicas, layout.world_size() / replicas,
        moe ? ", --expert-model-parallel-size" : ""));
  }
}

}  // namespace troupe
