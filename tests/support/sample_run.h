// Runs an operation's sample, forward and backward, and returns everything it computed as doubles.
// Shared by the generic operation tests. One thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "passes/memory_plan.h"
#include "program/op_sample.h"
#include "program/op_spec.h"
#include "runtime/interpreter.h"

namespace troupe::testing {

struct SampleRunOptions {
  DType dtype = DType::f64;
  int threads = 1;
  bool oracle = false;
  bool backward = true;
  bool poison_padding = true;                // rows beyond the live count hold NaN, otherwise zero
  std::optional<DType> rounded_to = {};      // bf16 or f16, of inputs, whatever the dtype
  std::optional<size_t> only_gradient = {};  // of this input; unset: of all that are differentiable
  Device device = Device::cpu;
};

class SampleRun {
 public:
  SampleRun(const OpSample& sample, const SampleRunOptions& options);

  // Writes the inputs (element `element` of input `input` shifted by `shift`) and runs.
  void run(size_t input = 0, int64_t element = 0, double shift = 0);

  // On a CPU, and oracle: fills the memory between values with bytes that are NaN in every type.
  // After run(): the name of a value after which one was written; empty where none was.
  void fill_gaps();
  std::string find_written_gap() const;

  // On a CPU, and oracle: runs, and says which operation wrote beyond its workspace or its scratch
  // memory; empty: none did.
  std::string find_overrun();

  const std::vector<SampleBuilder::InputData>& inputs() const { return sample_.inputs(); }
  // The largest magnitude of an input's elements.
  double largest_input() const;
  // Live elements of input `i`: only these are perturbed and only their gradients compared.
  int64_t live_elements(ValueId id) const;

  // After run(): live elements of each result; of the gradient of each differentiable input (empty
  // for other inputs); and sum over results of <random cotangent, result>.
  std::vector<std::vector<double>> results() const;
  std::vector<std::vector<double>> gradients() const;
  double objective() const;
  // By input; invalid where there is none.
  const std::vector<ValueId>& gradient_ids() const { return gradient_ids_; }

  const Program& program() const { return *program_; }

 private:
  // Reads the live elements of a watched value as the operation that defines it leaves them; later
  // its memory may serve another value.
  void capture(int32_t op);
  void write_inputs(size_t input, int64_t element, double shift);
  void write(ValueId id, const std::vector<double>& data);
  // Memory between the end of a value and what lies after it, less than MemoryPlan::kAlignment.
  struct Gap {
    std::string after;
    std::byte* begin;
    std::byte* end;
  };
  std::vector<Gap> gaps() const;
  // The bytes of a value as the operations see them, in memory of this object.
  TensorView snapshot(ValueId id) const;

  SampleRunOptions options_;
  std::shared_ptr<const StateTable> table_;
  std::unique_ptr<Program> program_;
  Builder builder_;
  SampleBuilder sample_;
  std::vector<std::vector<double>> cotangents_;  // by result; empty where no gradient enters
  std::vector<ValueId> cotangent_ids_;
  std::vector<ValueId> gradient_ids_;          // by input
  std::vector<bool> watched_;                  // by value
  std::vector<std::vector<double>> captured_;  // by value
  std::unique_ptr<StateStorage> state_;
  std::unique_ptr<ThreadPool> pool_;
  std::unique_ptr<Interpreter> interpreter_;
  mutable std::map<int32_t, std::vector<std::byte>> snapshots_;  // by value
};

}  // namespace troupe::testing
