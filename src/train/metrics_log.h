// metrics.jsonl: what a run measured, one JSON object per line, in the order of the steps.
//
// Each start of the run adds a header line, {"header": true, ...}, which says what runs where;
// every line has the "time" at which it was written (UTC). Lines are appended whole and given to
// the operating system at once, so a killed run loses none that was written. A run that goes on
// from a checkpoint first drops the lines of steps that it will do again.
//
// Opening the file may fail (UserError). After that nothing does: lines that cannot be written, on
// a full disk, wait in memory for the next one. Owns the open file; one thread.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "train/evaluation.h"

namespace troupe {

// What the router of one layer did in a step.
struct RouterMetrics {
  int32_t layer = 0;
  std::vector<int64_t> rows;  // by expert: routed rows
  // By rank of those that share the experts: rows of its experts and its copies of others'. Empty
  // where each rank has all experts.
  std::vector<int64_t> rank_rows = {};
  int64_t slots = 0;   // choices made: tokens times top-k; more than the rows when some drop
  double entropy = 0;  // nats: mean entropy of softmax(logits)
  struct Loss {
    std::string_view name;  // lives as long as the program
    double value = 0;       // divided by its coefficient
  };
  std::vector<Loss> losses;

  // Largest load over mean load: 1 is perfect balance. Of experts, and of ranks.
  double imbalance() const;
  double rank_imbalance() const;
  // Experts that received nothing.
  int32_t dead() const;
  // Share of the choices that capacity limits dropped.
  double dropped() const;
};

// Which share of an operand's codes in 8 bits is the format's largest number, and which is 0.
struct CodeShare {
  double saturated = 0;
  double zero = 0;
};

// Of a linear map's operands, by operand (kOperandNames). Nothing of those that keep their
// precision, or had no elements.
inline constexpr std::array<std::string_view, 3> kOperandNames = {"input", "weight", "gradient"};
struct CodeShares {
  int32_t layer = 0;
  std::string map = {};  // the parameter's name within the layer
  std::array<std::optional<CodeShare>, kOperandNames.size()> operands = {};
};

struct StepMetrics {
  int64_t step = 0;
  double loss = 0;                      // nats per token
  std::vector<double> mtp_losses = {};  // of multi-token prediction, by depth - 1
  double lr = 0;
  double grad_norm = 0;
  bool skipped = false;
  // Where the experts' room or their stash did not suffice for the step, which ran again in rounds:
  // for how many MoE blocks of its micro-batches, or tensors to be stashed; and the factors that
  // would have sufficed for all, each where it was too small.
  int64_t rooms_lacked = 0;
  double room_needed = 0;
  double stash_needed = 0;
  std::optional<double> loss_scale = {};   // of --fp16: of this step
  std::optional<int64_t> num_zeros = {};   // elements of the gradients that are 0
  std::optional<double> params_norm = {};  // after the step
  int64_t tokens = 0;                      // so far
  int64_t batch_size = 0;                  // samples of this step
  double weight_decay = 0;
  double tokens_per_s = 0;
  double tflops_per_gpu = 0;
  double step_time_s = 0;
  double planned_step_time_s = 0;  // 0: not known (planned_time.h)
  double data_time_s = 0;          // of the step's time, that of reading samples
  uint64_t peak_bytes = 0;
  std::vector<RouterMetrics> layers;  // MoE layers
  struct IndexerLoss {
    int32_t layer = 0;
    double value = 0;  // divided by its coefficient
  };
  std::vector<IndexerLoss> indexers;  // of layers with sparse attention, where they learn
  std::vector<CodeShares> codes;      // of maps with products in 8 bits, where they are counted

  double load_imbalance() const;                      // of the worst layer; 1 without experts
  std::optional<double> rank_load_imbalance() const;  // the same of ranks, where they share experts
  std::vector<RouterMetrics::Loss> losses() const;    // each the mean over layers
  // Of `codes`: "fp8_input_saturated", "fp8_input_zero" and so on, the largest of all maps. Empty
  // where nothing was counted.
  std::vector<std::pair<std::string, double>> code_shares() const;
};

// What a header line says.
struct RunHeader {
  int64_t step = 0;  // steps done before this start
  std::string host = {};
  std::string device = {};
  int32_t ranks = 1;
  std::string model = {};  // as --model names it, or its kind
  int64_t parameters = 0;
  int64_t active_parameters = 0;       // of one token
  std::vector<std::string> data = {};  // the prefixes
  std::string options_file = {};
  double matmul_limit_tflops = 0;  // that a rank reaches at best in matrix products
};

// Now, in UTC, as in 2026-11-22T21:40:12.345Z.
std::string utc_time();

class MetricsLog {
 public:
  // Opens PATH for appending, after dropping every line whose step is above `last_step`. `warn`
  // takes a line when the first line of several cannot be written, and when they have been.
  using Warn = std::function<void(const std::string&)>;
  MetricsLog(const std::string& path, int64_t last_step, Warn warn = nullptr);
  ~MetricsLog();
  MetricsLog(const MetricsLog&) = delete;
  MetricsLog& operator=(const MetricsLog&) = delete;

  void header(const RunHeader& header);
  void training(const StepMetrics& metrics);
  // `results` is not empty. The first one is val_loss; those with a name are val_loss/NAME, too.
  void evaluation(int64_t step, std::span<const EvaluationResult> results);
  // test_loss and test_tokens.
  void test(int64_t step, const EvaluationResult& result);

 private:
  void append(const std::string& line);
  // Writes from the front of pending_; the reason why not all of it, or empty.
  std::string write_pending();
  std::string path_;
  Warn warn_;
  int descriptor_ = -1;
  std::string pending_;  // not written yet
  bool has_failed_ = false;
  int64_t lost_lines_ = 0;
};

}  // namespace troupe
