#include "options/cluster_options.h"

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <numeric>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "base/text.h"
#include "options/expert_load_options.h"
#include "options/shipped_files.h"
#include "options/suggest.h"
#include "options/toml_file.h"
#include "runtime/device_memory.h"

namespace troupe {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kMostGpus = 131'072;
constexpr double kLeastShare = 0.9;  // of a GPU's memory, that a run can use

struct Asked {
  std::optional<int64_t> count;
  std::string kind;
};

// "64xh100"; without a number all of it is the kind.
Asked split_count(const std::string& text) {
  int64_t count = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), count);
  const bool has_count = end != text.data() && end != text.data() + text.size() && *end == 'x';
  if (!has_count) return {.count = std::nullopt, .kind = text};
  // A number that is too large is refused with the others.
  return {.count = error == std::errc() ? count : kMostGpus + 1, .kind = std::string(end + 1)};
}

// `before_kind`: how a value of the flag begins.
std::string path_of_kind(const std::string& kind, std::string_view flag,
                         const std::string& before_kind) {
  std::error_code error;
  if (kind.ends_with(".toml") && fs::exists(kind, error)) return kind;
  std::vector<std::string> names;
  for (const fs::path& path : shipped_files("gpus", ".toml")) {
    if (path.stem() == kind) return path.string();
    names.push_back(path.stem().string());
  }
  const std::vector<std::string_view> views(names.begin(), names.end());
  const std::string_view guess = closest(kind, views);
  throw_bad_request(fmt::format(
      "{}: there is no kind of GPU {}, nor a file of that name.{} Kinds: {}; or a file like "
      "configs/gpus/h100.toml.",
      flag, quote_name(kind),
      guess.empty() ? "" : fmt::format(" Did you mean {} {}{}?", flag, before_kind, guess),
      names.empty() ? "none are installed beside this program"
                    : fmt::format("{}", fmt::join(names, ", "))));
}

// The numbers and names of a file, each of which must be used.
class GpuFile {
 public:
  explicit GpuFile(std::string path) : path_(std::move(path)), table_(read_toml_file(path_)) {}

  double number(const char* key, double least, double most) {
    const toml::node* node = find(key);
    const std::optional<double> value = node->value<double>();
    if (!value || !(*value >= least && *value <= most)) {
      throw_bad_request(fmt::format("{}:{}: {} takes a number from {} to {}.", path_,
                                    node->source().begin.line, key, least, most));
    }
    return *value;
  }

  int32_t count(const char* key, int32_t most, int32_t least = 1) {
    const double value = number(key, least, most);
    if (value == static_cast<int32_t>(value)) return static_cast<int32_t>(value);
    throw_bad_request(fmt::format("{}:{}: {} takes a whole number.", path_,
                                  table_.get(key)->source().begin.line, key));
  }

  template <class T>
  T value(const char* key, const char* what) {
    const toml::node* node = find(key);
    if (const std::optional<T> value = node->value_exact<T>()) return *value;
    throw_bad_request(
        fmt::format("{}:{}: {} takes {}.", path_, node->source().begin.line, key, what));
  }

  std::optional<double> optional_number(const char* key, double least, double most) {
    if (!table_.contains(key)) return std::nullopt;
    return number(key, least, most);
  }

  std::optional<int32_t> optional_count(const char* key, int32_t most) {
    if (!table_.contains(key)) return std::nullopt;
    return count(key, most);
  }

  void refuse_others() const {
    const std::vector<std::string_view> known(used_.begin(), used_.end());
    for (auto&& [key, node] : table_) {
      if (std::find(known.begin(), known.end(), key.str()) != known.end()) continue;
      const std::string_view guess = closest(key.str(), known);
      throw_bad_request(fmt::format("{}:{}: there is no figure {} of a GPU.{}", path_,
                                    node.source().begin.line, quote_name(key.str()),
                                    guess.empty()
                                        ? fmt::format(" There are: {}.", fmt::join(known, ", "))
                                        : fmt::format(" Did you mean {}?", guess)));
    }
  }

 private:
  const toml::node* find(const char* key) {
    used_.emplace_back(key);
    const toml::node* node = table_.get(key);
    if (node != nullptr) return node;
    std::vector<std::string_view> given;
    for (auto&& [name, value] : table_) given.push_back(name.str());
    const std::string_view guess = closest(key, given);
    throw_bad_request(fmt::format(
        "{}: {} is missing{} A file of a GPU has all figures of configs/gpus/h100.toml; copy that "
        "and change it.",
        path_, key, guess.empty() ? "." : fmt::format("; is {} meant for it?", quote_name(guess))));
  }

  std::string path_;
  toml::table table_;
  std::vector<std::string> used_;
};

GpuCluster read_cluster(const std::string& path) {
  GpuFile file(path);
  GpuCluster cluster;
  cluster.gpus = file.optional_count("gpus", static_cast<int32_t>(kMostGpus)).value_or(0);
  GpuModel& model = cluster.model;
  model.name = printable(file.value<std::string>("name", "text in quotes"));
  model.measured = file.value<bool>("measured", "true or false");
  model.traits.compute_capability = file.count("compute_capability", 999, kNoGpu);
  model.traits.multiprocessors = file.count("multiprocessors", 10'000);
  const auto scaled = [&](const char* key, double least, double most, double unit) {
    return file.number(key, least, most) * unit;
  };
  model.memory_bytes = static_cast<uint64_t>(scaled("memory_gib", 1, 1e5, 0x1p30));
  model.bf16_flops = scaled("bf16_tflops", 1e-3, 1e6, 1e12);
  model.f32_flops = scaled("fp32_tflops", 1e-3, 1e6, 1e12);
  model.f64_flops = scaled("fp64_tflops", 1e-3, 1e6, 1e12);
  model.attention_scale = file.optional_number("attention_scale", 1e-3, 1e3).value_or(1);
  model.memory_bandwidth = scaled("memory_gb_s", 1, 1e6, 1e9);
  model.host_bandwidth = scaled("host_gb_s", 0.1, 1e6, 1e9);
  model.gpus_per_node = file.count("gpus_per_node", 1024);
  model.gpus_per_nvlink = file.count("gpus_per_nvlink", 4096);
  model.nvlink_bandwidth = scaled("nvlink_gb_s", 0.1, 1e6, 1e9);
  model.nvlink_latency = scaled("nvlink_latency_us", 0, 1e6, 1e-6);
  model.network_bandwidth = scaled("network_gb_s", 0.01, 1e6, 1e9);
  model.network_latency = scaled("network_latency_us", 0, 1e6, 1e-6);
  model.launch_seconds = scaled("launch_us", 0, 1e6, 1e-6);
  model.storage_bandwidth = file.optional_number("storage_gb_s", 1e-3, 1e6).value_or(0) * 1e9;
  file.refuse_others();
  if (model.gpus_per_nvlink % model.gpus_per_node != 0) {
    throw_bad_request(fmt::format(
        "{}: gpus_per_nvlink {} is no multiple of gpus_per_node {}. NVLink joins whole nodes: {}.",
        path, model.gpus_per_nvlink, model.gpus_per_node,
        model.gpus_per_node *
            std::max(1, (model.gpus_per_nvlink + model.gpus_per_node / 2) / model.gpus_per_node)));
  }
  return cluster;
}

// Two numbers next to `count` that are multiples of `unit`, as words.
std::string nearest_multiples(int64_t count, int64_t unit, const std::string& kind) {
  const int64_t below = count / unit * unit;
  const std::string above = fmt::format("--gpus {}x{}", below + unit, kind);
  return below == 0 ? above : fmt::format("--gpus {}x{} or {}", below, kind, above);
}

// GPUs of one replica of the model by both meshes.
int64_t gpus_of_replica(const Options& options) {
  const int64_t pipeline = options.pipeline_model_parallel_size;
  const int64_t tensor = options.tensor_model_parallel_size;
  const int64_t dense = tensor * options.context_parallel_size * pipeline;
  const int64_t expert = options.expert_tensor_parallel_size.value_or(1) *
                         int64_t{options.expert_model_parallel_size} * pipeline;
  return std::lcm(dense, expert);
}

}  // namespace

std::optional<GpuCluster> gpu_cluster_of(const Options& options) {
  if (options.gpus.empty()) return std::nullopt;
  const Asked asked = split_count(options.gpus);
  const int64_t about = std::clamp<int64_t>(asked.count.value_or(8), 1, kMostGpus);
  GpuCluster cluster = read_cluster(path_of_kind(asked.kind, "--gpus", fmt::format("{}x", about)));
  if (!asked.count && cluster.gpus == 0) {
    throw_bad_request(
        fmt::format("--gpus {}: it does not say how many. For one node: --gpus {}x{}.",
                    printable(asked.kind), cluster.model.gpus_per_node, printable(asked.kind)));
  }
  const int64_t gpus = asked.count.value_or(cluster.gpus);
  const int64_t node = cluster.model.gpus_per_node;
  const std::string kind = printable(asked.kind);
  if (gpus < 1 || gpus > kMostGpus) {
    throw_bad_request(fmt::format("--gpus: a cluster has 1 to {} GPUs. The nearest: --gpus {}x{}.",
                                  kMostGpus, gpus < 1 ? 1 : kMostGpus, kind));
  }
  if (gpus > node && gpus % node != 0) {
    throw_bad_request(
        fmt::format("--gpus {}x{}: nodes of it have {} GPUs each, and all are used. "
                    "The nearest: {}.",
                    gpus, kind, node, nearest_multiples(gpus, node, kind)));
  }
  cluster.gpus = static_cast<int32_t>(gpus);
  return cluster;
}

std::optional<GpuCluster> gpu_cluster_of(const Options& options, const ModelConfig& config) {
  std::optional<GpuCluster> cluster = gpu_cluster_of(options);
  if (cluster) cluster->expert_load = expert_load_of(options, config);
  return cluster;
}

void apply_gpus(Options& options) {
  const std::optional<GpuCluster> cluster = gpu_cluster_of(options);
  if (!cluster) return;
  if (was_given(options, "ranks") && options.ranks != cluster->gpus) {
    throw_bad_request(
        fmt::format("--ranks {} and --gpus {}: each GPU has one rank, so there are "
                    "{}. Leave --ranks out.",
                    options.ranks, printable(options.gpus), cluster->gpus));
  }
  if (was_given(options, "device") && options.device != Device::cuda) {
    throw_bad_request("--gpus and --device cpu contradict each other. Leave --device out.");
  }
  if (options.ranks_per_gpu > 1) {
    throw_bad_request("--gpus: each GPU of a plan has one rank. Leave --ranks-per-gpu out.");
  }
  const int64_t replica = gpus_of_replica(options);
  if (cluster->gpus % replica != 0) {
    const int64_t node = cluster->model.gpus_per_node;
    const int64_t unit = replica < node && node % replica == 0 ? replica : std::lcm(replica, node);
    const std::optional<int32_t>& etp = options.expert_tensor_parallel_size;
    const std::string expert_slices = etp ? fmt::format("ETP {} x ", *etp) : "";
    throw_bad_request(fmt::format(
        "--gpus {}: the layout needs a multiple of {} GPUs (TP {} x CP {} x PP {}; experts {}EP {} "
        "x PP {}). The nearest: {}.",
        printable(options.gpus), replica, options.tensor_model_parallel_size,
        options.context_parallel_size, options.pipeline_model_parallel_size, expert_slices,
        options.expert_model_parallel_size, options.pipeline_model_parallel_size,
        nearest_multiples(cluster->gpus, unit, printable(split_count(options.gpus).kind))));
  }
  options.device = Device::cuda;
  options.ranks = cluster->gpus;
  options.fake_process_group = true;
}

std::string with_gpus(const std::string& gpus, int64_t count) {
  return fmt::format("{}x{}", count, split_count(gpus).kind);
}

GpuModel hardware_of(const std::string& name) {
  return read_cluster(path_of_kind(name, "--hardware", "")).model;
}

std::optional<GpuModel> hardware_like(const DeviceTraits& traits, uint64_t bytes) {
  for (const fs::path& path : shipped_files("gpus", ".toml")) {
    const GpuModel model = read_cluster(path.string()).model;
    const double share = static_cast<double>(model.memory_bytes) / static_cast<double>(bytes);
    if (model.traits == traits && share > kLeastShare && share <= 1) return model;
  }
  return std::nullopt;
}

std::optional<GpuModel> hardware_of_machine(const std::string& name, std::optional<int> gpu) {
  if (name == kNoHardware) return std::nullopt;
  if (!name.empty()) return hardware_of(name);
  if (!gpu) return std::nullopt;
  return hardware_like(device_traits(*gpu), total_device_bytes(*gpu));
}

DeviceTraits planned_traits_of(const Options& options) {
  const std::optional<GpuCluster> cluster = gpu_cluster_of(options);
  return cluster ? cluster->model.traits : planned_traits();
}

uint64_t usable_gpu_bytes(const Options& options) {
  if (const std::optional<GpuCluster> cluster = gpu_cluster_of(options)) {
    return cluster->model.memory_bytes;
  }
  return why_no_gpu().empty() ? available_device_bytes() : 0;
}

}  // namespace troupe
