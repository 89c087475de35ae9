// A program of a few operations on freshly filled inputs, for measuring one of them as a training
// step runs it: through the interpreter, on all threads.
#pragma once

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>

#include "base/machine.h"
#include "base/random.h"
#include "passes/memory_plan.h"
#include "program/builder.h"
#include "runtime/cpu/cpu_interpreter.h"

namespace troupe {

class OperationRun {
 public:
  // `emit` builds the program and returns the number of the first operation that counts; all that
  // follow do. Integer inputs are filled with random numbers below `integers`.
  OperationRun(const std::function<int32_t(Builder&)>& emit, int32_t integers)
      : program_(table_), pool_(usable_cores()), storage_(table_) {
    Builder builder(program_);
    first_ = emit(builder);
    program_.add_result(program_.outputs(program_.op(program_.op_count() - 1)).front());
    interpreter_ = std::make_unique<CpuInterpreter>(
        program_, plan_memory(program_, pool_.threads()), storage_, pool_);
    for (int32_t i = 0; i < program_.value_count(); ++i) {
      const Value& value = program_.value(ValueId{i});
      if (value.role == Role::input) fill(interpreter_->view(ValueId{i}), integers);
    }
  }

  // Runs everything once; returns the seconds of the operations that count.
  double run() {
    using Clock = std::chrono::steady_clock;
    double seconds = 0;
    auto last = Clock::now();
    interpreter_->run_observed([&](int32_t op) {
      const auto now = Clock::now();
      if (op >= first_) seconds += std::chrono::duration<double>(now - last).count();
      last = Clock::now();
    });
    return seconds;
  }

  // Of the operations that count, as their kinds state it.
  Cost cost() const {
    Cost sum;
    for (int32_t i = first_; i < program_.op_count(); ++i) {
      const Op& op = program_.op(i);
      const Cost cost = op.spec->cost(OpView{program_, op});
      sum.flops += cost.flops;
      sum.bytes += cost.bytes;
    }
    return sum;
  }

  TensorView view(ValueId id) const { return interpreter_->view(id); }
  ThreadPool& pool() { return pool_; }

 private:
  static void fill(const TensorView& view, int32_t integers) {
    for (int64_t e = 0; e < view.shape.elements(); ++e) {
      if (view.dtype == DType::i32) {
        view.as<int32_t>()[e] = static_cast<int32_t>(random_below(
            static_cast<uint64_t>(integers), 1, RandomStream::test, 0, static_cast<uint64_t>(e)));
      } else {
        view.as<float>()[e] = static_cast<float>(e % 19) * 0.1F - 0.9F;
      }
    }
  }

  std::shared_ptr<const StateTable> table_ = std::make_shared<const StateTable>();
  Program program_;
  int32_t first_ = 0;
  ThreadPool pool_;
  StateStorage storage_;
  std::unique_ptr<CpuInterpreter> interpreter_;
};

}  // namespace troupe
