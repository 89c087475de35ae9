// `troupe inspect`: the program of a step, as text, as JSON or as a page.
#include <algorithm>
#include <array>
#include <cstdio>
#include <fmt/format.h>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <unistd.h>

#include "cli/command.h"
#include "cli/inspect_passes.h"
#include "options/device_options.h"
#include "options/model_options.h"
#include "options/step_spec.h"
#include "passes/inference_programs.h"
#include "passes/memory_plan.h"
#include "passes/step_programs.h"
#include "plan/exposure.h"
#include "plan/kernel_variants.h"
#include "plan/link_traffic.h"
#include "plan/memory_chart.h"
#include "plan/print.h"
#include "program/op_spec.h"
#include "program/verify.h"
#include "report/page.h"
#include "report/step_page.h"
#include "runtime/device_memory.h"
#include "train/interrupt.h"
#include "train/terminal.h"

namespace troupe {
namespace {

using nlohmann::ordered_json;

constexpr int kChartWidth = 79;
constexpr int kChartMargin = 14;           // before the bars
constexpr int kColumnsOfWholeLines = 150;  // of a terminal

struct Inspected {
  std::unique_ptr<Program> program;
  MemoryPlan plan;
  std::vector<std::string> kernels;                    // by operation; of a CPU empty
  std::array<int32_t, kRankGroupCount> group_ranks{};  // of the rank's groups
};

std::vector<std::string> kernels_of(const Program& program, const Options& options) {
  if (options.device == Device::cpu) return {};
  return variants_of_operations(program, planned_traits());
}

bool is_training(const Options& options) {
  return options.program == ProgramKind::train;
}

MemoryPlan plan_of(const Program& program, const Options& options) {
  const int threads = device_spec_of(options).threads_per_rank();
  return options.oracle ? plan_oracle(program, threads, options.device, planned_traits())
                        : plan_memory(program, threads, options.device, planned_traits());
}

// `watch`: of the passes of a training step.
Inspected build(const Options& options, const ModelConfig& config,
                const decltype(PassControls::watch)& watch = {}) {
  const bool training = is_training(options);
  StepSpec spec = step_spec_of(options, config);
  const ModelState state =
      declare_model_state(config, spec.dtype, training, {.run = spec.layout, .rank = options.rank});
  TrainingStepOptions& step = spec.options;
  step.passes.watch = watch;
  Inspected inspected;
  inspected.program = training ? build_training_step(config, state, step).program
                               : build_evaluation_step(config, state, step.micro_batch_size,
                                                       step.sequence, step.loss_chunk_tokens,
                                                       step.reset_attention_mask, step.precision)
                                     .program;
  verify_program(*inspected.program);
  inspected.plan = plan_of(*inspected.program, options);
  verify_memory_plan(*inspected.program, inspected.plan);
  inspected.kernels = kernels_of(*inspected.program, options);
  for (size_t i = 0; i < inspected.group_ranks.size(); ++i) {
    const auto members = state.part.layout().members(static_cast<RankGroup>(i), options.rank);
    inspected.group_ranks[i] = static_cast<int32_t>(members.size());
  }
  return inspected;
}

// A filter that can match nothing is a mistake.
PrintOptions filters_of(const Options& options, const ModelConfig& config) {
  if (options.layer && *options.layer >= config.all_layers()) {
    throw_bad_request(fmt::format("--layer {}: the model has layers 0 to {}.", *options.layer,
                                  config.all_layers() - 1));
  }
  if (options.micro_batch) {
    if (!is_training(options)) {
      throw_bad_request("--micro-batch: only the program of a training step has micro-batches.");
    }
    const int32_t micro_batches = training_step_options(options, config).micro_batches;
    if (*options.micro_batch >= micro_batches) {
      throw_bad_request(
          fmt::format("--micro-batch {}: the step has micro-batches 0 to {} (--global-batch-size).",
                      *options.micro_batch, micro_batches - 1));
    }
  }
  PrintOptions filters;
  filters.layer = options.layer;
  filters.micro_batch = options.micro_batch;
  filters.phase = options.phase;
  return filters;
}

ordered_json index_or_null(int32_t index) {
  return index >= 0 ? ordered_json(index) : ordered_json();
}

ordered_json shape_json(const Shape& shape) {
  ordered_json extents = ordered_json::array();
  for (int i = 0; i < shape.rank(); ++i) extents.push_back(shape[i]);
  return extents;
}

ordered_json value_json(const Program& program, ValueId id) {
  const Value& value = program.value(id);
  ordered_json json = {{"id", id.index},
                       {"name", value.name},
                       {"role", name_of(value.role)},
                       {"dtype", name_of(value.dtype)},
                       {"shape", shape_json(value.shape)},
                       {"bytes", value.bytes()}};
  if (value.rows.valid()) {
    json["rows"] = {{"counter", value.rows.counter.index}, {"element", value.rows.element}};
  }
  return json;
}

// `expected`: the program with as many rows as are expected.
ordered_json op_json(const Inspected& inspected, const Program& expected, int32_t index) {
  const Program& program = *inspected.program;
  const Op& op = program.op(index);
  ordered_json inputs = ordered_json::array();
  for (const ValueId id : program.inputs(op)) inputs.push_back(index_or_null(id.index));
  ordered_json outputs = ordered_json::array();
  ordered_json shapes = ordered_json::array();
  uint64_t bytes = 0;
  for (const ValueId id : program.outputs(op)) {
    outputs.push_back(id.index);
    shapes.push_back(shape_json(program.value(id).shape));
    bytes += program.value(id).bytes();
  }
  ordered_json json = {{"index", index},
                       {"kind", op.spec->name},
                       {"phase", name_of(op.place.phase)},
                       {"queue", name_of(op.place.queue)},
                       {"layer", index_or_null(op.place.layer)},
                       {"micro_batch", index_or_null(op.place.micro_batch)},
                       {"recompute_of", index_or_null(op.place.recompute_of)},
                       {"inputs", std::move(inputs)},
                       {"outputs", std::move(outputs)},
                       {"shapes", std::move(shapes)},
                       {"bytes", bytes},
                       {"live_bytes", inspected.plan.live_bytes[static_cast<size_t>(index)]}};
  json["workspace_bytes"] = op.workspace.valid() ? program.value(op.workspace).bytes() : 0;
  if (!inspected.kernels.empty()) {
    json["kernel"] = inspected.kernels[static_cast<size_t>(index)];
  }
  if (op.spec->print_attributes != nullptr) {
    json["attributes"] = op.spec->print_attributes(op.attributes);
  }
  if (op.spec->cost != nullptr) {
    const Cost cost = op.spec->cost(OpView{expected, op});
    json["flops"] = cost.flops;
    if (cost.product_flops > 0) {
      json["products"] = {{"flops", cost.product_flops}, {"dtype", name_of(cost.product_dtype)}};
    }
    json["traffic_bytes"] = cost.bytes;
  }
  if (op.spec->links != nullptr) {
    const RankGroup group = op.spec->group(op.attributes);
    const LinkTraffic sent =
        link_traffic(OpView{expected, op}, inspected.group_ranks[static_cast<size_t>(group)]);
    json["link"] = {{"group", name_of(group)}, {"bytes", sent.bytes}, {"messages", sent.messages}};
  }
  return json;
}

void print_json(const Options& options, const Inspected& inspected, const PrintOptions& filters) {
  const Program& program = *inspected.program;
  const Program expected = program.with_expected_rows();
  ordered_json operations = ordered_json::array();
  for (int32_t index = 0; index < program.op_count(); ++index) {
    if (!is_shown(program.op(index).place, filters)) continue;
    operations.push_back(op_json(inspected, expected, index));
  }
  ordered_json values = ordered_json::array();
  for (int32_t i = 0; i < program.value_count(); ++i) {
    values.push_back(value_json(program, ValueId{i}));
  }
  const MemoryPlan& plan = inspected.plan;
  ordered_json bytes;
  for (int role = 0; role < kRoleCount; ++role) {
    bytes[std::string(name_of(static_cast<Role>(role)))] =
        plan.bytes_by_role[static_cast<size_t>(role)];
  }
  bytes["total"] = plan.total_bytes();
  ordered_json host_bytes;
  for (const Role role : {Role::optimizer, Role::offloaded}) {
    host_bytes[std::string(name_of(role))] = plan.host_bytes_by_role[static_cast<size_t>(role)];
  }
  const ordered_json document = {{"program", value_text(options, "program")},
                                 {"operations", std::move(operations)},
                                 {"values", std::move(values)},
                                 {"plan",
                                  {{"bytes", std::move(bytes)},
                                   {"host_bytes", std::move(host_bytes)},
                                   {"state_bytes", plan.state_bytes},
                                   {"persistent_bytes", plan.persistent_bytes},
                                   {"transient_bytes", plan.transient_bytes},
                                   {"scratch_bytes", plan.scratch_bytes()},
                                   {"largest_live_bytes", plan.largest_live_bytes},
                                   {"threads", plan.threads}}}};
  fmt::print("{}\n", document.dump());
}

// --html
void write_step_page(const Options& options, const Inspected& inspected,
                     const PrintOptions& filters) {
  const std::string title = fmt::format(
      "{}: {}{}", options.model.empty() ? "Model of flags" : options.model,
      is_training(options) ? "training step" : "evaluation step",
      options.ranks > 1 ? fmt::format(", rank {} of {}", options.rank, options.ranks) : "");
  Options shown = options;
  shown.html.clear();
  shown.measured.clear();
  ordered_json document =
      step_json({.program = *inspected.program,
                 .plan = inspected.plan,
                 .oracle = options.oracle,
                 .title = title,
                 .command = fmt::format("troupe inspect {}", fmt::join(changed_flags(shown), " ")),
                 .text = print_program(*inspected.program, filters)});
  for (const std::string& path : options.measured) {
    document["measured"].update(measured_json(*inspected.program, path, options.rank));
  }
  write_page(PageKind::step, options.html, "--html", make_page(PageKind::step, title, document));
  fmt::print("The page: {}\n", options.html);
}

// --passes
void print_passes(const Options& options, const ModelConfig& config) {
  PassTable table([&](const Program& program) { return plan_of(program, options).total_bytes(); });
  build(options, config,
        [&](const PassRecord& record, const Program& program) { table.add(record, program); });
  std::fputs((options.json ? table.json() : table.text()).c_str(), stdout);
}

// --dump-after: what the program was after the pass.
Inspected build_up_to(const Options& options, const ModelConfig& config) {
  if (!options.dump_after) return build(options, config);
  std::optional<Inspected> found;
  const Inspected whole =
      build(options, config, [&](const PassRecord& record, const Program& program) {
        if (record.id != options.dump_after) return;
        found = Inspected{std::make_unique<Program>(program),
                          plan_of(program, options),
                          kernels_of(program, options),
                          {}};
      });
  if (!found) {
    throw_bad_request(
        fmt::format("--dump-after {}: this step does not need the pass, or it is "
                    "skipped. --passes lists those that run.",
                    name_of(*options.dump_after)));
  }
  found->group_ranks = whole.group_ranks;
  return std::move(*found);
}

}  // namespace

ExitStatus run_inspect(const Options& options) {
  end_at_once_when_interrupted(/*quiet=*/false);
  const ModelConfig config = load_model_config(options);
  PrintOptions filters = filters_of(options, config);
  if ((options.passes || options.dump_after) && !is_training(options)) {
    throw_bad_request("--passes and --dump-after: only the program of a training step has passes.");
  }
  if (!options.html.empty() && (options.json || options.passes)) {
    throw_bad_request("--html writes a page: leave out --json and --passes.");
  }
  if (!options.measured.empty() && options.html.empty()) {
    throw_bad_request("--measured is shown on a page: add --html FILE.");
  }
  if (options.passes) {
    if (options.dump_after || filters.layer || filters.micro_batch || filters.phase) {
      throw_bad_request(
          "--passes lists passes and no operations: leave out --dump-after, --layer, "
          "--micro-batch and --phase.");
    }
    print_passes(options, config);
    return ExitStatus::done;
  }
  if (!options.html.empty()) check_page_path(PageKind::step, options.html, "--html");
  const Inspected inspected = build_up_to(options, config);
  if (options.json) {
    print_json(options, inspected, filters);
    return ExitStatus::done;
  }
  filters.live_bytes = inspected.plan.live_bytes;
  filters.kernels = inspected.kernels;
  filters.bytes_by_role = inspected.plan.bytes_by_role;
  filters.host_bytes_by_role = inspected.plan.host_bytes_by_role;
  if (!options.html.empty()) {
    write_step_page(options, inspected, filters);
    return ExitStatus::done;
  }
  const int columns = terminal_columns(STDOUT_FILENO);
  filters.is_narrow = columns > 0 && columns < kColumnsOfWholeLines;
  std::string text = fit_lines(print_program(*inspected.program, filters), columns);
  if (!filters.layer && !filters.micro_batch && !filters.phase) {
    const std::string chart = draw_live_bytes(
        *inspected.program, inspected.plan.live_bytes,
        columns > 0 ? std::clamp(columns - kChartMargin, 1, kChartWidth) : kChartWidth);
    text += "\n" + fit_lines(chart, columns);
    const std::string exchange = text_of(measure_exposure(*inspected.program));
    if (!exchange.empty()) text += "\nexpert exchange: " + exchange + "\n";
  }
  std::fputs(text.c_str(), stdout);
  return ExitStatus::done;
}

}  // namespace troupe
