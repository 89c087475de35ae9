#include "train/fp8_module_choice.h"

#include <algorithm>
#include <array>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <set>
#include <string_view>
#include <vector>

#include "ops/precision/quantize_activation/quantize_activation.h"
#include "ops/precision/transpose_codes/transpose_codes.h"
#include "options/cluster_options.h"
#include "options/model_options.h"
#include "options/precision_options.h"
#include "options/step_spec.h"
#include "passes/step_programs.h"
#include "plan/kernel_rates.h"
#include "runtime/device_memory.h"
#include "train/short_step.h"

namespace troupe {
namespace {

using GroupTimes = std::array<double, kProductGroupCount>;

bool is_product(const Op& op) {
  return op.spec->quantized != nullptr || std::string_view(op.spec->name).starts_with("quantized_");
}

// What makes operands of products: quantisation, and activations, as the two may be one operation.
bool makes_operands(const Op& op) {
  constexpr std::array kKinds = {&kQuantize,           &kBlockAmax,  &kTransposeCodes,
                                 &kQuantizeActivation, &kActivation, &kQuantizeActivationGradient,
                                 &kActivationGradient};
  return std::find(kKinds.begin(), kKinds.end(), op.spec) != kKinds.end();
}

// Seconds of products and of what makes their operands, which those that read these share.
GroupTimes times_of(const Program& program, const GpuModel& gpu) {
  std::vector<std::set<ProductGroup>> readers(static_cast<size_t>(program.value_count()));
  const Program expected = program.with_expected_rows();
  GroupTimes times{};
  for (int32_t index = program.op_count() - 1; index >= 0; --index) {
    const Op& op = program.op(index);
    std::set<ProductGroup> groups;
    if (is_product(op)) {
      groups.insert(product_group(op.place.module));
    } else if (makes_operands(op)) {
      for (const ValueId id : program.outputs(op)) {
        const auto& own = readers[static_cast<size_t>(id.index)];
        groups.insert(own.begin(), own.end());
      }
    }
    for (const ValueId id : program.inputs(op)) {
      if (id.valid()) readers[static_cast<size_t>(id.index)].insert(groups.begin(), groups.end());
    }
    const double seconds = groups.empty() ? 0 : seconds_of(program, expected, index, gpu);
    for (const ProductGroup group : groups) {
      times[static_cast<size_t>(group)] += seconds / static_cast<double>(groups.size());
    }
  }
  return times;
}

// Of the first place of the pipeline and of one in its middle: all kinds of layers are there.
std::set<int32_t> planned_ranks(const Layout& layout) {
  return {layout.rank_of(DensePlace{.pp = 0}), layout.rank_of(DensePlace{.pp = layout.pp() / 2})};
}

ProductTimes times_of_step(const Options& options, const ModelConfig& config, const GpuModel& gpu) {
  StepSpec spec = step_spec_of(options, config);
  ProductTimes times;
  for (const int32_t rank : planned_ranks(spec.layout->layout)) {
    const ModelState state = spec.state_of(rank);
    for (const bool in_8_bits : {true, false}) {
      TrainingStepOptions step = spec.options;
      if (!in_8_bits) step.precision.recipe = Fp8Recipe::none;
      const GroupTimes own = times_of(*build_training_step(config, state, step).program, gpu);
      GroupTimes& sums = in_8_bits ? times.in_8_bits : times.plain;
      for (size_t i = 0; i < own.size(); ++i) sums[i] += own[i];
    }
  }
  return times;
}

// Times grow by the same with each round of micro-batches, except for weights, which are quantised
// once a step.
GroupTimes extrapolate(const GroupTimes& one, const GroupTimes& two, double rounds) {
  GroupTimes times{};
  for (size_t i = 0; i < times.size(); ++i) times[i] = one[i] + (two[i] - one[i]) * (rounds - 1);
  return times;
}

}  // namespace

ProductTimes time_products(const Options& options, const ModelConfig& config, const GpuModel& gpu) {
  const int32_t micro_batches = training_step_options(options, config).micro_batches;
  const double rounds = static_cast<double>(micro_batches) / micro_batches_of_round(options);
  const auto times_of_rounds = [&](int32_t count) {
    return times_of_step(with_few_micro_batches(options, micro_batches, count), config, gpu);
  };
  const ProductTimes one = times_of_rounds(1);
  if (rounds <= 1) return one;
  const ProductTimes two = times_of_rounds(kFullRounds);
  // Less than two rounds are what they are.
  const double share = std::max(2.0, rounds);
  return {.plain = extrapolate(one.plain, two.plain, share),
          .in_8_bits = extrapolate(one.in_8_bits, two.in_8_bits, share)};
}

Options with_fp8_modules(Options options, const ModelConfig& config,
                         const std::optional<GpuModel>& gpu) {
  if (!gpu || !options.fp8_format || !leaves_fp8_modules_open(options.fp8_modules)) return options;
  const ProductTimes times = time_products(options, config, *gpu);
  std::vector<std::string> faster;
  bool are_all = true;
  for (const ProductGroup group : kProductGroups) {
    const auto i = static_cast<size_t>(group);
    if (times.in_8_bits[i] < times.plain[i]) {
      faster.emplace_back(name_of(group));
    } else if (times.plain[i] > 0) {
      are_all = false;
    }
  }
  if (are_all) {
    faster = {"all"};
  } else if (faster.empty()) {
    faster = {"none"};
  }
  options.fp8_modules = faster;
  return options;
}

std::string note_on_fp8_modules(const Options& asked, const Options& chosen) {
  const std::vector<std::string>& modules = chosen.fp8_modules;
  if (modules == asked.fp8_modules || modules.front() == "all") return "";
  if (modules.front() == "none") {
    return fmt::format(
        "Note: no product is in 8 bits: by the plan of this step all are faster in {} "
        "(--fp8-modules).",
        name_of(chosen.compute_dtype));
  }
  return fmt::format(
      "Note: products in 8 bits: {}. By the plan of this step all others are faster in {} "
      "(--fp8-modules).",
      fmt::join(modules, ", "), name_of(chosen.compute_dtype));
}

std::optional<GpuModel> figures_of_gpu(const Options& options) {
  if (options.device != Device::cuda || options.hardware == kNoHardware) return std::nullopt;
  if (const std::optional<GpuCluster> cluster = gpu_cluster_of(options)) return cluster->model;
  return hardware_of_machine(options.hardware,
                             why_no_gpu().empty() ? std::optional(0) : std::nullopt);
}

}  // namespace troupe
