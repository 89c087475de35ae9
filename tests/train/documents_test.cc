// Attention within documents, from the samples of a data set to losses and gradients.
#include <algorithm>
#include <cmath>
#include <gtest/gtest.h>
#include <map>
#include <string>
#include <vector>

#include "passes/inference_programs.h"
#include "runtime/cpu/cpu_interpreter.h"
#include "train/train_test_support.h"

namespace troupe {
namespace {

using namespace testing;

constexpr int32_t kSequence = 24;
// Tokens of the documents of each of two samples.
const std::vector<std::vector<int32_t>> kDocuments = {{5, 1, 8, 10}, {24}};

// Two samples of several documents; or one document at a time, cut out of them.
StepRun run_of(const ModelConfig& model, int32_t samples, int32_t length, bool reset) {
  return {model, {.micro_batch_size = samples, .sequence = length, .change = [=](auto& options) {
                    options.reset_attention_mask = reset;
                  }}};
}

void write_starts(const TensorView& view) {
  auto* starts = view.as<int32_t>();
  for (const auto& sample : kDocuments) {
    int32_t start = 0;
    for (const int32_t length : sample) {
      starts = std::fill_n(starts, length, start);
      start += length;
    }
  }
}

// Copies the rows of the document that begins at row `first`.
void copy_document(const StepRun& from, int64_t first, StepRun& to) {
  const BatchValues& source = from.step.micro_batches[0];
  const BatchValues& target = to.step.micro_batches[0];
  for (int32_t i = 0; i < target.sequence; ++i) {
    for (const auto& [id, own] :
         {std::pair{source.tokens, target.tokens}, std::pair{source.labels, target.labels}}) {
      to.interpreter.view(own).as<int32_t>()[i] =
          from.interpreter.view(id).as<int32_t>()[first + i];
    }
    set_element(to.interpreter.view(target.mask), i,
                element(from.interpreter.view(source.mask), first + i));
  }
}

double counted_tokens(const StepRun& run) {
  double sum = 0;
  for (const double weight : elements(run.interpreter.view(run.step.micro_batches[0].mask))) {
    sum += weight;
  }
  return sum;
}

using Gradients = std::map<std::string, std::vector<double>>;

Gradients gradients_of(const StepRun& run) {
  Gradients all;
  for (const Parameter& parameter : run.state.parameters) {
    all[run.name(parameter)] = elements(run.storage.view(parameter.gradient));
  }
  return all;
}

std::vector<ModelConfig> models() {
  ModelConfig experts = trained_model();
  experts.moe_aux_loss_coeff = 0;  // of a micro-batch, not of its tokens
  experts.moe_z_loss_coeff = 0;
  ModelConfig window = dense_model(2);
  window.sliding_window = 4;
  return {experts, window};
}

// A sample is worth what its documents are, each a sequence of its own: their losses and gradients,
// weighted by the tokens that count.
TEST(Documents, OfASampleAreAsTheyAreAlone) {
  for (const ModelConfig& model : models()) {
    StepRun packed = run_of(model, 2, kSequence, true);
    write_starts(packed.interpreter.view(packed.step.micro_batches[0].starts));
    packed.update();
    const double all = counted_tokens(packed);
    double loss = 0;
    Gradients gradients;
    int64_t first = 0;
    for (const auto& sample : kDocuments) {
      for (const int32_t length : sample) {
        StepRun alone = run_of(model, 1, length, false);
        copy_document(packed, first, alone);
        alone.update();
        const double share = counted_tokens(alone) / all;
        loss += share * alone.loss();
        for (const auto& [name, own] : gradients_of(alone)) {
          std::vector<double>& sum = gradients[name];
          sum.resize(own.size());
          for (size_t i = 0; i < own.size(); ++i) sum[i] += share * own[i];
        }
        first += length;
      }
    }
    // f64, sums of some hundred terms in another order, and a rotation that begins elsewhere: some
    // hundred roundings of 1e-16 of the largest term.
    EXPECT_NEAR(packed.loss(), loss, 1e-13 * loss);
    for (const auto& [name, found] : gradients_of(packed)) {
      double largest = 0;
      for (const double value : gradients[name]) largest = std::max(largest, std::abs(value));
      for (size_t i = 0; i < found.size(); ++i) {
        ASSERT_NEAR(found[i], gradients[name][i], 1e-12 * largest) << name << " element " << i;
      }
    }
    StepRun across = run_of(model, 2, kSequence, false);
    across.update();
    EXPECT_GT(std::abs(across.loss() - packed.loss()), 1e-6) << "attention across documents";
  }
}

TEST(Documents, EvaluationKeepsToThemToo) {
  StepRun run = run_of(trained_model(), 2, kSequence, true);
  write_starts(run.interpreter.view(run.step.micro_batches[0].starts));
  run.set_learning_rate(0);
  run.update();
  const InferenceStep evaluation =
      build_evaluation_step(run.config, run.state, 2, kSequence, /*loss_chunk_tokens=*/0,
                            /*reset_attention_mask=*/true);
  CpuInterpreter interpreter(*evaluation.program, plan_memory(*evaluation.program, 1), run.storage,
                             run.pool);
  const BatchValues& from = run.step.micro_batches[0];
  const BatchValues& to = evaluation.batch;
  for (const auto& [source, target] :
       {std::pair{from.tokens, to.tokens}, std::pair{from.labels, to.labels},
        std::pair{from.mask, to.mask}, std::pair{from.starts, to.starts}}) {
    const std::string bytes = bytes_of(run.interpreter.view(source));
    std::memcpy(interpreter.view(target).data, bytes.data(), bytes.size());
  }
  interpreter.run();
  // The step multiplies by the number of tokens and divides again.
  EXPECT_DOUBLE_EQ(*interpreter.view(evaluation.loss).as<double>(), run.loss());
}

}  // namespace
}  // namespace troupe
