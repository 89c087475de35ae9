// A program of a few operations on a GPU, on freshly filled inputs, for measuring single kernels of
// it without an interpreter: every value has memory of its own.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <cuda_runtime_api.h>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/random.h"
#include "ops/cuda/context.h"
#include "program/builder.h"
#include "program/cuda/check.h"
#include "runtime/cuda_libraries.h"
#include "runtime/device_memory.h"

namespace troupe {

class DeviceRun {
 public:
  // Float inputs, parameters and gradients are filled with normal random numbers that bf16 can
  // hold, the same ones in every dtype; integer inputs with random numbers below `integers`; other
  // state with zeros.
  DeviceRun(const std::function<void(Builder&)>& emit, int32_t integers,
            const std::shared_ptr<const StateTable>& state = std::make_shared<StateTable>())
      : program_(open(state)) {
    Builder builder(program_);
    emit(builder);
    check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "making a stream");
    for (int32_t i = 0; i < program_.value_count(); ++i) {
      const Value& value = program_.value(ValueId{i});
      memory_.emplace_back(value.bytes(), "a value");
      const bool filled = value.role == Role::input || value.role == Role::parameter ||
                          value.role == Role::gradient;
      if (filled) fill(value, memory_.back(), integers);
    }
    uint64_t scratch_bytes = 0;
    for (int32_t i = 0; i < program_.op_count(); ++i) {
      const OpView op{program_, program_.op(i)};
      scratch_bytes = std::max(scratch_bytes, op.op.spec->cuda(op, gpu_).needs.scratch);
    }
    scratch_ = DeviceMemory(scratch_bytes, "scratch memory");
    check_cuda(cudaDeviceSynchronize(), "filling inputs");
  }
  ~DeviceRun() { cudaStreamDestroy(stream_); }
  DeviceRun(const DeviceRun&) = delete;
  DeviceRun& operator=(const DeviceRun&) = delete;

  const Program& program() const { return program_; }
  cudaStream_t stream() const { return stream_; }
  uint64_t scratch_bytes() const { return scratch_.bytes(); }

  void launch(int32_t index) {
    const Op& op = program_.op(index);
    std::vector<CudaTensor> operands;
    for (const ValueId id : program_.inputs(op)) {
      operands.push_back(id.valid() ? tensor(id) : CudaTensor{});
    }
    for (const ValueId id : program_.outputs(op)) operands.push_back(tensor(id));
    CudaKernelArguments arguments;
    arguments.attributes = &op.attributes;
    arguments.inputs = {operands.data(), op.input_count};
    arguments.outputs = {operands.data() + op.input_count, op.output_count};
    arguments.scratch = scratch_.data();
    arguments.stream = stream_;
    arguments.context = &context_;
    const KernelChoice choice = op.spec->cuda({program_, op}, gpu_);
    arguments.multiprocessors = choice.multiprocessors;
    choice.function(arguments);
  }

  // Fills an integer input.
  void write(ValueId id, const std::vector<int32_t>& numbers) {
    memory_[static_cast<size_t>(id.index)].copy_in(
        reinterpret_cast<const std::byte*>(numbers.data()), 0, numbers.size() * sizeof(int32_t));
  }

  void run() {
    for (int32_t i = 0; i < program_.op_count(); ++i) launch(i);
    wait();
  }

  void wait() { check_cuda(cudaStreamSynchronize(stream_), "running"); }

  // The median of `runs` launches, each with nothing of use in the cache.
  double seconds(int32_t index, int runs = 11) {
    constexpr uint64_t kFlushBytes = uint64_t{256} << 20;
    const DeviceMemory flush(kFlushBytes, "emptying the cache");
    cudaEvent_t begin = nullptr;
    cudaEvent_t end = nullptr;
    check_cuda(cudaEventCreate(&begin), "timing");
    check_cuda(cudaEventCreate(&end), "timing");
    std::vector<double> times;
    for (int i = 0; i < runs + 2; ++i) {  // the first two warm up
      check_cuda(cudaMemsetAsync(flush.data(), i, kFlushBytes, stream_), "emptying the cache");
      check_cuda(cudaEventRecord(begin, stream_), "timing");
      launch(index);
      check_cuda(cudaEventRecord(end, stream_), "timing");
      wait();
      float milliseconds = 0;
      check_cuda(cudaEventElapsedTime(&milliseconds, begin, end), "timing");
      if (i >= 2) times.push_back(milliseconds * 1e-3);
    }
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
  }

  Cost cost(int32_t index) const {
    const Op& op = program_.op(index);
    return op.spec->cost(OpView{program_, op});
  }

  std::vector<std::byte> bytes(ValueId id) const {
    std::vector<std::byte> bytes(program_.value(id).bytes());
    check_cuda(cudaMemcpy(bytes.data(), memory_[static_cast<size_t>(id.index)].data(), bytes.size(),
                          cudaMemcpyDeviceToHost),
               "reading a value");
    return bytes;
  }

  // All bits set: NaN, in every float type.
  void poison(ValueId id) {
    check_cuda(
        cudaMemset(memory_[static_cast<size_t>(id.index)].data(), 0xff, program_.value(id).bytes()),
        "filling memory with NaN");
    check_cuda(cudaDeviceSynchronize(), "filling memory with NaN");
  }

  // As numbers, of a float type.
  std::vector<double> numbers(ValueId id) const {
    const std::vector<std::byte> raw = bytes(id);
    const DType dtype = program_.value(id).dtype;
    std::vector<double> numbers(raw.size() / size_of(dtype));
    const auto copy = [&]<class T>(T) {
      for (size_t i = 0; i < numbers.size(); ++i) {
        T number;
        std::memcpy(&number, raw.data() + i * sizeof(T), sizeof(T));
        numbers[i] = static_cast<double>(static_cast<float>(number));
      }
    };
    if (dtype == DType::bf16) copy(bf16());
    if (dtype == DType::f32) copy(float());
    if (dtype == DType::f64) copy(double());
    return numbers;
  }

 private:
  // Loads NVIDIA's libraries, which other members call as they are made.
  static Program open(const std::shared_ptr<const StateTable>& state) {
    const std::string problem = cuda_library_problem();
    if (!problem.empty()) throw_failed(problem);
    return Program(state);
  }

  CudaTensor tensor(ValueId id) const {
    const Value& value = program_.value(id);
    CudaTensor tensor{memory_[static_cast<size_t>(id.index)].data(), value.dtype, value.shape,
                      nullptr};
    if (value.rows.valid()) {
      tensor.live_rows = this->tensor(value.rows.counter).as<int32_t>() + value.rows.element;
    }
    return tensor;
  }

  // From a pattern that repeats at a length which no row of a matrix has.
  static void fill(const Value& value, const DeviceMemory& memory, int32_t integers) {
    constexpr uint64_t kPattern = 1048573;
    std::vector<std::byte> pattern;
    for (uint64_t i = 0; i < kPattern; ++i) {
      const double u = random_uniform(/*seed=*/1, RandomStream::test, 0, 2 * i);
      const double v = random_uniform(/*seed=*/1, RandomStream::test, 0, 2 * i + 1);
      const bf16 number(std::sqrt(-2 * std::log(1 - u)) * std::cos(6.283185307179586 * v));
      const auto append = [&](const auto& element) {
        const auto* bytes = reinterpret_cast<const std::byte*>(&element);
        pattern.insert(pattern.end(), bytes, bytes + sizeof(element));
      };
      if (value.dtype == DType::bf16) append(number);
      if (value.dtype == DType::f32) append(static_cast<float>(number));
      if (value.dtype == DType::f64) append(static_cast<double>(static_cast<float>(number)));
      if (value.dtype == DType::i32) append(static_cast<int32_t>(u * integers));
      if (value.dtype == DType::i64) append(static_cast<int64_t>(u * integers));
    }
    std::vector<std::byte> all(value.bytes());
    for (size_t at = 0; at < all.size(); at += pattern.size()) {
      std::memcpy(all.data() + at, pattern.data(), std::min(pattern.size(), all.size() - at));
    }
    memory.copy_in(all.data(), 0, memory.bytes());
  }

  Program program_;
  std::vector<DeviceMemory> memory_;  // by ValueId
  DeviceMemory scratch_;
  CudaContext context_;
  const DeviceTraits gpu_ = device_traits(0);
  cudaStream_t stream_ = nullptr;
};

}  // namespace troupe
