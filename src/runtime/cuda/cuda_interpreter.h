// The CUDA interpreter: runs a program on one GPU. It keeps the promises of CpuInterpreter:
// everything is decided before the first run, one arena holds what the plan says, a run allocates
// nothing, and the same program with the same inputs gives the same bits.
//
// A run copies the inputs to the GPU, launches the operations in program order, copies metrics and
// results back, and waits once. With `capture` the first run does that, the second one captures it
// as a CUDA graph, and all later ones launch the graph: the numbers that change from step to step
// are values on the GPU, and all addresses stay.
//
// Each queue that the program uses is a stream; an operation waits for the events of other queues'
// operations that queue_events.h says. The streams of all queues begin after the inputs and have
// ended before the metrics are copied, both of which is the compute queue's work. Communication and
// copies have a higher priority than it: what they do is little, and others wait for it. A program
// that uses one queue has one stream and no events. So have oracle plans, whose dead values are
// poisoned in the order of the program, and interpreters of ranks that share a GPU.
//
// Operations that reach other ranks need the communicators of this rank. Their first run connects
// the GPUs (peer_connection.h): all ranks must be in it at the same time. A rank that does not come
// in time is noticed when the run ends.
//
// Launches are in NVTX ranges, "grouped_linear layer 3 micro-batch 0", for those who look from
// outside. run_profiled() looks by itself (kernel_trace.h). What a graph launches says nothing of
// operations: with `profile` a run that is no graph is traced to learn what each operation launches
// (launch_order.h). It is the first one; where hosts meet in that (peers.h), which takes launches
// of its own, it is the second one, and the third one is captured.
//
// With an oracle plan the memory of dead values is filled with NaN, as on the CPU.
//
// Owns its arena, unless it is lent one (InterpreterOptions::memory_of), its streams and events,
// and the context of its kernels; borrows program, state and communicators. Runs on the GPU of the
// state. Construction may throw UserError: no GPU, too little memory, or an operation that has no
// CUDA kernel. A run throws UserError when the GPU fails, or another rank. One thread at a time.
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "comm/cuda/peer_connection.h"
#include "passes/memory_plan.h"
#include "passes/queue_events.h"
#include "program/communicator.h"
#include "program/cuda_kernel.h"
#include "program/program.h"
#include "runtime/cuda/kernel_trace.h"
#include "runtime/device_memory.h"
#include "runtime/host_memory.h"
#include "runtime/interpreter.h"
#include "runtime/launch_order.h"
#include "runtime/operands.h"
#include "runtime/state_storage.h"

struct CUevent_st;      // what cudaEvent_t points to
struct CUgraphExec_st;  // what cudaGraphExec_t points to

namespace troupe {

class CudaInterpreter final : public Interpreter {
 public:
  CudaInterpreter(const Program& program, MemoryPlan plan, const StateStorage& state,
                  ThreadPool& pool, const Communicators& communicators = {},
                  const InterpreterOptions& options = {});
  ~CudaInterpreter() override;
  CudaInterpreter(const CudaInterpreter&) = delete;
  CudaInterpreter& operator=(const CudaInterpreter&) = delete;

  TensorView view(ValueId id) const override;
  void run() override;
  void run_observed(const std::function<void(int32_t)>& after) override;
  std::vector<WorkSpan> run_profiled() override;
  void read(ValueId id, void* bytes) const override;
  void write(ValueId id, const void* bytes) override;
  std::vector<int32_t> operations_without_algorithm() const override {
    return {without_algorithm_.begin(), without_algorithm_.end()};
  }
  const MemoryPlan& plan() const override { return plan_; }
  uint64_t allocated_bytes() const override { return memory_->arena.bytes(); }

 private:
  struct Memory {
    DeviceMemory arena;
    HostMemory offloaded;
  };
  struct BoundOp {
    CudaKernel kernel = nullptr;
    CudaKernelArguments arguments;
    std::string range;  // what NVTX calls it
    std::vector<CUevent_st*> waits_for;
    CUevent_st* ended = nullptr;  // recorded after it; nullptr: nothing waits for it
  };
  // Memory of the host that copies do not wait for.
  struct PinnedMemory {
    explicit PinnedMemory(uint64_t bytes);
    ~PinnedMemory();
    PinnedMemory(const PinnedMemory&) = delete;
    PinnedMemory& operator=(const PinnedMemory&) = delete;
    std::byte* data = nullptr;
  };

  CudaTensor tensor(ValueId id) const;
  void make_streams();
  CUevent_st* make_event();
  void bind();
  void bind_events();
  // Of one rank among several: with the others, if it must; the first run connects them.
  void begin_run();
  CUstream_st* stream_of(Queue queue) const { return streams_[static_cast<size_t>(queue)]; }
  std::byte* scratch_of(Queue queue) const;
  // Lets all streams begin after what the compute queue has been given, and it go on after what
  // all of them have.
  void fork();
  void join();
  void copy_inputs();
  void copy_results();
  void launch(size_t index);
  void launch_all();
  void poison_after(size_t index);
  void wait(CUstream_st* stream, const std::string& what) const;
  void capture();
  std::string describe(int32_t index) const;
  void run_untraced();
  std::vector<LaunchRecord> trace_run();
  // The run in which launches are learned, and the one that is captured, counted from 0.
  int64_t learning_run() const { return peers_ == nullptr ? 0 : 1; }
  int64_t captured_run() const { return options_.profile ? learning_run() + 1 : 1; }

  const Program& program_;
  MemoryPlan plan_;
  const StateStorage& state_;
  ThreadPool& pool_;
  InterpreterOptions options_;
  std::shared_ptr<const Memory> memory_;
  std::vector<uint64_t> result_offset_;  // by ValueId, in host_; of results
  std::unique_ptr<PinnedMemory> host_;   // inputs and metrics as in the arena, then results
  CUstream_st* stream_ = nullptr;        // of the compute queue
  // By queue: its stream; that of the compute queue where it has none of its own.
  std::array<CUstream_st*, kQueueCount> streams_{};
  std::vector<CUevent_st*> events_;  // all that there are
  CUevent_st* begun_ = nullptr;      // of a run; nullptr: there is one stream
  std::array<CUevent_st*, kQueueCount> queue_ended_{};
  std::unique_ptr<CudaContext> context_;
  Operands<CudaTensor> operands_;
  std::vector<BoundOp> ops_;
  std::set<int32_t> without_algorithm_;
  std::unique_ptr<PeerConnection> peers_;  // of programs that reach other ranks
  bool is_connected_ = false;
  CUgraphExec_st* graph_ = nullptr;
  int64_t runs_ = 0;
  std::unique_ptr<KernelTrace> trace_;  // of this run, if it is traced
  std::optional<LaunchOrder> launches_;
};

}  // namespace troupe
