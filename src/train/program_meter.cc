#include "train/program_meter.h"

#include <algorithm>
#include <memory>

#include "base/error.h"
#include "base/random.h"
#include "runtime/device_memory.h"
#include "runtime/make_interpreter.h"
#include "runtime/state_storage.h"
#include "train/planned_program.h"

namespace troupe {
namespace {

constexpr int kWarmUps = 3;  // on a GPU one is traced, and one captured as a graph
constexpr int kRuns = 5;

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
  if (view.dtype == DType::f16) return fill(view.as<f16>(), count);
  if (view.dtype == DType::f64) return fill(view.as<double>(), count);
  fill(view.as<float>(), count);
}

}  // namespace

ProgramMeter::ProgramMeter(Device device, int gpu, int threads, const Communicators& communicators)
    : device_(device),
      gpu_(gpu),
      pool_(threads),
      communicators_(communicators),
      traits_(traits_of(device, gpu)) {}

void ProgramMeter::profile(const std::vector<StateTensor>& tensors, const Emit& emit,
                           const See& see) {
  const auto table = std::make_shared<StateTable>();
  std::vector<StateId> ids;
  for (const StateTensor& tensor : tensors) ids.push_back(table->add(tensor));
  Program program(table);
  Builder builder(program);
  std::vector<ValueId> values;
  for (const StateId id : ids) values.push_back(builder.state(id));
  program.add_result(emit(builder, values));
  const StateStorage storage(table, device_, gpu_);
  for (const StateId id : ids) fill(storage.view(id));
  storage.to_device();
  const std::unique_ptr<Interpreter> interpreter = make_interpreter(
      program, plan_program(program, pool_.threads(), device_, traits_), storage, pool_,
      communicators_, {.capture = device_ == Device::cuda, .profile = true});
  for (int run = 0; run < kWarmUps; ++run) interpreter->run();
  StepProfile seen(program);
  for (int run = 0; run < kRuns; ++run) seen.add(interpreter->run_profiled());
  see(program, seen);
}

KindTime time_of(const StepProfile& profile, std::string_view kind) {
  for (KindTime& time : profile.kinds()) {
    if (time.kind != kind) continue;
    time.seconds = std::max(time.seconds, 1e-9);
    return time;
  }
  TROUPE_CHECK(false, "an operation that was run");
  return {};
}

}  // namespace troupe
