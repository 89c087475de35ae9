#include "train/calibration.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <fmt/format.h>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string_view>

#include "base/machine.h"
#include "base/text.h"
#include "base/units.h"
#include "ops/attention/attention/attention.h"
#include "ops/elementwise/add/add.h"
#include "ops/exchange/offload/offload.h"
#include "ops/products/linear/linear.h"
#include "options/cluster_options.h"
#include "plan/kernel_rates.h"
#include "runtime/copy_limit.h"
#include "runtime/device_limits.h"
#include "runtime/device_memory.h"
#include "train/program_meter.h"
#include "train/rank_run.h"

namespace troupe {
namespace {

constexpr std::array kDTypes = {DType::bf16, DType::f32, DType::f64};
constexpr std::array<int64_t, 4> kSizes = {256, 512, 1024, 2048};
constexpr std::array<int64_t, 4> kSizesOfGpu = {1024, 2048, 4096, 8192};
constexpr std::array<int64_t, 3> kSequences = {64, 256, 512};
constexpr std::array<int64_t, 4> kSequencesOfGpu = {1024, 2048, 4096, 8192};
constexpr int64_t kTokens = 1024;  // of attention
constexpr int64_t kTokensOfGpu = 16'384;
constexpr uint64_t kLeastMemory = uint64_t{1} << 30;  // that a file may name
// On a CPU, whose threads may share a core for a while until the system moves one, or whose cores
// others use: the best of several times counts.
constexpr int kPassesOfCpu = 3;
constexpr double kSecondsOfLoad = 0.2;  // in each run
constexpr int32_t kSmallOperations = 500;
constexpr int64_t kCopiedElements = int64_t{16} << 20;  // of f32: more than caches hold

ProductRate measure_product(ProgramMeter& meter, DType dtype, int64_t size) {
  const auto tensor = [&](const char* name) {
    return StateTensor{.name = name, .dtype = dtype, .shape = {size, size}};
  };
  ProductRate rate{.dtype = dtype, .size = size};
  meter.profile(
      {tensor("x"), tensor("w")},
      [](Builder& builder, const std::vector<ValueId>& values) {
        return linear(builder, values[0], values[1], {}, "y");
      },
      [&](const Program&, const StepProfile& profile) {
        const auto n = static_cast<double>(size);
        rate.flops_per_s = 2 * n * n * n / time_of(profile, kLinear.name).seconds;
      });
  return rate;
}

// What the plan of time has of an operation of this kind, on that hardware.
double planned_seconds(const Program& program, std::string_view kind, const GpuModel& hardware) {
  const Program expected = program.with_expected_rows();
  for (int32_t index = 0; index < program.op_count(); ++index) {
    if (program.op(index).spec->name == kind) return seconds_of(program, expected, index, hardware);
  }
  TROUPE_CHECK(false, "an operation of the program");
  return 0;
}

struct UnderLoad {
  AttentionRate attention;
  double product_flops = 0;    // per second
  std::vector<double> ratios;  // of planned times to measured ones, of attention and its gradient
};

// Attention among products that keep the device busy, as in a step: a GPU at rest has a higher
// clock. `product` is the largest one, as it was measured alone.
UnderLoad measure_under_load(ProgramMeter& meter, const ProductRate& product, int64_t sequence,
                             const GpuModel& hardware) {
  const bool on_gpu = meter.device() == Device::cuda;
  const AttentionAttributes apart = {
      .batch = static_cast<int32_t>((on_gpu ? kTokensOfGpu : kTokens) / sequence),
      .sequence = static_cast<int32_t>(sequence),
      .heads = on_gpu ? 32 : 8,
      .groups = 8,
      .head_dim = on_gpu ? 128 : 64,
      .scale = on_gpu ? 0.088 : 0.125};
  const AttentionAttributes a = apart.fused();
  const int64_t rows = a.batch * sequence;
  const auto n = static_cast<double>(product.size);
  const double flops_of_product = 2 * n * n * n;
  const auto products =
      static_cast<int>(std::ceil(kSecondsOfLoad * product.flops_per_s / flops_of_product));
  UnderLoad under_load;
  const auto tensor = [&](const char* name, const Shape& shape) {
    return StateTensor{.name = name, .dtype = product.dtype, .shape = shape};
  };
  meter.profile(
      {tensor("x", {product.size, product.size}), tensor("w", {product.size, product.size}),
       tensor("qkv", {rows, a.query_stride()}), tensor("d_out", {rows, a.out_row()})},
      [&](Builder& builder, const std::vector<ValueId>& values) {
        for (int i = 0; i < products; ++i) linear(builder, values[0], values[1], {}, "y");
        const ValueId qkv = values[2];
        const std::vector<ValueId> out =
            builder.emit(kAttention, Attributes(a), {qkv, qkv, {}, {}, {}}, "out");
        return builder.emit(kAttentionGradient, Attributes(a),
                            {values[3], qkv, qkv, out[0], out[1], {}, {}}, "d_qkv")[0];
      },
      [&](const Program& program, const StepProfile& profile) {
        const auto rate_of = [&](const OpSpec& spec) {
          const KindTime time = time_of(profile, spec.name);
          under_load.ratios.push_back(planned_seconds(program, spec.name, hardware) / time.seconds);
          return time.flops / time.seconds;
        };
        under_load.attention = {.sequence = sequence,
                                .flops_per_s = rate_of(kAttention),
                                .gradient_flops_per_s = rate_of(kAttentionGradient)};
        under_load.product_flops =
            products * flops_of_product / time_of(profile, kLinear.name).seconds;
      });
  return under_load;
}

double geometric_mean(const std::vector<double>& values) {
  double sum = 0;
  for (const double value : values) sum += std::log(value);
  return std::exp(sum / static_cast<double>(values.size()));
}

// Between one operation and the next.
double measure_launch(ProgramMeter& meter) {
  double seconds = 0;
  meter.profile(
      {{.name = "x", .shape = {16}}},
      [](Builder& builder, const std::vector<ValueId>& values) {
        ValueId sum = values[0];
        for (int32_t i = 0; i < kSmallOperations; ++i) sum = add(builder, sum, values[0], "sum");
        return sum;
      },
      [&](const Program&, const StepProfile& profile) {
        const StepTimes times = profile.times();
        seconds = (times.seconds - times.busy_s) / kSmallOperations;
      });
  return seconds;
}

// Bytes per second between device and host, each way; on a CPU both are one memory.
double measure_host_bandwidth(ProgramMeter& meter) {
  double bandwidth = 0;
  meter.profile(
      {{.name = "x", .shape = {kCopiedElements}}},
      [](Builder& builder, const std::vector<ValueId>& values) {
        const ValueId x = add(builder, values[0], values[0], "x");
        return reload(builder, offload(builder, x, "host"), "back");
      },
      [&](const Program&, const StepProfile& profile) {
        const double seconds =
            time_of(profile, kOffload.name).seconds + time_of(profile, kReload.name).seconds;
        bandwidth = 2 * static_cast<double>(kCopiedElements * sizeof(float)) / seconds;
      });
  return bandwidth;
}

std::span<const int64_t> sequences_of(Device device) {
  if (device == Device::cuda) return kSequencesOfGpu;
  return kSequences;
}

int passes_of(Device device) {
  return device == Device::cuda ? 1 : kPassesOfCpu;
}

// Of one device.
uint64_t programs_of(Device device) {
  return static_cast<uint64_t>(passes_of(device)) * kDTypes.size() * kSizes.size() +
         sequences_of(device).size() + 3;
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

// What was measured, and estimates where nothing is known.
void set_links(Calibration& calibration) {
  constexpr double kShareOfNetwork = 0.25;
  constexpr double kLatency = 8e-6;
  constexpr double kNetworkLatency = 20e-6;
  GpuModel& hardware = calibration.hardware;
  if (!calibration.links_are_known) {
    hardware.nvlink_bandwidth = hardware.host_bandwidth;
    hardware.nvlink_latency = kLatency;
    hardware.network_bandwidth = kShareOfNetwork * hardware.host_bandwidth;
    hardware.network_latency = kNetworkLatency;
  }
  if (const auto& link = calibration.links.within_machine) {
    hardware.nvlink_bandwidth = link->bandwidth;
    hardware.nvlink_latency = link->latency;
  }
  if (const auto& link = calibration.links.across_machines) {
    hardware.network_bandwidth = link->bandwidth;
    hardware.network_latency = link->latency;
  }
}

ProductRate best_of(const Calibration& calibration, DType dtype) {
  ProductRate best;
  for (const ProductRate& rate : calibration.products) {
    if (rate.dtype == dtype && rate.flops_per_s > best.flops_per_s) best = rate;
  }
  return best;
}

// Calls done() after each program.
void calibrate_device(const DeviceSpec& spec, const std::function<void()>& done,
                      Calibration& calibration) {
  ProgramMeter meter(spec.device, 0, spec.thread_count());
  const bool on_gpu = spec.device == Device::cuda;
  set_what_it_is(spec, calibration);
  std::vector<ProductRate>& products = calibration.products;
  for (const DType dtype : kDTypes) {
    for (const int64_t size : on_gpu ? kSizesOfGpu : kSizes) {
      products.push_back({.dtype = dtype, .size = size});
    }
  }
  for (int pass = 0; pass < passes_of(spec.device); ++pass) {
    for (ProductRate& best : products) {
      const ProductRate rate = measure_product(meter, best.dtype, best.size);
      best.flops_per_s = std::max(best.flops_per_s, rate.flops_per_s);
      done();
    }
  }
  GpuModel& hardware = calibration.hardware;
  hardware.bf16_flops = best_of(calibration, DType::bf16).flops_per_s;
  hardware.f32_flops = best_of(calibration, DType::f32).flops_per_s;
  hardware.f64_flops = best_of(calibration, DType::f64).flops_per_s;
  hardware.memory_bandwidth =
      on_gpu ? measure_device_copy_limit() : measure_copy_limit(meter.pool());
  done();
  hardware.host_bandwidth = measure_host_bandwidth(meter);
  done();
  hardware.launch_seconds = measure_launch(meter);
  done();
  const ProductRate best = best_of(calibration, on_gpu ? DType::bf16 : DType::f32);
  std::vector<double> ratios;
  double product_flops = 0;
  for (const int64_t sequence : sequences_of(spec.device)) {
    const UnderLoad under_load = measure_under_load(meter, best, sequence, hardware);
    calibration.attention.push_back(under_load.attention);
    ratios.insert(ratios.end(), under_load.ratios.begin(), under_load.ratios.end());
    product_flops = std::max(product_flops, under_load.product_flops);
    done();
  }
  hardware.attention_scale *= geometric_mean(ratios);
  calibration.share_under_load = std::min(1.0, product_flops / best.flops_per_s);
}

// A rank that measures the links.
struct LinkRank {
  int32_t rank = 0;
  ProcessGroup* group = nullptr;
};

}  // namespace

std::optional<Calibration> calibrate(const DeviceSpec& spec, ProcessGroup* processes,
                                     const WorkReport& report) {
  Calibration calibration;
  uint64_t all = programs_of(spec.device);
  uint64_t finished = 0;
  const auto count = [&] {
    if (report) report(++finished, all);
  };
  if (spec.ranks > 1) {
    run_all_ranks(
        spec, processes,
        [](int32_t rank, ProcessGroup* group) {
          return std::make_unique<LinkRank>(LinkRank{.rank = rank, .group = group});
        },
        [&](const LinkRank& each) {
          if (each.rank != 0) {
            measure_links(spec, *each.group, each.rank, [] {});
            return;
          }
          all += link_programs(spec, *each.group);
          calibration.links = measure_links(spec, *each.group, 0, count);
        });
  }
  if (!leads(processes)) return std::nullopt;
  calibrate_device(spec, count, calibration);
  set_links(calibration);
  return calibration;
}

namespace {

// A line for each size, a column for each kind.
std::string text_of(std::string_view whose, const LinkCalibration& link) {
  std::vector<std::string_view> kinds;
  std::map<uint64_t, std::string> lines;  // by bytes
  for (const CollectiveTime& time : link.times) {
    if (std::find(kinds.begin(), kinds.end(), time.kind) == kinds.end()) kinds.push_back(time.kind);
    lines[time.bytes] +=
        fmt::format("{:>16}", fmt::format("{:.4g} GB/s", time.sent_bytes / time.seconds / 1e9));
  }
  std::string text =
      fmt::format("{} ranks {}, what each sends of tensors of\n{:<18}", link.ranks, whose, "");
  for (const std::string_view kind : kinds) text += fmt::format("{:>16}", kind);
  text += "\n";
  for (const auto& [bytes, line] : lines) {
    text += fmt::format("  {:<16}{}\n", format_bytes(bytes), line);
  }
  return text + fmt::format("  a link of {:.4g} GB/s, {:.1f} us for each round\n",
                            link.bandwidth / 1e9, link.latency * 1e6);
}

}  // namespace

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
  text += fmt::format("{:<18}{:>16}{:>16}\n", "attention over", "forward", "gradient");
  for (const AttentionRate& rate : calibration.attention) {
    text += fmt::format("  {:<16}{:>9.4g} TFLOP/s{:>9.4g} TFLOP/s\n",
                        fmt::format("{} tokens", rate.sequence), rate.flops_per_s / 1e12,
                        rate.gradient_flops_per_s / 1e12);
  }
  const GpuModel& hardware = calibration.hardware;
  text += fmt::format(
      "copying            {:.4g} GB/s, to or from the host {:.4g} GB/s\n"
      "between operations {:.2f} us\n"
      "under load         {:.0f} % of the best product's rate\n",
      hardware.memory_bandwidth / 1e9, hardware.host_bandwidth / 1e9, hardware.launch_seconds * 1e6,
      100 * calibration.share_under_load);
  if (calibration.links.within_machine) {
    text += text_of("of a machine", *calibration.links.within_machine);
  }
  if (calibration.links.across_machines) {
    text += text_of("of as many machines", *calibration.links.across_machines);
  }
  return text;
}

std::string file_of(const Calibration& calibration) {
  const GpuModel& gpu = calibration.hardware;
  const std::string_view unmeasured =
      calibration.links_are_known ? "as of the kind that is shipped" : "not measured: an estimate";
  const auto from = [&](const std::optional<LinkCalibration>& link) -> std::string {
    if (!link) return std::string(unmeasured);
    return fmt::format("measured: collectives of {} ranks", link->ranks);
  };
  const std::string within = from(calibration.links.within_machine);
  const std::string across = from(calibration.links.across_machines);
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
  add_number("attention_scale", gpu.attention_scale, "measured: attention over planned");
  text += fmt::format("# Products in a row have {:.3f} of their best rate.\n",
                      calibration.share_under_load);
  add_number("host_gb_s", gpu.host_bandwidth / 1e9, "measured: copies from and to the host");
  add_number("gpus_per_node", gpu.gpus_per_node, "of this machine");
  add_number("gpus_per_nvlink", gpu.gpus_per_nvlink, unmeasured);
  add_number("nvlink_gb_s", gpu.nvlink_bandwidth / 1e9, within);
  add_number("nvlink_latency_us", gpu.nvlink_latency * 1e6, within);
  add_number("network_gb_s", gpu.network_bandwidth / 1e9, across);
  add_number("network_latency_us", gpu.network_latency * 1e6, across);
  add_number("launch_us", gpu.launch_seconds * 1e6, "measured: small operations in a row");
  return text;
}

}  // namespace troupe
