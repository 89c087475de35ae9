// Training steps with multi-token prediction: their losses against a computation that is written a
// second time, token by token, and what they change of a step.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <gtest/gtest.h>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "train/train_test_support.h"

namespace troupe::testing {
namespace {

using Row = std::vector<double>;
using Rows = std::vector<Row>;

// A dense decoder, written plainly.
class PlainModel {
 public:
  explicit PlainModel(const StepRun& run) : config_(run.config) {
    for (const Parameter& parameter : run.state.parameters) {
      weights_[parameter.full_name()] = elements(run.storage.view(parameter.value));
    }
  }

  // Sum of the losses of all depths' tokens that count, over their number, by depth.
  std::vector<double> losses(const std::vector<int32_t>& tokens, const std::vector<int32_t>& labels,
                             const std::vector<double>& mask) const {
    Rows stream = embed(tokens, 0);
    for (int32_t layer = 0; layer < config_.num_layers; ++layer) decode(layer, stream);
    Rows state = norm(stream, "final_norm");
    std::vector<double> result = {loss(state, labels, mask, 0)};
    for (int32_t depth = 1; depth <= config_.mtp_num_layers; ++depth) {
      const int32_t layer = config_.owner_of(config_.num_layers + depth - 1);
      const std::string at = "layers." + std::to_string(layer) + ".";
      const Rows further = norm(embed(tokens, depth), at + "mtp_embedding_norm");
      const Rows before = norm(state, at + "mtp_hidden_norm");
      Rows both;
      for (size_t t = 0; t < state.size(); ++t) {
        both.push_back(further[t]);
        both.back().insert(both.back().end(), before[t].begin(), before[t].end());
      }
      Rows own = product(both, at + "w_mtp");
      decode(layer, own);
      state = norm(own, at + "mtp_final_norm");
      result.push_back(loss(state, labels, mask, depth));
    }
    return result;
  }

 private:
  Rows embed(const std::vector<int32_t>& tokens, int32_t shift) const {
    const auto hidden = static_cast<size_t>(config_.hidden_size);
    const std::vector<double>& table = weights_.at("embedding");
    Rows rows;
    for (size_t t = 0; t < tokens.size(); ++t) {
      const size_t from = t + static_cast<size_t>(shift);
      const size_t id = from < tokens.size() ? static_cast<size_t>(tokens[from]) : 0;
      rows.emplace_back(table.begin() + static_cast<std::ptrdiff_t>(id * hidden),
                        table.begin() + static_cast<std::ptrdiff_t>((id + 1) * hidden));
    }
    return rows;
  }

  Rows norm(const Rows& x, const std::string& name) const {
    const std::vector<double>& gain = weights_.at(name);
    Rows y = x;
    for (Row& row : y) {
      double squares = 0;
      for (const double value : row) squares += value * value;
      const double scale =
          1 / std::sqrt(squares / static_cast<double>(row.size()) + config_.norm_epsilon);
      for (size_t i = 0; i < row.size(); ++i) row[i] *= scale * gain[i];
    }
    return y;
  }

  Rows product(const Rows& x, const std::string& name) const {
    const std::vector<double>& weight = weights_.at(name);
    const size_t columns = x.front().size();
    const size_t outputs = weight.size() / columns;
    Rows y(x.size(), Row(outputs));
    for (size_t t = 0; t < x.size(); ++t) {
      for (size_t o = 0; o < outputs; ++o) {
        for (size_t i = 0; i < columns; ++i) y[t][o] += weight[o * columns + i] * x[t][i];
      }
    }
    return y;
  }

  // Turns one head of the row of position t.
  void turn(double* head, size_t t) const {
    const auto half = static_cast<size_t>(config_.kv_channels / 2);
    for (size_t i = 0; i < half; ++i) {
      const double angle =
          static_cast<double>(t) *
          std::pow(config_.rotary_base, -static_cast<double>(i) / static_cast<double>(half));
      const double a = head[i];
      const double b = head[i + half];
      head[i] = a * std::cos(angle) - b * std::sin(angle);
      head[i + half] = b * std::cos(angle) + a * std::sin(angle);
    }
  }

  Rows attend(const Rows& x, const std::string& at) const {
    const auto size = static_cast<size_t>(config_.kv_channels);
    const auto heads = static_cast<size_t>(config_.num_attention_heads);
    const auto groups = static_cast<size_t>(config_.num_query_groups);
    Rows qkv = product(x, at + "w_qkv");
    for (size_t t = 0; t < qkv.size(); ++t) {
      for (size_t head = 0; head < heads + groups; ++head) turn(qkv[t].data() + head * size, t);
    }
    Rows context(x.size(), Row(heads * size));
    for (size_t t = 0; t < x.size(); ++t) {
      for (size_t head = 0; head < heads; ++head) {
        const size_t key = (heads + head / (heads / groups)) * size;
        const size_t value = key + groups * size;
        Row weight(t + 1);
        double sum = 0;
        for (size_t s = 0; s <= t; ++s) {
          double score = 0;
          for (size_t i = 0; i < size; ++i) score += qkv[t][head * size + i] * qkv[s][key + i];
          sum += weight[s] = std::exp(score / std::sqrt(static_cast<double>(size)));
        }
        for (size_t s = 0; s <= t; ++s) {
          for (size_t i = 0; i < size; ++i) {
            context[t][head * size + i] += weight[s] / sum * qkv[s][value + i];
          }
        }
      }
    }
    return product(context, at + "w_attention_out");
  }

  void decode(int32_t layer, Rows& stream) const {
    const std::string at = "layers." + std::to_string(layer) + ".";
    add(attend(norm(stream, at + "input_norm"), at), stream);
    const Rows gate_up = product(norm(stream, at + "post_attention_norm"), at + "w_gate_up");
    Rows inner;
    for (const Row& row : gate_up) {
      Row& own = inner.emplace_back();
      for (size_t i = 0; i < row.size() / 2; ++i) {
        own.push_back(row[i] / (1 + std::exp(-row[i])) * row[i + row.size() / 2]);
      }
    }
    add(product(inner, at + "w_down"), stream);
  }

  static void add(const Rows& branch, Rows& stream) {
    for (size_t t = 0; t < stream.size(); ++t) {
      for (size_t i = 0; i < stream[t].size(); ++i) stream[t][i] += branch[t][i];
    }
  }

  double loss(const Rows& state, const std::vector<int32_t>& labels,
              const std::vector<double>& mask, int32_t shift) const {
    const Rows logits = product(state, "head");
    double sum = 0;
    double count = 0;
    for (size_t t = 0; t + static_cast<size_t>(shift) < logits.size(); ++t) {
      const size_t from = t + static_cast<size_t>(shift);
      double exponentials = 0;
      for (const double logit : logits[t]) exponentials += std::exp(logit);
      sum += mask[from] * (std::log(exponentials) - logits[t][static_cast<size_t>(labels[from])]);
      count += mask[from];
    }
    return sum / count;
  }

  const ModelConfig& config_;
  std::map<std::string, std::vector<double>> weights_;
};

ModelConfig plain_model(int32_t depths, bool repeated = false) {
  ModelConfig config = dense_model(2);
  config.tie_embeddings = false;
  config.qk_layernorm = false;
  config.mtp_num_layers = depths;
  config.mtp_use_repeated_layer = repeated;
  return config;
}

class MtpStepLosses : public ::testing::TestWithParam<bool> {};

TEST_P(MtpStepLosses, AreThoseOfAPlainComputation) {
  StepRun run(plain_model(2, GetParam()), {});
  const BatchValues& batch = run.step.micro_batches.front();
  const auto integers = [&](ValueId id) {
    const TensorView view = run.interpreter.view(id);
    return std::vector<int32_t>(view.as<int32_t>(), view.as<int32_t>() + view.shape.elements());
  };
  const std::vector<double> expected = PlainModel(run).losses(
      integers(batch.tokens), integers(batch.labels), elements(run.interpreter.view(batch.mask)));
  run.update();
  // f64, in sums of some hundred terms.
  EXPECT_NEAR(run.loss(), expected[0], 1e-12);
  ASSERT_EQ(run.step.mtp_losses.size(), 2U);
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_NEAR(*run.interpreter.view(run.step.mtp_losses[i]).as<double>(), expected[i + 1], 1e-12)
        << "depth " << i + 1;
  }
}

INSTANTIATE_TEST_SUITE_P(Repeated, MtpStepLosses, ::testing::Bool());

// Gives the layers of all depths the weights of the first one.
void repeat_weights(StepRun& run) {
  std::map<std::string, const Parameter*> first;
  for (const Parameter& parameter : run.state.parameters) {
    if (parameter.layer < run.config.num_layers) continue;
    const auto [found, is_first] = first.emplace(parameter.name, &parameter);
    if (is_first) continue;
    const TensorView from = run.storage.view(found->second->value);
    std::memcpy(run.storage.view(parameter.value).data, from.data,
                static_cast<size_t>(from.shape.elements()) * size_of(from.dtype));
  }
}

// The gradients of the layers of multi-token prediction, by name, summed over the layers.
std::map<std::string, Row> sums_over_depths(const StepRun& run) {
  std::map<std::string, Row> sums;
  for (const Parameter& parameter : run.state.parameters) {
    if (parameter.layer < run.config.num_layers) continue;
    const Row own = elements(run.storage.view(parameter.gradient));
    Row& sum = sums[parameter.name];
    sum.resize(own.size());
    for (size_t i = 0; i < own.size(); ++i) sum[i] += own[i];
  }
  return sums;
}

// Steps of two models of the same weights: layers for all depths, and one that serves all.
struct Twins {
  explicit Twins(ModelConfig config) : apart(config, kOptions) {
    repeat_weights(apart);
    apart.update();
    config.mtp_use_repeated_layer = true;
    // Shared by the depths: so each weighs as it does alone.
    config.moe_aux_loss_coeff *= config.mtp_num_layers;
    shared.emplace(config, kOptions);
    shared->update();
  }
  static inline const StepRunOptions kOptions{.micro_batch_size = 2, .micro_batches = 2};
  StepRun apart;
  std::optional<StepRun> shared;
};

ModelConfig latent_model() {
  ModelConfig config = moe_model(2);
  set_latent_attention(config);
  config.init_method_std = 0.15;  // gradients reach through two products
  return config;
}

// Losses and the layer's gradient; f64, in sums of some hundred terms.
TEST(MtpStep, ARepeatedLayerHasTheGradientsOfAllDepths) {
  const std::map<std::string, ModelConfig> models = {
      {"dense", plain_model(3)}, {"experts", moe_model(2)}, {"latent", latent_model()}};
  for (const auto& [name, model] : models) {
    SCOPED_TRACE(name);
    ModelConfig config = model;
    config.mtp_num_layers = 3;
    config.mtp_loss_scaling_factor = 0.7;
    const Twins twins(config);
    const StepRun& shared = *twins.shared;
    EXPECT_LT(shared.state.parameters.size(), twins.apart.state.parameters.size());
    EXPECT_EQ(shared.loss(), twins.apart.loss());
    for (size_t i = 0; i < 3; ++i) {
      EXPECT_EQ(*shared.interpreter.view(shared.step.mtp_losses[i]).as<double>(),
                *twins.apart.interpreter.view(twins.apart.step.mtp_losses[i]).as<double>());
    }
    const std::map<std::string, Row> expected = sums_over_depths(twins.apart);
    const std::map<std::string, Row> found = sums_over_depths(shared);
    ASSERT_EQ(found.size(), expected.size());
    for (const auto& [parameter, gradient] : expected) {
      double largest = 0;
      for (const double value : gradient) largest = std::max(largest, std::abs(value));
      ASSERT_GT(largest, 1e-6) << parameter;
      for (size_t i = 0; i < gradient.size(); ++i) {
        ASSERT_NEAR(found.at(parameter)[i], gradient[i], 1e-12 * std::max(1.0, largest))
            << parameter << " element " << i;
      }
    }
  }
}

// One line for the router that all depths have: rows of all of them, and means of the rest.
TEST(MtpStep, ARepeatedLayerIsMeasuredAsOne) {
  ModelConfig config = moe_model(2);
  config.mtp_num_layers = 3;
  const Twins twins(config);
  const auto read = [](const StepRun& run, ValueId id) {
    return elements(run.interpreter.view(id));
  };
  const std::vector<LayerMetrics>& apart = twins.apart.step.layers;
  const std::vector<LayerMetrics>& shared = twins.shared->step.layers;
  ASSERT_EQ(apart.size(), 5U);
  ASSERT_EQ(shared.size(), 3U);
  Row counts(4);
  double entropy = 0;
  Row losses(2);
  for (size_t i = 2; i < 5; ++i) {
    const Row own = read(twins.apart, apart[i].counts);
    for (size_t e = 0; e < 4; ++e) counts[e] += own[e];
    entropy += read(twins.apart, apart[i].entropy)[0] / 3;
    for (size_t k = 0; k < 2; ++k) losses[k] += read(twins.apart, apart[i].losses[k].value)[0] / 3;
  }
  EXPECT_EQ(shared.back().layer, 2);
  EXPECT_EQ(read(*twins.shared, shared.back().counts), counts);
  // f64, in sums of some hundred terms.
  EXPECT_NEAR(read(*twins.shared, shared.back().entropy)[0], entropy, 1e-13);
  ASSERT_EQ(shared.back().losses.size(), 2U);
  for (size_t k = 0; k < 2; ++k) {
    EXPECT_NEAR(read(*twins.shared, shared.back().losses[k].value)[0], losses[k], 1e-12);
  }
}

// The layers stand beside the model: its own weights start as without them, and so does its loss.
TEST(MtpStep, LeavesTheLossOfTheNextTokenAlone) {
  StepRun with(plain_model(1), {});
  StepRun without(plain_model(0), {});
  with.update();
  without.update();
  EXPECT_EQ(with.loss(), without.loss());
  EXPECT_NE(with.grad_norm(), without.grad_norm());
}

// With a weight of 0 only the layers' own gradients are those of another step: they are 0.
TEST(MtpStep, WithoutWeightTrainsTheModelAlone) {
  ModelConfig config = plain_model(1);
  config.mtp_loss_scaling_factor = 0;
  StepRun with(config, {});
  StepRun without(plain_model(0), {});
  with.update();
  without.update();
  for (const Parameter& parameter : with.state.parameters) {
    const std::vector<double> found = elements(with.storage.view(parameter.gradient));
    if (parameter.layer >= config.num_layers) {
      EXPECT_EQ(found, std::vector<double>(found.size())) << with.name(parameter);
      continue;
    }
    const std::vector<double> expected =
        elements(without.storage.view(without.state.get(parameter.id).gradient));
    double largest = 0;
    for (const double value : expected) largest = std::max(largest, std::abs(value));
    for (size_t i = 0; i < found.size(); ++i) {
      ASSERT_NEAR(found[i], expected[i], 1e-13 * largest) << with.name(parameter);
    }
  }
}

// Recompute and reuse of memory leave every bit as it is.
TEST_P(MtpStepLosses, DoNotDependOnMemory) {
  ModelConfig config = moe_model(2);
  config.mtp_num_layers = 2;
  config.mtp_use_repeated_layer = GetParam();
  config.hidden_dropout = 0.1;
  const auto options = [](const RecomputeOptions& recompute, bool oracle) {
    return StepRunOptions{.oracle = oracle, .micro_batches = 2, .recompute = recompute};
  };
  StepRun plain(config, options({}, false));
  plain.update();
  using Granularity = RecomputeOptions::Granularity;
  for (const Granularity granularity : {Granularity::none, Granularity::full}) {
    for (const auto method : {RecomputeOptions::Method::uniform, RecomputeOptions::Method::block}) {
      for (const bool oracle : {false, true}) {
        StepRun other(config,
                      options({.granularity = granularity, .method = method, .layers = 2}, oracle));
        other.update();
        EXPECT_EQ(other.objective(), plain.objective());
        expect_same_state(plain.storage, other.storage);
      }
    }
  }
}

}  // namespace
}  // namespace troupe::testing
