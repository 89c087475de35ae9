#include "support/sample_run.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "base/random.h"
#include "passes/autodiff.h"
#include "program/verify.h"
#include "runtime/make_interpreter.h"
#include "support/guarded_op.h"

namespace troupe::testing {
namespace {

template <class T>
void store(void* data, int64_t i, double value) {
  static_cast<T*>(data)[i] = static_cast<T>(value);
}

double rounded(double value, std::optional<DType> dtype) {
  if (!dtype) return value;
  return *dtype == DType::f16 ? static_cast<double>(f16(value)) : static_cast<double>(bf16(value));
}

double load_element(const TensorView& view, int64_t i) {
  switch (view.dtype) {
    case DType::f64:
      return static_cast<const double*>(view.data)[i];
    case DType::f32:
      return static_cast<const float*>(view.data)[i];
    case DType::bf16:
      return static_cast<const bf16*>(view.data)[i];
    case DType::f16:
      return static_cast<const f16*>(view.data)[i];
    case DType::f8e4m3:
      return static_cast<const f8e4m3*>(view.data)[i];
    case DType::f8e5m2:
      return static_cast<const f8e5m2*>(view.data)[i];
    case DType::i64:
      return static_cast<double>(static_cast<const int64_t*>(view.data)[i]);
    case DType::i32:
      return static_cast<const int32_t*>(view.data)[i];
    case DType::u8:
      return static_cast<const uint8_t*>(view.data)[i];
  }
  return 0;
}

void store_element(const TensorView& view, int64_t i, double value) {
  switch (view.dtype) {
    case DType::f64:
      return store<double>(view.data, i, value);
    case DType::f32:
      return store<float>(view.data, i, value);
    case DType::bf16:
      return store<bf16>(view.data, i, value);
    case DType::f16:
      return store<f16>(view.data, i, value);
    case DType::f8e4m3:
    case DType::f8e5m2:
      break;  // no operation computes in it
    case DType::i64:
      return store<int64_t>(view.data, i, value);
    case DType::i32:
      return store<int32_t>(view.data, i, value);
    case DType::u8:
      return store<uint8_t>(view.data, i, value);
  }
}

}  // namespace

SampleRun::SampleRun(const OpSample& sample, const SampleRunOptions& options)
    : options_(options),
      table_(std::make_shared<const StateTable>()),
      program_(std::make_unique<Program>(table_)),
      builder_(*program_),
      sample_(builder_, options.dtype) {
  sample.build(sample_);
  const int32_t forward_ops = program_->op_count();

  std::vector<GradientSeed> seeds;
  const auto& results = sample_.results();
  cotangents_.resize(results.size());
  cotangent_ids_.resize(results.size());
  for (size_t i = 0; i < results.size(); ++i) {
    const Value value = program_->value(results[i].id);
    if (!results[i].gradient || !is_float(value.dtype)) continue;
    for (int64_t j = 0; j < value.shape.elements(); ++j) {
      cotangents_[i].push_back(
          random_normal(2, RandomStream::test, static_cast<uint32_t>(i), static_cast<uint64_t>(j)));
    }
    cotangent_ids_[i] = program_->add_value(Value{.name = "d_" + value.name,
                                                  .dtype = value.dtype,
                                                  .shape = value.shape,
                                                  .role = Role::input,
                                                  .rows = value.rows});
    seeds.push_back({results[i].id, cotangent_ids_[i]});
  }
  const auto is_wanted = [&](size_t i) {
    return sample_.inputs()[i].differentiable && options.only_gradient.value_or(i) == i;
  };
  std::vector<ValueId> differentiable;
  for (size_t i = 0; i < sample_.inputs().size(); ++i) {
    if (is_wanted(i)) differentiable.push_back(sample_.inputs()[i].id);
  }
  gradient_ids_.resize(sample_.inputs().size());
  if (options.backward && !seeds.empty() && !differentiable.empty()) {
    MainGradients main_gradients(*table_);
    const auto gradient =
        append_backward(builder_, 0, forward_ops, seeds, differentiable, main_gradients);
    for (size_t i = 0; i < gradient_ids_.size(); ++i) {
      if (is_wanted(i)) gradient_ids_[i] = gradient[sample_.inputs()[i].id];
    }
  }
  verify_program(*program_);

  watched_.resize(static_cast<size_t>(program_->value_count()), false);
  captured_.resize(watched_.size());
  for (const auto& result : results) watched_[static_cast<size_t>(result.id.index)] = true;
  for (const ValueId id : gradient_ids_) {
    if (id.valid()) watched_[static_cast<size_t>(id.index)] = true;
  }

  MemoryPlan plan = options.oracle ? plan_oracle(*program_, options.threads, options.device)
                                   : plan_memory(*program_, options.threads, options.device);
  verify_memory_plan(*program_, plan);
  state_ = std::make_unique<StateStorage>(table_, options.device);
  pool_ = std::make_unique<ThreadPool>(options.threads);
  interpreter_ = make_interpreter(*program_, std::move(plan), *state_, *pool_);
}

std::vector<SampleRun::Gap> SampleRun::gaps() const {
  std::vector<Gap> blocks;
  for (int32_t i = 0; i < program_->value_count(); ++i) {
    const Value& value = program_->value(ValueId{i});
    auto* begin = static_cast<std::byte*>(interpreter_->view(ValueId{i}).data);
    if (begin != nullptr) blocks.push_back({value.name, begin, begin + value.bytes()});
  }
  std::sort(blocks.begin(), blocks.end(),
            [](const Gap& a, const Gap& b) { return std::less<>()(a.begin, b.begin); });
  std::vector<Gap> found;
  for (size_t i = 0; i + 1 < blocks.size(); ++i) {
    std::byte* const end = blocks[i].end;
    std::byte* const next = blocks[i + 1].begin;
    if (std::less<>()(end, next) && next < end + MemoryPlan::kAlignment) {
      found.push_back({blocks[i].after, end, next});
    }
  }
  return found;
}

void SampleRun::fill_gaps() {
  for (const Gap& gap : gaps()) std::fill(gap.begin, gap.end, std::byte{0xff});
}

std::string SampleRun::find_written_gap() const {
  for (const Gap& gap : gaps()) {
    const auto is_filled = [](std::byte each) { return each == std::byte{0xff}; };
    if (!std::all_of(gap.begin, gap.end, is_filled)) return gap.after;
  }
  return "";
}

TensorView SampleRun::snapshot(ValueId id) const {
  const Value& value = program_->value(id);
  std::vector<std::byte>& bytes = snapshots_[id.index];
  bytes.resize(value.bytes());
  interpreter_->read(id, bytes.data());
  return {bytes.data(), value.dtype, value.shape, nullptr};
}

void SampleRun::write(ValueId id, const std::vector<double>& data) {
  const TensorView view = interpreter_->view(id);
  const int64_t live = live_elements(id);
  const double padding = options_.poison_padding ? std::numeric_limits<double>::quiet_NaN() : 0.0;
  for (int64_t i = 0; i < view.shape.elements(); ++i) {
    double value = i < live ? data[static_cast<size_t>(i)] : padding;
    if (is_float(view.dtype)) value = rounded(value, options_.rounded_to);
    store_element(view, i, value);
  }
}

double SampleRun::largest_input() const {
  double largest = 0;
  for (const SampleBuilder::InputData& input : inputs()) {
    for (const double value : input.data) largest = std::max(largest, std::abs(value));
  }
  return largest;
}

int64_t SampleRun::live_elements(ValueId id) const {
  const Value& value = program_->value(id);
  if (value.shape.rank() == 0) return 1;
  int64_t rows = value.shape[0];
  if (value.rows.valid()) {
    const ValueId counter = value.rows.counter;
    const bool is_input = program_->value(counter).role == Role::input;
    const TensorView counts = is_input ? interpreter_->view(counter) : snapshot(counter);
    rows = counts.as<int32_t>()[value.rows.element];
  }
  return rows * value.shape.row_elements();
}

void SampleRun::capture(int32_t op) {
  for (const ValueId output : program_->outputs(program_->op(op))) {
    if (!watched_[static_cast<size_t>(output.index)]) continue;
    const TensorView view = snapshot(output);
    auto& data = captured_[static_cast<size_t>(output.index)];
    data.resize(static_cast<size_t>(live_elements(output)));
    for (size_t i = 0; i < data.size(); ++i) {
      data[i] = load_element(view, static_cast<int64_t>(i));
    }
    for (size_t i = 0; i < cotangent_ids_.size(); ++i) {
      if (sample_.results()[i].id != output || !cotangent_ids_[i].valid()) continue;
      const TensorView cotangent = snapshot(cotangent_ids_[i]);
      for (int64_t j = live_elements(output); j < cotangent.shape.elements(); ++j) {
        store_element(cotangent, j,
                      options_.poison_padding ? std::numeric_limits<double>::quiet_NaN() : 0.0);
      }
      interpreter_->write(cotangent_ids_[i], cotangent.data);
    }
  }
}

void SampleRun::write_inputs(size_t input, int64_t element, double shift) {
  // Counters first: the live extents of the other inputs depend on them.
  for (const bool integers : {true, false}) {
    for (size_t i = 0; i < sample_.inputs().size(); ++i) {
      const auto& source = sample_.inputs()[i];
      if (is_float(program_->value(source.id).dtype) == integers) continue;
      if (i != input || shift == 0) {
        write(source.id, source.data);
        continue;
      }
      std::vector<double> shifted = source.data;
      shifted[static_cast<size_t>(element)] += shift;
      write(source.id, shifted);
    }
  }
  // The live extent of a cotangent may depend on a counter that the program computes: capture()
  // poisons its padding when the result it belongs to has been computed.
  for (size_t i = 0; i < cotangent_ids_.size(); ++i) {
    if (!cotangent_ids_[i].valid()) continue;
    const TensorView view = interpreter_->view(cotangent_ids_[i]);
    for (int64_t j = 0; j < view.shape.elements(); ++j) {
      const double value = cotangents_[i][static_cast<size_t>(j)];
      store_element(view, j, rounded(value, options_.rounded_to));
    }
  }
}

void SampleRun::run(size_t input, int64_t element, double shift) {
  write_inputs(input, element, shift);
  interpreter_->run_observed([&](int32_t op) { capture(op); });
}

std::string SampleRun::find_overrun() {
  write_inputs(0, 0, 0);
  for (int32_t index = 0; index < program_->op_count(); ++index) {
    const OpView op{*program_, program_->op(index)};
    const std::string overrun = run_guarded(
        op, [&](ValueId id) { return interpreter_->view(id); }, *pool_);
    if (!overrun.empty()) return std::string(op.op.spec->name) + " beyond its " + overrun;
    capture(index);
  }
  return "";
}

std::vector<std::vector<double>> SampleRun::results() const {
  std::vector<std::vector<double>> all;
  for (const auto& result : sample_.results()) {
    all.push_back(captured_[static_cast<size_t>(result.id.index)]);
  }
  return all;
}

std::vector<std::vector<double>> SampleRun::gradients() const {
  std::vector<std::vector<double>> all;
  for (const ValueId id : gradient_ids_) {
    all.push_back(id.valid() ? captured_[static_cast<size_t>(id.index)] : std::vector<double>());
    if (!id.valid() || program_->value(id).role != Role::input) continue;
    // The rule handed a cotangent through: no operation defines it.
    const TensorView view = interpreter_->view(id);
    for (int64_t i = 0; i < live_elements(id); ++i) all.back().push_back(load_element(view, i));
  }
  return all;
}

double SampleRun::objective() const {
  double sum = 0;
  for (size_t i = 0; i < cotangents_.size(); ++i) {
    if (cotangents_[i].empty()) continue;
    const auto& result = captured_[static_cast<size_t>(sample_.results()[i].id.index)];
    for (size_t j = 0; j < result.size(); ++j) sum += cotangents_[i][j] * result[j];
  }
  return sum;
}

}  // namespace troupe::testing
