#include "train/calibration.h"

#include <algorithm>
#include <array>
#include <fmt/format.h>
#include <functional>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>

#include "base/machine.h"
#include "base/random.h"
#include "base/text.h"
#include "base/thread_pool.h"
#include "ops/elementwise/add/add.h"
#include "ops/exchange/offload/offload.h"
#include "ops/products/linear/linear.h"
#include "options/cluster_options.h"
#include "runtime/copy_limit.h"
#include "runtime/device_limits.h"
#include "runtime/device_memory.h"
#include "runtime/make_interpreter.h"
#include "train/planned_program.h"
#include "train/step_profile.h"

namespace troupe {
namespace {

constexpr std::array kDTypes = {DType::bf16, DType::f32, DType::f64};
constexpr std::array<int64_t, 4> kSizes = {256, 512, 1024, 2048};
constexpr std::array<int64_t, 4> kSizesOfGpu = {1024, 2048, 4096, 8192};
constexpr uint64_t kLeastMemory = uint64_t{1} << 30;  // that a file may name
constexpr int kWarmUps = 3;  // on a GPU one is traced, and one captured as a graph
constexpr int kRuns = 5;
// On a CPU, whose threads may share a core for a while until the system moves one, or whose cores
// others use: the best of several times counts.
constexpr int kPassesOfCpu = 3;
constexpr int32_t kSmallOperations = 500;
constexpr int64_t kCopiedElements = int64_t{16} << 20;  // of f32: more than caches hold

template <class T>
void fill(T* values, int64_t count) {
  constexpr int64_t kBlock = 1 << 16;
  std::vector<double> normals(kBlock);
  fill_random_normals(/*seed=*/1, RandomStream::test, 0, 0, kBlock, normals.data());
  for (int64_t i = 0; i < count; ++i) {
    // Blocks that follow each other are not the same.
    values[i] = static_cast<T>(normals[static_cast<size_t>((i + i / kBlock) % kBlock)]);
  }
}

void fill(const TensorView& view) {
  const int64_t count = view.shape.elements();
  if (view.dtype == DType::bf16) return fill(view.as<bf16>(), count);
  if (view.dtype == DType::f64) return fill(view.as<double>(), count);
  fill(view.as<float>(), count);
}

// Tensors that a program reads, by the builder of the program.
using Emit = std::function<ValueId(Builder&, const std::vector<ValueId>&)>;

class Machine {
 public:
  explicit Machine(const DeviceSpec& spec)
      : device_(spec.device), pool_(spec.thread_count()), traits_(traits_of(spec.device, 0)) {}

  bool has_gpu() const { return device_ == Device::cuda; }
  ThreadPool& pool() { return pool_; }

  // Runs the program of these tensors, whose last value is its result; calls see() with its runs.
  void profile(const std::vector<StateTensor>& tensors, const Emit& emit,
               const std::function<void(const StepProfile&)>& see) {
    const auto table = std::make_shared<StateTable>();
    std::vector<StateId> ids;
    for (const StateTensor& tensor : tensors) ids.push_back(table->add(tensor));
    Program program(table);
    Builder builder(program);
    std::vector<ValueId> values;
    for (const StateId id : ids) values.push_back(builder.state(id));
    program.add_result(emit(builder, values));
    const StateStorage storage(table, device_);
    for (const StateId id : ids) fill(storage.view(id));
    storage.to_device();
    const std::unique_ptr<Interpreter> interpreter =
        make_interpreter(program, plan_program(program, pool_.threads(), device_, traits_), storage,
                         pool_, {}, {.capture = has_gpu(), .profile = true});
    for (int run = 0; run < kWarmUps; ++run) interpreter->run();
    StepProfile seen(program);
    for (int run = 0; run < kRuns; ++run) seen.add(interpreter->run_profiled());
    see(seen);
  }

 private:
  Device device_;
  ThreadPool pool_;
  DeviceTraits traits_;
};

// Of all operations of a kind.
double seconds_of(const StepProfile& profile, std::string_view kind) {
  for (const KindTime& time : profile.kinds()) {
    if (time.kind == kind) return std::max(time.seconds, 1e-9);
  }
  TROUPE_CHECK(false, "an operation that was run");
  return 0;
}

ProductRate measure_product(Machine& machine, DType dtype, int64_t size) {
  const auto tensor = [&](const char* name) {
    return StateTensor{.name = name, .dtype = dtype, .shape = {size, size}};
  };
  ProductRate rate{.dtype = dtype, .size = size};
  machine.profile(
      {tensor("x"), tensor("w")},
      [](Builder& builder, const std::vector<ValueId>& values) {
        return linear(builder, values[0], values[1], {}, "y");
      },
      [&](const StepProfile& profile) {
        const auto n = static_cast<double>(size);
        rate.flops_per_s = 2 * n * n * n / seconds_of(profile, kLinear.name);
      });
  return rate;
}

// Between one operation and the next.
double measure_launch(Machine& machine) {
  double seconds = 0;
  machine.profile(
      {{.name = "x", .shape = {16}}},
      [](Builder& builder, const std::vector<ValueId>& values) {
        ValueId sum = values[0];
        for (int32_t i = 0; i < kSmallOperations; ++i) sum = add(builder, sum, values[0], "sum");
        return sum;
      },
      [&](const StepProfile& profile) {
        const StepTimes times = profile.times();
        seconds = (times.seconds - times.busy_s) / kSmallOperations;
      });
  return seconds;
}

// Bytes per second between device and host, each way; on a CPU both are one memory.
double measure_host_bandwidth(Machine& machine) {
  double bandwidth = 0;
  machine.profile(
      {{.name = "x", .shape = {kCopiedElements}}},
      [](Builder& builder, const std::vector<ValueId>& values) {
        const ValueId x = add(builder, values[0], values[0], "x");
        return reload(builder, offload(builder, x, "host"), "back");
      },
      [&](const StepProfile& profile) {
        const double seconds =
            seconds_of(profile, kOffload.name) + seconds_of(profile, kReload.name);
        bandwidth = 2 * static_cast<double>(kCopiedElements * sizeof(float)) / seconds;
      });
  return bandwidth;
}

void set_what_it_is(const DeviceSpec& spec, Calibration& calibration) {
  GpuModel& hardware = calibration.hardware;
  if (spec.device == Device::cpu) {
    hardware.name = fmt::format("{} threads of {}", spec.thread_count(), printable(host_name()));
    hardware.traits = {.compute_capability = kNoGpu, .multiprocessors = spec.thread_count()};
    hardware.memory_bytes = std::max(kLeastMemory, available_memory_bytes());
    hardware.gpus_per_node = hardware.gpus_per_nvlink = spec.thread_count();
    return;
  }
  const DeviceTraits traits = device_traits(0);
  const std::optional<GpuModel> shipped = hardware_like(traits, total_device_bytes());
  calibration.links_are_known = shipped.has_value();
  if (shipped) hardware = *shipped;
  if (!shipped) {
    hardware.name =
        fmt::format("GPU of compute capability {}.{} with {} multiprocessors", traits.major(),
                    traits.compute_capability % 10, traits.multiprocessors);
    hardware.gpus_per_node = hardware.gpus_per_nvlink = gpu_count();
  }
  hardware.traits = traits;
  hardware.memory_bytes = available_device_bytes();
}

// Estimates, where there is nothing better.
void set_links(GpuModel& hardware) {
  constexpr double kShareOfNetwork = 0.25;
  constexpr double kLatency = 8e-6;
  constexpr double kNetworkLatency = 20e-6;
  hardware.nvlink_bandwidth = hardware.host_bandwidth;
  hardware.nvlink_latency = kLatency;
  hardware.network_bandwidth = kShareOfNetwork * hardware.host_bandwidth;
  hardware.network_latency = kNetworkLatency;
}

double best_of(const Calibration& calibration, DType dtype) {
  double best = 0;
  for (const ProductRate& rate : calibration.products) {
    if (rate.dtype == dtype) best = std::max(best, rate.flops_per_s);
  }
  return best;
}

}  // namespace

Calibration calibrate(const DeviceSpec& spec, const WorkReport& report) {
  Machine machine(spec);
  Calibration calibration;
  const int passes = machine.has_gpu() ? 1 : kPassesOfCpu;
  const uint64_t all = static_cast<uint64_t>(passes) * kDTypes.size() * kSizes.size() + 3;
  uint64_t done = 0;
  const auto count = [&] {
    if (report) report(++done, all);
  };
  set_what_it_is(spec, calibration);
  std::vector<ProductRate>& products = calibration.products;
  for (const DType dtype : kDTypes) {
    for (const int64_t size : machine.has_gpu() ? kSizesOfGpu : kSizes) {
      products.push_back({.dtype = dtype, .size = size});
    }
  }
  for (int pass = 0; pass < passes; ++pass) {
    for (ProductRate& best : products) {
      const ProductRate rate = measure_product(machine, best.dtype, best.size);
      best.flops_per_s = std::max(best.flops_per_s, rate.flops_per_s);
      count();
    }
  }
  GpuModel& hardware = calibration.hardware;
  hardware.bf16_flops = best_of(calibration, DType::bf16);
  hardware.f32_flops = best_of(calibration, DType::f32);
  hardware.f64_flops = best_of(calibration, DType::f64);
  hardware.memory_bandwidth =
      machine.has_gpu() ? measure_device_copy_limit() : measure_copy_limit(machine.pool());
  count();
  hardware.host_bandwidth = measure_host_bandwidth(machine);
  count();
  hardware.launch_seconds = measure_launch(machine);
  count();
  if (!calibration.links_are_known) set_links(hardware);
  return calibration;
}

std::string text_of(const Calibration& calibration) {
  std::string text = fmt::format("{}\n\n{:<18}", calibration.hardware.name, "products of");
  for (const DType dtype : kDTypes) text += fmt::format("{:>16}", name_of(dtype));
  text += "\n";
  const size_t sizes = calibration.products.size() / kDTypes.size();
  for (size_t i = 0; i < sizes; ++i) {
    const int64_t size = calibration.products[i].size;
    text += fmt::format("  {:<16}", fmt::format("{0} x {0}", size));
    for (size_t j = 0; j < kDTypes.size(); ++j) {
      text +=
          fmt::format("{:>9.4g} TFLOP/s", calibration.products[j * sizes + i].flops_per_s / 1e12);
    }
    text += "\n";
  }
  const GpuModel& hardware = calibration.hardware;
  return text + fmt::format(
                    "copying           {:.4g} GB/s, to or from the host {:.4g} GB/s\n"
                    "between operations {:.2f} us\n",
                    hardware.memory_bandwidth / 1e9, hardware.host_bandwidth / 1e9,
                    hardware.launch_seconds * 1e6);
}

std::string file_of(const Calibration& calibration) {
  const GpuModel& gpu = calibration.hardware;
  const std::string_view link =
      calibration.links_are_known ? "as of the kind that is shipped" : "not measured: an estimate";
  std::string text;
  const auto add = [&](const char* key, const std::string& value, std::string_view from) {
    text += fmt::format("{:<32}# {}\n", fmt::format("{} = {}", key, value), from);
  };
  const auto add_number = [&](const char* key, double value, std::string_view from) {
    add(key, fmt::format("{:.6g}", value), from);
  };
  constexpr std::string_view kProducts = "measured: the best of square products";
  text += fmt::format("name = \"{}\"\nmeasured = true\n", gpu.name);
  add_number("compute_capability", gpu.traits.compute_capability, "0: a CPU");
  add_number("multiprocessors", gpu.traits.multiprocessors, "of a CPU: threads");
  add_number("memory_gib", static_cast<double>(gpu.memory_bytes) / 0x1p30, "free when measured");
  add_number("bf16_tflops", gpu.bf16_flops / 1e12, kProducts);
  add_number("fp32_tflops", gpu.f32_flops / 1e12, kProducts);
  add_number("fp64_tflops", gpu.f64_flops / 1e12, kProducts);
  add_number("memory_gb_s", gpu.memory_bandwidth / 1e9, "measured: copying");
  add_number("host_gb_s", gpu.host_bandwidth / 1e9, "measured: copies from and to the host");
  add_number("gpus_per_node", gpu.gpus_per_node, "of this machine");
  add_number("gpus_per_nvlink", gpu.gpus_per_nvlink, link);
  add_number("nvlink_gb_s", gpu.nvlink_bandwidth / 1e9, link);
  add_number("nvlink_latency_us", gpu.nvlink_latency * 1e6, link);
  add_number("network_gb_s", gpu.network_bandwidth / 1e9, link);
  add_number("network_latency_us", gpu.network_latency * 1e6, link);
  add_number("launch_us", gpu.launch_seconds * 1e6, "measured: small operations in a row");
  return text;
}

}  // namespace troupe
