#include "support/guarded_op.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "program/op_spec.h"

namespace troupe::testing {
namespace {

// Memory of a kernel, and after it some that is not the kernel's. A kernel that needs none gets a
// null pointer.
class GuardedMemory {
 public:
  explicit GuardedMemory(uint64_t bytes)
      : own_((bytes + 7) / 8), words_(own_ == 0 ? 0 : own_ + kGuard, kUntouched) {}
  std::byte* data() { return reinterpret_cast<std::byte*>(words_.data()); }
  bool is_guard_intact() const {
    return std::all_of(words_.begin() + static_cast<std::ptrdiff_t>(own_), words_.end(),
                       [](uint64_t word) { return word == kUntouched; });
  }

 private:
  static constexpr size_t kGuard = 1 << 16;
  static constexpr uint64_t kUntouched = 0x5ca1ab1e5ca1ab1eU;

  size_t own_;
  std::vector<uint64_t> words_;
};

}  // namespace

std::string run_guarded(const OpView& op, const std::function<TensorView(ValueId)>& view,
                        ThreadPool& pool) {
  const auto views = [&](std::span<const ValueId> ids) {
    std::vector<TensorView> result;
    for (const ValueId id : ids) result.push_back(id.valid() ? view(id) : TensorView());
    return result;
  };
  const CpuSpec& cpu = op.op.spec->cpu;
  const std::vector<TensorView> inputs = views(op.program.inputs(op.op));
  const std::vector<TensorView> outputs = views(op.program.outputs(op.op));
  KernelArguments args;
  args.attributes = &op.op.attributes;
  args.inputs = inputs;
  args.outputs = outputs;
  args.pool = &pool;
  GuardedMemory workspace(cpu.workspace == nullptr ? 0 : cpu.workspace(op));
  args.workspace = workspace.data();
  args.scratch_bytes_per_thread = cpu.scratch == nullptr ? 0 : (cpu.scratch(op) + 63) / 64 * 64;
  GuardedMemory scratch(args.scratch_bytes_per_thread * static_cast<uint64_t>(pool.threads()));
  args.scratch = scratch.data();
  cpu.kernel(op)(args);
  if (!workspace.is_guard_intact()) return "workspace";
  return scratch.is_guard_intact() ? "" : "scratch";
}

}  // namespace troupe::testing
