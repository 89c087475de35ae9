#include "runtime/cpu/cpu_interpreter.h"

#include <chrono>
#include <cstring>

#include "program/op_spec.h"

namespace troupe {

CpuInterpreter::CpuInterpreter(const Program& program, MemoryPlan plan, const StateStorage& state,
                               ThreadPool& pool, const Communicators& communicators,
                               const InterpreterOptions& options)
    : program_(program),
      plan_(std::move(plan)),
      state_(state),
      pool_(pool),
      communicators_(communicators) {
  TROUPE_CHECK(&program.state() == &state.table(), "program and storage have different states");
  TROUPE_CHECK(plan_.device == Device::cpu, "planned for another device");
  TROUPE_CHECK(plan_.threads == pool.threads(), "planned for another number of threads");
  const uint64_t bytes = plan_.persistent_bytes + plan_.transient_bytes + plan_.scratch_bytes();
  if (options.memory_of != nullptr) {
    memory_ = static_cast<const CpuInterpreter*>(options.memory_of)->memory_;
    TROUPE_CHECK(
        memory_->arena.bytes() >= bytes && memory_->host.bytes() >= plan_.host_transient_bytes,
        "memory that is lent is too small");
  } else {
    memory_ = std::make_shared<const Memory>(Memory{
        .arena = Arena(bytes, "activations and workspace"),
        .host = HostMemory(plan_.host_transient_bytes, "offloaded activations", Device::cpu)});
  }
  bind();
}

TensorView CpuInterpreter::view(ValueId id) const {
  const Value& value = program_.value(id);
  if (is_state(value.role)) return state_.view(value.state);
  std::byte* const transient = is_on_host(value.role)
                                   ? memory_->host.data()
                                   : memory_->arena.data() + plan_.persistent_bytes;
  std::byte* const base = is_persistent(value.role) ? memory_->arena.data() : transient;
  TensorView view{base + plan_.offset[static_cast<size_t>(id.index)], value.dtype, value.shape,
                  nullptr};
  if (value.rows.valid()) {
    view.live_rows = this->view(value.rows.counter).as<int32_t>() + value.rows.element;
  }
  return view;
}

void CpuInterpreter::bind() {
  operands_ = Operands<TensorView>(program_, [this](ValueId id) { return view(id); });
  ops_.reserve(static_cast<size_t>(program_.op_count()));
  for (int32_t index = 0; index < program_.op_count(); ++index) {
    const Op& op = program_.op(index);
    BoundOp bound;
    bound.kernel = op.spec->cpu.kernel(OpView{program_, op});
    TROUPE_CHECK(bound.kernel != nullptr, std::string("no CPU kernel for ") + op.spec->name);
    bound.arguments.attributes = &op.attributes;
    bound.arguments.inputs = operands_.inputs(index, op);
    bound.arguments.outputs = operands_.outputs(index, op);
    if (op.workspace.valid())
      bound.arguments.workspace = static_cast<std::byte*>(view(op.workspace).data);
    bound.arguments.scratch = scratch();
    bound.arguments.scratch_bytes_per_thread = plan_.scratch_bytes_per_thread;
    bound.arguments.pool = &pool_;
    if (op.spec->group != nullptr) {
      bound.arguments.communicator = communicators_.of(op.spec->group(op.attributes));
      TROUPE_CHECK(bound.arguments.communicator != nullptr,
                   std::string("no communicator for ") + op.spec->name);
      bound.arguments.op = &op;
      bound.arguments.op_index = index;
    }
    ops_.push_back(bound);
  }
  if (!plan_.dead_after.empty()) {
    std::memset(memory_->arena.data() + plan_.persistent_bytes, 0xff, plan_.transient_bytes);
    if (memory_->host.bytes() > 0) std::memset(memory_->host.data(), 0xff, memory_->host.bytes());
    poison_scratch();
  }
}

void CpuInterpreter::run() {
  if (!plan_.dead_after.empty()) {
    run_observed([](int32_t) {});
    return;
  }
  for (const BoundOp& op : ops_) op.kernel(op.arguments);
}

void CpuInterpreter::run_op(int32_t index) const {
  const BoundOp& op = ops_[static_cast<size_t>(index)];
  op.kernel(op.arguments);
}

void CpuInterpreter::run_observed(const std::function<void(int32_t)>& after) {
  for (size_t index = 0; index < ops_.size(); ++index) {
    run_op(static_cast<int32_t>(index));
    after(static_cast<int32_t>(index));
    if (plan_.dead_after.empty()) continue;
    for (const ValueId id : plan_.dead_after[index]) poison(id);
    poison_scratch();
  }
}

std::vector<WorkSpan> CpuInterpreter::run_profiled() {
  using Clock = std::chrono::steady_clock;
  std::vector<WorkSpan> spans;
  spans.reserve(ops_.size());
  const auto start = Clock::now();
  double last = 0;
  run_observed([&](int32_t op) {
    const double now = std::chrono::duration<double>(Clock::now() - start).count();
    spans.push_back(
        {.op = op, .name = program_.op(op).spec->name, .begin_s = last, .duration_s = now - last});
    last = std::chrono::duration<double>(Clock::now() - start).count();
  });
  return spans;
}

void CpuInterpreter::read(ValueId id, void* bytes) const {
  std::memcpy(bytes, view(id).data, program_.value(id).bytes());
}

void CpuInterpreter::write(ValueId id, const void* bytes) {
  std::memcpy(view(id).data, bytes, program_.value(id).bytes());
}

void CpuInterpreter::poison(ValueId id) {
  // All bits set is NaN in every float type and -1 in the integers.
  std::memset(view(id).data, 0xff, program_.value(id).bytes());
}

std::byte* CpuInterpreter::scratch() const {
  return memory_->arena.data() + plan_.persistent_bytes + plan_.transient_bytes;
}

void CpuInterpreter::poison_scratch() {
  if (plan_.scratch_bytes() > 0) std::memset(scratch(), 0xff, plan_.scratch_bytes());
}

}  // namespace troupe
