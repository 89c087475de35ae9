#include "runtime/make_interpreter.h"

#include "base/error.h"
#include "runtime/cpu/cpu_interpreter.h"
#ifdef TROUPE_WITH_CUDA
#include "runtime/cuda/cuda_interpreter.h"
#endif

namespace troupe {

std::unique_ptr<Interpreter> make_interpreter(const Program& program, MemoryPlan plan,
                                              const StateStorage& state, ThreadPool& pool,
                                              const Communicators& communicators,
                                              const InterpreterOptions& options) {
  TROUPE_CHECK(plan.device == state.device(), "plan and state are for different devices");
#ifdef TROUPE_WITH_CUDA
  if (plan.device == Device::cuda) {
    return std::make_unique<CudaInterpreter>(program, std::move(plan), state, pool, communicators,
                                             options);
  }
#endif
  return std::make_unique<CpuInterpreter>(program, std::move(plan), state, pool, communicators,
                                          options);
}

}  // namespace troupe
