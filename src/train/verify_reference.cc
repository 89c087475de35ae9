#include "train/verify_reference.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fmt/format.h>
#include <limits>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>
#include <vector>

#include "base/error.h"
#include "comm/bytes.h"
#include "comm/thread_group.h"
#include "io/convert_dtype.h"
#include "io/hf_config.h"
#include "io/hf_weights.h"
#include "io/json.h"
#include "io/safetensors.h"
#include "model/parameter_layout.h"
#include "optimizer/adamw_optimizer.h"
#include "options/refusals.h"
#include "passes/inference_programs.h"
#include "passes/step_programs.h"
#include "train/rank_session.h"

namespace troupe {
namespace {

constexpr uint64_t kMaxReferenceBytes = 1 << 20;
constexpr int kMaxReferenceDepth = 16;

struct Reference {
  int32_t batch = 0;
  int32_t sequence = 0;
  std::vector<int64_t> tokens;
  std::vector<int64_t> labels;  // negative: not counted
  std::vector<double> logits;
  double loss = 0;
  double grad_norm = 0;
  double learning_rate = 0;
  double beta1 = 0;
  double beta2 = 0;
  double epsilon = 0;
  double weight_decay = 0;
  double clip = 0;
  std::vector<double> trajectory;
};

template <class T>
std::vector<T> read_tensor(const SafetensorsFile& file, const char* name,
                           const std::vector<int64_t>& shape) {
  const TensorEntry* entry = file.find(name);
  if (entry == nullptr)
    throw_failed(fmt::format("{}: the tensor {} is missing.", file.path(), name));
  if (entry->shape != shape) {
    throw_failed(fmt::format("{}: the tensor {} has the shape [{}], expected [{}].", file.path(),
                             name, fmt::join(entry->shape, ", "), fmt::join(shape, ", ")));
  }
  if (!can_convert(entry->dtype, dtype_of<T>)) {
    throw_failed(fmt::format("{}: the tensor {} has an unexpected dtype.", file.path(), name));
  }
  std::vector<T> data(static_cast<size_t>(elements_of(*entry)));
  convert_elements(entry->dtype, file.bytes(*entry).data(), dtype_of<T>, data.data(),
                   elements_of(*entry));
  return data;
}

void read_reference_json(const std::string& path, Reference& reference) {
  const nlohmann::json document =
      parse_json(read_file(path, kMaxReferenceBytes), path, kMaxReferenceDepth);
  try {
    reference.loss = document.at("loss").get<double>();
    reference.grad_norm = document.at("grad_norm").get<double>();
    const nlohmann::json& adamw = document.at("adamw");
    reference.learning_rate = adamw.at("lr").get<double>();
    reference.beta1 = adamw.at("betas").at(0).get<double>();
    reference.beta2 = adamw.at("betas").at(1).get<double>();
    reference.epsilon = adamw.at("eps").get<double>();
    reference.weight_decay = adamw.at("weight_decay").get<double>();
    reference.clip = adamw.at("clip").get<double>();
    reference.trajectory = adamw.at("losses").get<std::vector<double>>();
  } catch (const nlohmann::json::exception& error) {
    throw_failed(fmt::format("{}: {}.", path, reason_of(error)));
  }
}

SafetensorsFile open_reference(const std::string& folder) {
  return SafetensorsFile::open(join_path(folder, "reference.safetensors"));
}

ReferenceShape shape_of_batch(const SafetensorsFile& file) {
  const TensorEntry* tokens = file.find("input_ids");
  constexpr int64_t kLargest = 1 << 20;
  if (tokens == nullptr || tokens->shape.size() != 2 || tokens->shape[0] < 1 ||
      tokens->shape[1] < 1 || tokens->shape[0] > kLargest || tokens->shape[1] > kLargest) {
    throw_failed(file.path() + ": input_ids of shape [batch, sequence] is missing.");
  }
  return {static_cast<int32_t>(tokens->shape[0]), static_cast<int32_t>(tokens->shape[1])};
}

Reference read_reference(const std::string& folder, const ModelConfig& config) {
  Reference reference;
  const SafetensorsFile file = open_reference(folder);
  const ReferenceShape shape = shape_of_batch(file);
  reference.batch = shape.sequences;
  reference.sequence = shape.tokens;
  const int64_t batch = reference.batch;
  const int64_t sequence = reference.sequence;
  reference.tokens = read_tensor<int64_t>(file, "input_ids", {batch, sequence});
  reference.labels = read_tensor<int64_t>(file, "labels", {batch, sequence});
  reference.logits = read_tensor<double>(file, "logits", {batch, sequence, config.vocab_size});
  for (size_t i = 0; i < reference.tokens.size(); ++i) {
    if (reference.tokens[i] < 0 || reference.tokens[i] >= config.vocab_size ||
        reference.labels[i] >= config.vocab_size) {
      throw_failed(file.path() + ": a token id lies outside the vocabulary.");
    }
  }
  read_reference_json(join_path(folder, "reference.json"), reference);
  return reference;
}

// The token of the whole batch to which row `row` of a rank's batch belongs, when that begins with
// sequence `first`. Ranks of cp have two chunks of each sequence, one from each end.
size_t token_of_row(const BatchValues& batch, int32_t first, int64_t row) {
  const int64_t rows = batch.sequence;
  const int64_t sequence = first + row / rows;
  return static_cast<size_t>(sequence * rows * batch.chunks.ranks +
                             batch.chunks.position(row % rows, rows));
}

// The rank's tokens, labels and mask, as far as the program has them.
void write_batch(const Interpreter& interpreter, const BatchValues& batch,
                 const Reference& reference, int32_t first) {
  const int64_t rows = int64_t{batch.batch} * batch.sequence;
  for (int64_t i = 0; i < rows; ++i) {
    const size_t token = token_of_row(batch, first, i);
    if (batch.tokens.valid()) {
      interpreter.view(batch.tokens).as<int32_t>()[i] =
          static_cast<int32_t>(reference.tokens[token]);
    }
    if (!batch.labels.valid()) continue;
    const int64_t label = reference.labels[token];
    const bool counted = label >= 0;
    interpreter.view(batch.labels).as<int32_t>()[i] = counted ? static_cast<int32_t>(label) : 0;
    const TensorView mask = interpreter.view(batch.mask);
    if (mask.dtype == DType::f64) {
      mask.as<double>()[i] = counted ? 1.0 : 0.0;
    } else {
      mask.as<float>()[i] = counted ? 1.0F : 0.0F;
    }
  }
}

std::vector<double> read_doubles(const TensorView& view) {
  std::vector<double> data(static_cast<size_t>(view.shape.elements()));
  convert_elements(to_file_dtype(view.dtype), view.data, DType::f64, data.data(),
                   view.shape.elements());
  return data;
}

// How a comparison runs.
struct RunOptions {
  DType dtype = DType::f32;
  bool oracle = false;
  RoutingTrace trace = RoutingTrace::none;
  VerifyRanks ranks;

  int32_t sequences(const Reference& reference) const {  // of one rank
    return std::max(reference.batch / ranks.layout->layout.dp(), 1);
  }
  // The interleaved schedule is one of several micro-batches: there each sequence is one.
  int32_t micro_batches(const Reference& reference) const {
    const PipelineShape& shape = ranks.layout->schedule;
    const bool is_interleaved = shape.schedule == PipelineSchedule::one_f_one_b && shape.chunks > 1;
    return is_interleaved ? sequences(reference) : 1;
  }
};

// One rank's part of the reference's batch: logits, then as many updates as the trajectory has.
// Construction allocates nothing that is large.
class ReferenceRank {
 public:
  ReferenceRank(const ModelConfig& config, const Reference& reference, const RunOptions& options,
                ProcessGroup& group, int32_t rank)
      : batch_(reference.batch), session_(options.ranks.spec, rank, &group) {
    session_.declare(config, options.dtype, /*trained=*/true, options.ranks.layout);
    const int32_t sequences = options.sequences(reference);
    const int32_t micro_batches = options.micro_batches(reference);
    logits_step_ = build_logits_step(config, session_.state(), sequences, reference.sequence,
                                     /*with_loss=*/false, options.trace);
    training_step_ = build_training_step(config, session_.state(),
                                         {.micro_batch_size = sequences / micro_batches,
                                          .micro_batches = micro_batches,
                                          .sequence = reference.sequence,
                                          .clip_grad = reference.clip,
                                          .routing_trace = options.trace,
                                          .expert_rounds = true,
                                          .context_exchange = options.ranks.context_exchange});
    logits_plan_ = session_.plan(*logits_step_.program, options.oracle);
    training_plan_ = session_.plan(*training_step_.program, options.oracle);
  }

  uint64_t planned_bytes() const { return training_plan_.total_bytes() + logits_plan_.own_bytes(); }

  // All ranks. `others`: the bytes that the rank's other runs take.
  void check(uint64_t others) const {
    session_.check(
        {{training_step_.program.get(), &training_plan_},
         {logits_step_.program.get(), &logits_plan_}},
        [](uint64_t, uint64_t) {
          return "Use more ranks, each with a part of the model (docs/layouts.md).";
        },
        others);
  }

  // Takes memory, and fills it from the reference's folder.
  void start(const std::string& folder, const ModelConfig& config, const Reference& reference) {
    session_.allocate();
    logits_ = session_.interpreter(*logits_step_.program, std::move(logits_plan_));
    training_ = session_.interpreter(*training_step_.program, std::move(training_plan_));
    load_hf_weights(folder, config, state(), storage());
    storage().to_device();
    const int32_t first = first_sequence();
    write_batch(*logits_, logits_step_.batch, reference, first);
    const std::vector<BatchValues>& batches = training_step_.micro_batches;
    const auto count = static_cast<int32_t>(batches.size());
    for (int32_t i = 0; i < count; ++i) {
      write_batch(*training_, batches[static_cast<size_t>(i)], reference,
                  first + i * (logits_step_.batch.batch / count));
    }
    *training_->view(training_step_.learning_rate).as<double>() = reference.learning_rate;
    *training_->view(training_step_.weight_decay).as<double>() = reference.weight_decay;
  }

  void compute_logits() { logits_->run(); }

  // Hands the rank's logits to `visit(number, value)`, with their numbers in those of the whole
  // batch. Nothing on ranks that compute none.
  template <class Visit>
  void visit_logits(const ModelConfig& config, const Visit& visit) const {
    if (!logits_step_.logits.valid()) return;
    const TensorView view = logits_->view(logits_step_.logits);
    const std::vector<double> values = read_doubles(view);
    const int64_t columns = view.shape[1];
    const int64_t first_column = columns == config.vocab_size ? 0 : first_token();
    for (int64_t row = 0; row < view.shape[0]; ++row) {
      const size_t token = token_of_row(logits_step_.batch, first_sequence(), row);
      const int64_t begin = static_cast<int64_t>(token) * config.vocab_size + first_column;
      for (int64_t i = 0; i < columns; ++i) {
        visit(static_cast<size_t>(begin + i), values[static_cast<size_t>(row * columns + i)]);
      }
    }
  }

  void update(int64_t number) {
    *training_->view(training_step_.update_number).as<int64_t>() = number;
    training_->run();
    storage().to_host();
    storage().gradients_to_host();
  }

  void replay_logits_routing(const ReferenceRank& other) {
    copy_routing(*other.logits_, other.logits_step_.selected, *logits_, logits_step_.selected);
  }
  void replay_update_routing(const ReferenceRank& other) {
    for (size_t i = 0; i < training_step_.selected.size(); ++i) {
      copy_routing(*other.training_, other.training_step_.selected[i], *training_,
                   training_step_.selected[i]);
    }
  }

  double loss() const { return *training_->view(training_step_.loss).as<double>(); }
  double grad_norm() const { return *training_->view(training_step_.grad_norm).as<double>(); }
  std::vector<double> gradient(const Parameter& parameter) const {
    return read_doubles(storage().view(parameter.gradient));
  }
  const ModelState& state() const { return session_.state(); }
  const StateStorage& storage() const { return session_.storage(); }

  bool same_logits(const ReferenceRank& other) const {
    return !logits_step_.logits.valid() ||
           read_doubles(logits_->view(logits_step_.logits)) ==
               read_doubles(other.logits_->view(other.logits_step_.logits));
  }

  bool same_state(const ReferenceRank& other) const {
    for (int32_t i = 0; i < state().table->size(); ++i) {
      const TensorView mine = storage().view(StateId{i});
      const TensorView theirs = other.storage().view(StateId{i});
      const auto bytes = static_cast<size_t>(mine.shape.elements()) * size_of(mine.dtype);
      if (std::memcmp(mine.data, theirs.data, bytes) != 0) return false;
    }
    return true;
  }

 private:
  int32_t first_sequence() const {
    return logits_step_.batch.batch * session_.part().dense().dp % batch_;
  }

  // Of the rank's block of the vocabulary.
  int64_t first_token() const {
    return state().get(state().model->head()).slice.ranges.front().front().begin;
  }

  static void copy_routing(const Interpreter& from, const std::vector<ValueId>& recorded,
                           const Interpreter& to, const std::vector<ValueId>& replayed) {
    for (size_t layer = 0; layer < recorded.size(); ++layer) {
      if (!recorded[layer].valid()) continue;
      const TensorView source = from.view(recorded[layer]);
      std::memcpy(to.view(replayed[layer]).data, source.data,
                  static_cast<size_t>(source.shape.elements()) * sizeof(int32_t));
    }
  }

  int32_t batch_;  // sequences of all ranks
  RankSession session_;
  InferenceStep logits_step_;
  TrainingStep training_step_;
  MemoryPlan logits_plan_;  // until start()
  MemoryPlan training_plan_;
  std::unique_ptr<Interpreter> logits_;
  std::unique_ptr<Interpreter> training_;
};

// One complete run of the reference's batch on all ranks, of which this process has some.
// Construction allocates nothing that is large.
class ReferenceRun {
 public:
  ReferenceRun(const ModelConfig& config, const Reference& reference, const RunOptions& options,
               ProcessGroup& group)
      : group_(group) {
    for (const int32_t rank : group.own_ranks()) {
      ranks_[rank] = std::make_unique<ReferenceRank>(config, reference, options, group, rank);
    }
  }

  // Before any of `runs`, which are all that there will be, has started.
  void check(const std::vector<ReferenceRun*>& runs) const {
    for_each_rank([&](int rank, const ReferenceRank& each) {
      uint64_t others = 0;
      for (const ReferenceRun* run : runs) {
        if (run != this) others += run->ranks_.at(rank)->planned_bytes();
      }
      each.check(others);
    });
  }

  void start(const std::string& folder, const ModelConfig& config, const Reference& reference) {
    for (const auto& [rank, each] : ranks_) each->start(folder, config, reference);
  }

  void compute_logits() {
    for_each_rank([](int, ReferenceRank& each) { each.compute_logits(); });
  }

  // Runs update `number` (from 1) and returns the loss before it.
  double update(int64_t number) {
    for_each_rank([&](int, ReferenceRank& each) { each.update(number); });
    return first().loss();
  }

  // Makes the next logits, or the next update, use the experts that `other` has just used.
  void replay_logits_routing(const ReferenceRun& other) {
    for (const auto& [rank, each] : ranks_) each->replay_logits_routing(*other.ranks_.at(rank));
  }
  void replay_update_routing(const ReferenceRun& other) {
    for (const auto& [rank, each] : ranks_) each->replay_update_routing(*other.ranks_.at(rank));
  }

  // Metrics are the same on all ranks.
  const ReferenceRank& first() const { return *ranks_.begin()->second; }

  // What bytes_of() gives for every rank, by rank. Nothing in processes without rank 0.
  template <class BytesOf>
  std::vector<std::string> gather(const BytesOf& bytes_of) const {
    std::vector<std::string> all;
    for_each_rank([&](int rank, const ReferenceRank& each) {
      std::vector<std::string> gathered = group_.gather(rank, bytes_of(each));
      if (rank == 0) all = std::move(gathered);
    });
    return all;
  }

  // On all ranks what they say on rank 0, and whether it is true on all.
  bool of_rank_0(bool value) const { return exchange(value).front(); }
  bool all(bool value) const {
    const std::vector<bool> values = exchange(value);
    return std::find(values.begin(), values.end(), false) == values.end();
  }

  bool same_logits(const ReferenceRun& other) const {
    return all(std::all_of(ranks_.begin(), ranks_.end(), [&](const auto& each) {
      return each.second->same_logits(*other.ranks_.at(each.first));
    }));
  }

  bool same_state(const ReferenceRun& other) const {
    return all(std::all_of(ranks_.begin(), ranks_.end(), [&](const auto& each) {
      return each.second->same_state(*other.ranks_.at(each.first));
    }));
  }

 private:
  // All at the same time, with those of other processes.
  template <class Body>
  void for_each_rank(const Body& body) const {
    run_ranks(group_, [&](int rank) { body(rank, *ranks_.at(rank)); });
  }

  std::vector<bool> exchange(bool value) const {
    std::vector<bool> values;
    for_each_rank([&](int rank, const ReferenceRank&) {
      const std::vector<uint64_t> all = group_.exchange(rank, value ? 1 : 0);
      if (rank == ranks_.begin()->first) values.assign(all.begin(), all.end());
    });
    return values;
  }

  ProcessGroup& group_;
  std::map<int, std::unique_ptr<ReferenceRank>> ranks_;  // of this process
};

// The mean over ranks is the reference's mean over tokens only if they have as many tokens. Where
// there are more replicas than sequences, each sequence is computed by equally many of them.
void check_ranks(const Reference& reference, const Layout& layout, const std::string& folder) {
  const int32_t ranks = std::min(layout.dp(), reference.batch);
  if (reference.batch % ranks != 0 || layout.dp() % ranks != 0) {
    throw_bad_request(
        fmt::format("--ranks {}: the {} sequences of {} cannot be divided among {} replicas.",
                    layout.world_size(), reference.batch, folder, layout.dp()));
  }
  const auto part = static_cast<std::ptrdiff_t>(reference.labels.size()) / ranks;
  const auto counted = [&](int32_t rank) {
    const auto begin = reference.labels.begin() + rank * part;
    return std::count_if(begin, begin + part, [](int64_t label) { return label >= 0; });
  };
  for (int32_t rank = 1; rank < ranks; ++rank) {
    if (counted(rank) == counted(0)) continue;
    throw_bad_request(
        fmt::format("--ranks {}: the sequences of {} have different numbers of counted labels, so "
                    "the mean over ranks is not the reference's. Use --ranks {}.",
                    layout.world_size(), folder, layout.world_size() / ranks));
  }
}

// The same of the micro-batches of a rank.
void check_micro_batches(const Reference& reference, const RunOptions& options,
                         const std::string& folder) {
  if (options.micro_batches(reference) == 1) return;
  const auto counted = [&](int32_t sequence) {
    const auto begin = reference.labels.begin() + std::ptrdiff_t{sequence} * reference.sequence;
    return std::count_if(begin, begin + reference.sequence,
                         [](int64_t label) { return label >= 0; });
  };
  for (int32_t sequence = 1; sequence < reference.batch; ++sequence) {
    if (counted(sequence) == counted(0)) continue;
    throw_bad_request(fmt::format(
        "The sequences of {} have different numbers of counted labels, so the mean over "
        "micro-batches, which virtual stages need, is not the reference's. Leave them out.",
        folder));
  }
}

double sum_of_squares(const std::vector<double>& values) {
  double sum = 0;
  for (const double value : values) sum += value * value;
  return sum;
}

// NaN is the worst.
bool is_worse(double difference, double than) {
  return !(std::abs(difference) <= std::abs(than));
}

// Every logit, by the rank that is furthest off. The result is rank 0's.
void compare_logits(const ModelConfig& config, const Reference& reference, const ReferenceRun& run,
                    ReferenceComparison& result) {
  const std::vector<std::string> logits = run.gather([&](const ReferenceRank& rank) {
    std::string bytes;
    rank.visit_logits(config, [&](size_t number, double logit) {
      append_bytes(bytes, number);
      append_bytes(bytes, logit);
    });
    return bytes;
  });
  if (logits.empty()) return;
  std::vector<bool> seen(reference.logits.size());
  for (const std::string& of_rank : logits) {
    for (ByteReader reader(of_rank); !reader.at_end();) {
      const auto number = reader.take<size_t>();
      seen.at(number) = true;
      const double difference = reader.take<double>() - reference.logits[number];
      if (is_worse(difference, result.logits_max_abs)) {
        result.logits_max_abs = std::abs(difference);
      }
    }
  }
  TROUPE_CHECK(std::find(seen.begin(), seen.end(), false) == seen.end(),
               "some logits are on no rank");
  for (const double logit : reference.logits) {
    result.logits_largest = std::max(result.logits_largest, std::abs(logit));
  }
}

// A rank's slice of a gradient.
struct GradientSlice {
  std::vector<SliceRun> runs;
  int64_t first;  // the element of the rank's slice with which the values begin
  std::vector<double> values;
};

// Writes the differences from `expected`, a tensor of which this is a piece of the whole gradient,
// of what the slice holds of the piece. Of several slices that hold an element the worst one
// counts.
void add_differences(const GradientSlice& slice, const HfPiece& piece,
                     const std::vector<double>& expected, std::vector<double>& difference,
                     std::vector<bool>& seen) {
  const int64_t end = piece.offset + piece.elements;
  for (const SliceRun& run : slice.runs) {
    const int64_t stop = std::min(run.whole + run.elements, end);
    for (int64_t i = std::max(run.whole, piece.offset); i < stop; ++i) {
      const auto at = static_cast<size_t>(i - piece.offset + piece.first);
      const double own =
          slice.values[static_cast<size_t>(run.own - slice.first + i - run.whole)] - expected[at];
      if (!seen[at] || is_worse(own, difference[at])) difference[at] = own;
      seen[at] = true;
    }
  }
}

// Tensors are compared whole, put together from the slices of all ranks. The result is rank 0's.
void compare_gradients(const std::string& folder, const ModelConfig& config,
                       const ReferenceRun& run, ReferenceComparison& result) {
  const std::vector<std::string> slices = run.gather([](const ReferenceRank& rank) {
    std::string bytes;
    for (const Parameter& parameter : rank.state().parameters) {
      append_bytes(bytes, parameter.id.index);
      append_bytes(bytes,
                   runs_within(runs_of(parameter.slice, parameter.whole_shape), parameter.shard));
      append_bytes(bytes, parameter.held.begin);
      append_bytes(bytes, rank.gradient(parameter));
    }
    return bytes;
  });
  if (slices.empty()) return;
  std::map<int32_t, std::vector<GradientSlice>> gradients;  // by the parameter's number
  for (const std::string& of_rank : slices) {
    for (ByteReader reader(of_rank); !reader.at_end();) {
      std::vector<GradientSlice>& of_parameter = gradients[reader.take<int32_t>()];
      auto runs = reader.take_values<SliceRun>();
      const auto first = reader.take<int64_t>();
      of_parameter.push_back({std::move(runs), first, reader.take_values<double>()});
    }
  }
  double squared_differences = 0;  // of all tensors
  double squared_references = 0;
  read_hf_gradients(join_path(folder, "grads"), config,
                    [&](const HfTensor& tensor, const std::vector<double>& expected) {
                      std::vector<double> difference(expected.size());
                      std::vector<bool> seen(expected.size());
                      for (const GradientSlice& slice : gradients[tensor.parameter.index]) {
                        for (const HfPiece& piece : tensor.pieces()) {
                          add_differences(slice, piece, expected, difference, seen);
                        }
                      }
                      TROUPE_CHECK(std::find(seen.begin(), seen.end(), false) == seen.end(),
                                   "a part of the gradient of " + tensor.name + " is on no rank");
                      const double squared_difference = sum_of_squares(difference);
                      const double squared_reference = sum_of_squares(expected);
                      squared_differences += squared_difference;
                      squared_references += squared_reference;
                      const double norm = std::sqrt(squared_reference);
                      const double error = std::sqrt(squared_difference) /
                                           (norm < 1e-6 * result.grad_norm_ref ? 1 : norm);
                      if (is_worse(error, result.grad_worst_rel)) {
                        result.grad_worst_rel = error;
                        result.grad_worst_name = tensor.name;
                      }
                    });
  result.grad_all_rel =
      std::sqrt(squared_differences / (squared_references > 0 ? squared_references : 1));
}

}  // namespace

ReferenceTolerance reference_tolerance(DType compute_dtype) {
  if (compute_dtype == DType::bf16) {
    return {.logits = 5e-2,
            .loss = 1e-2,
            .gradient = 1e-1,
            .all_gradients = 2.5e-2,
            .trajectory = 3e-2};
  }
  return {.logits = 1e-4,
          .loss = 1e-5,
          .gradient = 2e-4,
          .all_gradients = std::numeric_limits<double>::infinity(),
          .trajectory = 2e-4};
}

ReferenceShape reference_shape(const std::string& folder) {
  return shape_of_batch(open_reference(folder));
}

ReferenceComparison verify_reference(const std::string& folder, DType compute_dtype,
                                     bool with_oracle, VerifyRanks ranks,
                                     const WorkReport& report) {
  ModelConfig config = read_hf_config(join_path(folder, "config.json"));
  // The reference loss is the cross-entropy alone.
  config.moe_aux_loss_coeff = 0;
  config.moe_seq_aux_loss_coeff = 0;
  config.moe_router_bias_update_rate = 0;
  const Reference reference = read_reference(folder, config);
  RunLayout run_layout = ranks.layout == nullptr
                             ? layout_of_one_rank(config.num_layers, config.mtp_num_layers)
                             : *ranks.layout;
  run_layout.optimizer = std::make_shared<const AdamWOptimizer>(AdamWOptions{
      .beta1 = reference.beta1, .beta2 = reference.beta2, .epsilon = reference.epsilon});
  ranks.layout = std::make_shared<const RunLayout>(std::move(run_layout));
  std::optional<ThreadGroup> own_group;
  if (ranks.group == nullptr) {
    ranks.group = &own_group.emplace(ranks.spec.ranks, ranks.spec.collective_timeout);
  }
  ProcessGroup& group = *ranks.group;
  const bool replay = compute_dtype == DType::bf16 && config.num_experts > 0;
  require_accepted(
      check_layout(config, ranks.layout->layout, reference.sequence, ranks.context_exchange));
  check_ranks(reference, ranks.layout->layout, folder);
  RunOptions options{.dtype = compute_dtype,
                     .trace = replay ? RoutingTrace::replayed : RoutingTrace::none,
                     .ranks = ranks};
  check_micro_batches(reference, options, folder);
  ReferenceRun run(config, reference, options, group);
  std::vector<ReferenceRun*> runs = {&run};
  std::unique_ptr<ReferenceRun> oracle;
  if (with_oracle) {
    options.oracle = true;
    oracle = std::make_unique<ReferenceRun>(config, reference, options, group);
    runs.push_back(oracle.get());
  }
  std::unique_ptr<ReferenceRun> router;  // whose choice of experts is replayed
  if (replay) {
    options = {.dtype = DType::f32, .trace = RoutingTrace::recorded, .ranks = ranks};
    router = std::make_unique<ReferenceRun>(config, reference, options, group);
    runs.push_back(router.get());
  }
  for (const ReferenceRun* each : runs) each->check(runs);
  for (ReferenceRun* each : runs) each->start(folder, config, reference);

  const auto done = [&](size_t steps) {
    if (report) report(steps, 1 + reference.trajectory.size());
  };
  done(0);
  ReferenceComparison result;
  result.routing_replayed = replay;
  result.loss_ref = reference.loss;
  result.grad_norm_ref = reference.grad_norm;
  result.oracle_checked = with_oracle;
  result.oracle_identical = with_oracle;

  if (router) {
    router->compute_logits();
    run.replay_logits_routing(*router);
    if (oracle) oracle->replay_logits_routing(*router);
  }
  run.compute_logits();
  if (oracle) {
    oracle->compute_logits();
    result.oracle_identical = run.same_logits(*oracle);
  }
  compare_logits(config, reference, run, result);
  done(1);

  for (size_t i = 0; i < reference.trajectory.size(); ++i) {
    if (router) {
      router->update(static_cast<int64_t>(i) + 1);
      run.replay_update_routing(*router);
      if (oracle) oracle->replay_update_routing(*router);
    }
    const double loss = run.update(static_cast<int64_t>(i) + 1);
    if (oracle) {
      const bool same_loss = loss == oracle->update(static_cast<int64_t>(i) + 1);
      result.oracle_identical = result.oracle_identical && same_loss && run.same_state(*oracle);
    }
    if (i == 0) {
      result.loss = loss;
      result.grad_norm = run.first().grad_norm();
      compare_gradients(folder, config, run, result);
    }
    const double difference = std::abs(loss - reference.trajectory[i]);
    if (is_worse(difference, result.trajectory_max_abs)) result.trajectory_max_abs = difference;
    done(2 + i);
  }

  const ReferenceTolerance tolerance = reference_tolerance(compute_dtype);
  const double logits_limit =
      compute_dtype == DType::bf16 ? tolerance.logits * result.logits_largest : tolerance.logits;
  result.pass = result.logits_max_abs <= logits_limit &&
                std::abs(result.loss - result.loss_ref) <= tolerance.loss &&
                result.grad_worst_rel <= tolerance.gradient &&
                result.grad_all_rel <= tolerance.all_gradients &&
                std::abs(result.grad_norm - result.grad_norm_ref) <=
                    std::min(tolerance.gradient, tolerance.all_gradients) * result.grad_norm_ref &&
                result.trajectory_max_abs <= tolerance.trajectory &&
                (!with_oracle || result.oracle_identical);
  result.pass = run.of_rank_0(result.pass);
  return result;
}

}  // namespace troupe
