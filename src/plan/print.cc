#include "plan/print.h"

#include <algorithm>
#include <array>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <map>
#include <tuple>
#include <vector>

#include "base/units.h"
#include "program/op_spec.h"

namespace troupe {
namespace {

constexpr int kPhaseCount = static_cast<int>(Phase::optimizer) + 1;

// A block of the nesting step > micro-batch > layer.
struct Block {
  int32_t micro_batch = -1;
  int32_t layer = -1;
  auto operator<=>(const Block&) const = default;
};

Block block_of(const Place& place) {
  return {place.micro_batch, place.layer};
}

// Finds the text by which a value is called at a place.
class Names {
 public:
  explicit Names(const Program& program)
      : program_(program),
        home_(static_cast<size_t>(program.value_count())),
        number_(static_cast<size_t>(program.value_count()), 1) {
    find_homes();
    for (int32_t i = 0; i < program.value_count(); ++i) {
      const auto index = static_cast<size_t>(i);
      const Value& value = program.value(ValueId{i});
      if (value.role == Role::workspace) continue;
      number_[index] = ++count_[{value.name, home_[index]}];
    }
  }

  std::string text(ValueId id, const Place& place) const {
    if (!id.valid()) return "-";
    const Value& value = program_.value(id);
    const Block here = block_of(place);
    if (is_state(value.role) && here.layer >= 0) {
      std::string local = without(value.name, fmt::format("layers.{}.", here.layer));
      if (local != value.name && !resolve(local, here)) return local;
    }
    const auto index = static_cast<size_t>(id.index);
    std::string text = value.name;
    if (number_[index] > 1) text += fmt::format("#{}", number_[index]);
    const Block home = home_[index];
    if (resolve(value.name, here) != home) text += "@" + qualifier(home, here);
    return text;
  }

 private:
  // Values live in the block of the operation that defines them. State and metrics belong to the
  // step, an input to the smallest block around the operations that use it.
  void find_homes() {
    std::vector<bool> seen(home_.size(), false);
    for (int32_t index = 0; index < program_.op_count(); ++index) {
      const Op& op = program_.op(index);
      const Block block = block_of(op.place);
      for (const ValueId id : program_.inputs(op)) {
        if (!id.valid() || program_.value(id).role != Role::input) continue;
        Block& home = home_[static_cast<size_t>(id.index)];
        if (!seen[static_cast<size_t>(id.index)]) home = block;
        if (home.micro_batch != block.micro_batch) home.micro_batch = -1;
        if (home.layer != block.layer) home.layer = -1;
        seen[static_cast<size_t>(id.index)] = true;
      }
      for (const ValueId id : program_.outputs(op)) {
        if (!is_persistent(program_.value(id).role)) home_[static_cast<size_t>(id.index)] = block;
      }
    }
  }

  // The block that a plain name means at `here`.
  std::optional<Block> resolve(const std::string& name, Block here) const {
    for (const Block block : {here, Block{here.micro_batch, -1}, Block{-1, here.layer}, Block{}}) {
      if (count_.contains({name, block})) return block;
    }
    return std::nullopt;
  }

  static std::string qualifier(Block home, Block here) {
    if (home.layer >= 0 && home.micro_batch == here.micro_batch) {
      return fmt::format("L{}", home.layer);
    }
    std::string text = home.micro_batch >= 0 ? fmt::format("mb{}", home.micro_batch) : "step";
    if (home.layer >= 0) text += fmt::format(".L{}", home.layer);
    return text;
  }

  static std::string without(std::string text, const std::string& part) {
    const size_t position = text.find(part);
    return position == std::string::npos ? text : text.erase(position, part.size());
  }

  const Program& program_;
  std::vector<Block> home_;      // by value
  std::vector<int32_t> number_;  // by value: the how-manieth of its name in its block, from 1
  std::map<std::pair<std::string, Block>, int32_t> count_;
};

bool contains(std::span<const ValueId> ids, ValueId id) {
  return std::find(ids.begin(), ids.end(), id) != ids.end();
}

// The parts of one line that vary in width.
struct Statement {
  std::string left;   // "a, b"
  std::string verb;   // "=", "<-" or "+="
  std::string right;  // "kind(x, y) {attributes}"
  std::string types;
};

// Long lists of inputs (the norm of all gradients) keep their first three and their last.
constexpr size_t kMostInputs = 16;
constexpr size_t kKeptInputs = 3;

std::string inputs_text(const Program& program, const Op& op, const Names& names) {
  std::vector<ValueId> inputs;
  for (const ValueId id : program.inputs(op)) {
    if (!contains(program.outputs(op), id)) inputs.push_back(id);
  }
  while (!inputs.empty() && !inputs.back().valid()) inputs.pop_back();
  std::vector<std::string> texts;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (inputs.size() > kMostInputs && i == kKeptInputs) {
      i = inputs.size() - 1;
      texts.push_back(fmt::format("... {} more ...", i - kKeptInputs));
    }
    texts.push_back(names.text(inputs[i], op.place));
  }
  return fmt::format("{}", fmt::join(texts, ", "));
}

// A main gradient or metric is stored at its first appearance in a program and added to afterwards.
bool is_sum(const Value& value, Phase phase) {
  return value.role == Role::metric ||
         (value.role == Role::gradient && phase == Phase::weight_gradient);
}

Statement make_statement(const Program& program, const Op& op, const Names& names,
                         const std::vector<bool>& written) {
  const auto inputs = program.inputs(op);
  const auto outputs = program.outputs(op);
  const auto in_place = [&](ValueId id) { return contains(inputs, id); };
  const bool only_in_place = std::all_of(outputs.begin(), outputs.end(), in_place);
  const bool adds =
      only_in_place && std::all_of(outputs.begin(), outputs.end(), [&](ValueId id) {
        return written[static_cast<size_t>(id.index)] && is_sum(program.value(id), op.place.phase);
      });

  Statement statement;
  statement.verb = outputs.empty() ? "" : adds ? "+=" : only_in_place ? "<-" : "=";
  std::string stem;
  std::vector<std::string> left;
  std::vector<std::string> types;
  for (const ValueId id : outputs) {
    const Value& value = program.value(id);
    const bool marked = in_place(id) && !only_in_place;
    std::string name = names.text(id, op.place);
    // Further outputs of "qkv" or "routing.counts" print as ".lse", ".offsets".
    if (left.empty()) {
      stem = name.substr(0, name.find('.')) + ".";
    } else if (!in_place(id) && name.compare(0, stem.size(), stem) == 0) {
      name.erase(0, stem.size() - 1);
    }
    left.push_back((marked ? "&" : "") + name);
    std::string type = type_text(value);
    if (value.rows.valid()) {
      type +=
          fmt::format(" rows={}[{}]", names.text(value.rows.counter, op.place), value.rows.element);
    }
    types.push_back(type);
  }
  // Outputs of one type say it once.
  if (types.size() > 1 && std::all_of(types.begin(), types.end(),
                                      [&](const std::string& type) { return type == types[0]; })) {
    types = {fmt::format("{} x {}", types.size(), types[0])};
  }
  if (op.workspace.valid()) {
    types.push_back("workspace " + format_bytes(program.value(op.workspace).bytes()));
  }
  statement.left = fmt::format("{}", fmt::join(left, ", "));
  statement.types = fmt::format("{}", fmt::join(types, "; "));
  statement.right = fmt::format("{}({})", op.spec->name, inputs_text(program, op, names));
  if (op.spec->print_attributes != nullptr) {
    const std::string attributes = op.spec->print_attributes(op.attributes);
    if (!attributes.empty()) statement.right += " {" + attributes + "}";
  }
  return statement;
}

// Bytes of the tensors that the operation adds to the program.
uint64_t defined_bytes(const Program& program, const Op& op) {
  uint64_t bytes = 0;
  for (const ValueId id : program.outputs(op)) {
    if (!contains(program.inputs(op), id)) bytes += program.value(id).bytes();
  }
  return bytes;
}

bool is_backward(Phase phase) {
  return phase == Phase::data_gradient || phase == Phase::weight_gradient ||
         phase == Phase::recompute;
}

std::string place_text(const Place& place) {
  std::string text;
  if (place.layer >= 0) text += fmt::format("layer {}", place.layer);
  if (place.micro_batch >= 0) {
    text += fmt::format("{}micro-batch {}", text.empty() ? "" : ", ", place.micro_batch);
  }
  return text;
}

// What a stretch of operations has in common; printed when it changes.
std::string heading_of(const Place& place) {
  std::string text =
      place.micro_batch >= 0 ? fmt::format("micro-batch {}", place.micro_batch) : "step";
  if (place.chunk > 0) text += fmt::format(", chunk {}", place.chunk);
  if (place.phase == Phase::optimizer) {
    text += ", optimizer";
  } else {
    text += is_backward(place.phase) ? ", backward" : ", forward";
  }
  return text +
         (place.layer >= 0 ? fmt::format(", layer {}", place.layer) : ", outside the layers");
}

std::string numbered(const char* prefix, int32_t number) {
  return number >= 0 ? fmt::format("{}{}", prefix, number) : "-";
}

int32_t find_peak(std::span<const uint64_t> live_bytes) {
  return static_cast<int32_t>(std::max_element(live_bytes.begin(), live_bytes.end()) -
                              live_bytes.begin());
}

std::string summarize(const Program& program, const std::vector<int32_t>& shown,
                      const PrintOptions& options) {
  struct PhaseSum {
    int64_t ops = 0;
    Cost cost;
    uint64_t bytes = 0;
  };
  std::array<PhaseSum, kPhaseCount> sums;
  const Program expected = program.with_expected_rows();
  for (const int32_t index : shown) {
    const Op& op = program.op(index);
    PhaseSum& sum = sums[static_cast<size_t>(op.place.phase)];
    ++sum.ops;
    sum.bytes += defined_bytes(program, op);
    if (op.spec->cost == nullptr) continue;
    const Cost cost = op.spec->cost(OpView{expected, op});
    sum.cost.flops += cost.flops;
    sum.cost.bytes += cost.bytes;
  }

  std::string text = fmt::format("\n# {:<14}{:>10}{:>12}{:>14}{:>14}\n", "phase", "operations",
                                 "flops", "traffic", "defines");
  PhaseSum total;
  const auto add_line = [&](std::string_view name, const PhaseSum& sum) {
    text += fmt::format(
        "# {:<14}{:>10}{:>12}{:>14}{:>14}\n", name, sum.ops, format_count(sum.cost.flops),
        format_bytes(static_cast<uint64_t>(sum.cost.bytes)), format_bytes(sum.bytes));
  };
  for (int phase = 0; phase < kPhaseCount; ++phase) {
    const PhaseSum& sum = sums[static_cast<size_t>(phase)];
    if (sum.ops == 0) continue;
    add_line(name_of(static_cast<Phase>(phase)), sum);
    total.ops += sum.ops;
    total.bytes += sum.bytes;
    total.cost.flops += sum.cost.flops;
    total.cost.bytes += sum.cost.bytes;
  }
  add_line("all", total);

  if (!options.bytes_by_role.empty()) {
    text += fmt::format("\n# {:<14}{:>12}\n", "memory", "bytes");
    uint64_t sum = 0;
    const auto add_roles = [&](std::span<const uint64_t> bytes_by_role, const char* where) {
      for (size_t role = 0; role < bytes_by_role.size(); ++role) {
        const uint64_t bytes = bytes_by_role[role];
        sum += bytes;
        if (bytes == 0) continue;
        text += fmt::format("# {:<14}{:>12}{}\n", name_of(static_cast<Role>(role)),
                            format_bytes(bytes), where);
      }
    };
    add_roles(options.bytes_by_role, "");
    add_roles(options.host_bytes_by_role, "  on the host");
    text += fmt::format("# {:<14}{:>12}\n", "all", format_bytes(sum));
  }
  if (!options.live_bytes.empty()) {
    const int32_t peak = find_peak(options.live_bytes);
    const Op& op = program.op(peak);
    const std::string place = place_text(op.place);
    text += fmt::format("\n# * peak of live bytes: {} at operation {} ({}{}{})\n",
                        format_bytes(options.live_bytes[static_cast<size_t>(peak)]), peak,
                        op.spec->name, place.empty() ? "" : ", ", place);
  }
  return text;
}

// Columns wider than this are not waited for: the rest of their line moves to the right.
constexpr size_t kWidestLeft = 28;
constexpr size_t kWidestStatement = 100;

size_t column_width(const std::vector<size_t>& widths, size_t limit) {
  size_t widest = 0;
  for (const size_t width : widths) {
    if (width <= limit) widest = std::max(widest, width);
  }
  return widest;
}

}  // namespace

bool is_shown(const Place& place, const PrintOptions& options) {
  return (!options.layer || *options.layer == place.layer) &&
         (!options.micro_batch || *options.micro_batch == place.micro_batch) &&
         (!options.phase || *options.phase == place.phase);
}

std::string_view short_name_of(Phase phase) {
  switch (phase) {
    case Phase::forward:
      return "fwd";
    case Phase::data_gradient:
      return "dgrad";
    case Phase::weight_gradient:
      return "wgrad";
    case Phase::recompute:
      return "rec";
    case Phase::optimizer:
      return "opt";
  }
  return "?";
}

std::string type_text(const Value& value) {
  std::string text = fmt::format("{} [", name_of(value.dtype));
  for (int i = 0; i < value.shape.rank(); ++i) {
    const bool bound = i == 0 && value.rows.valid();
    text += fmt::format("{}{}{}", i == 0 ? "" : ", ", bound ? "<=" : "", value.shape[i]);
  }
  return text + "]";
}

std::string print_program(const Program& program, const PrintOptions& options) {
  const bool with_live = !options.live_bytes.empty();
  TROUPE_CHECK(!with_live || options.live_bytes.size() == static_cast<size_t>(program.op_count()),
               "live bytes by operation");
  TROUPE_CHECK(
      (options.bytes_by_role.empty() || options.bytes_by_role.size() == kRoleCount) &&
          (options.host_bytes_by_role.empty() || options.host_bytes_by_role.size() == kRoleCount),
      "bytes by role");
  TROUPE_CHECK(
      options.kernels.empty() || options.kernels.size() == static_cast<size_t>(program.op_count()),
      "kernels by operation");
  const Names names(program);

  std::vector<int32_t> shown;
  std::vector<Statement> statements;
  std::vector<bool> written(static_cast<size_t>(program.value_count()), false);
  int32_t micro_batches = 0;
  int32_t layers = 0;
  for (int32_t index = 0; index < program.op_count(); ++index) {
    const Op& op = program.op(index);
    micro_batches = std::max(micro_batches, op.place.micro_batch + 1);
    layers = std::max(layers, op.place.layer + 1);
    if (is_shown(op.place, options)) {
      shown.push_back(index);
      statements.push_back(make_statement(program, op, names, written));
      if (!options.kernels.empty()) {
        const std::string& kernel = options.kernels[static_cast<size_t>(index)];
        if (kernel != op.spec->name) statements.back().right += " by " + kernel;
      }
    }
    for (const ValueId id : program.outputs(op)) written[static_cast<size_t>(id.index)] = true;
  }

  std::string text = fmt::format("# program: {} operations, {} layers, {} micro-batches\n",
                                 program.op_count(), layers, micro_batches);
  if (static_cast<int32_t>(shown.size()) < program.op_count()) {
    text += fmt::format("# shown: {} operations\n", shown.size());
  }

  std::vector<size_t> widths;
  for (const Statement& statement : statements) widths.push_back(statement.left.size());
  const size_t left_width = options.is_narrow ? 0 : column_width(widths, kWidestLeft);
  std::vector<std::string> texts;
  widths.clear();
  for (const Statement& statement : statements) {
    texts.push_back(fmt::format("{:<{}} {:>{}} {}", statement.left, left_width, statement.verb,
                                options.is_narrow ? 1 : 2, statement.right));
    widths.push_back(texts.back().size());
  }
  const size_t statement_width = options.is_narrow ? 0 : column_width(widths, kWidestStatement);
  // Wide enough for the title, too.
  const size_t layer_width = numbered("L", std::max(0, layers - 1)).size();
  const size_t batch_width = numbered("mb", std::max(0, micro_batches - 1)).size();

  const int32_t peak = with_live ? find_peak(options.live_bytes) : -1;
  const auto live_column = [&](const std::string& live) {
    return with_live ? fmt::format(" {:>12}", live) : std::string();
  };
  const auto before_statement = [&](const std::string& number, std::string_view phase,
                                    std::string_view queue, const std::string& place,
                                    const std::string& defines, const std::string& live) {
    const std::string where = options.is_narrow ? ""
                                                : fmt::format("{:<7} {:<{}} ", queue, place,
                                                              layer_width + 1 + batch_width);
    return fmt::format("{:>6}  {:<5} {}{:>10}{}   ", number, phase, where, defines,
                       live_column(live));
  };
  text += before_statement("#   op", "phase", "queue", "place", "defines", "live ") +
          fmt::format("{:<{}}   {}\n", "statement", statement_width, "types of the outputs");

  std::string heading;
  for (size_t i = 0; i < shown.size(); ++i) {
    const int32_t index = shown[i];
    const Op& op = program.op(index);
    if (std::string next = heading_of(op.place); next != heading) {
      heading = std::move(next);
      text += "\n# " + heading + "\n";
    }
    const uint64_t bytes = defined_bytes(program, op);
    std::string live;
    if (with_live) {
      live = format_bytes(options.live_bytes[static_cast<size_t>(index)]);
      live += index == peak ? "*" : " ";
    }
    const std::string place = fmt::format("{:<{}} {}", numbered("L", op.place.layer), layer_width,
                                          numbered("mb", op.place.micro_batch));
    text += before_statement(std::to_string(index), short_name_of(op.place.phase),
                             name_of(op.place.queue), place, bytes == 0 ? "-" : format_bytes(bytes),
                             live) +
            fmt::format("{:<{}}   {}\n", texts[i], statement_width, statements[i].types);
  }
  return text + summarize(program, shown, options);
}

}  // namespace troupe
