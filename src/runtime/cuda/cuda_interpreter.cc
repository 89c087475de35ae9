#include "runtime/cuda/cuda_interpreter.h"

#include <algorithm>
#include <cstring>
#include <cuda_runtime.h>
#include <numeric>
#include <nvtx3/nvToolsExt.h>
#include <string>

#include "ops/cuda/context.h"
#include "program/cuda/check.h"
#include "program/op_spec.h"

namespace troupe {
namespace {

constexpr uint64_t kNoResult = ~uint64_t{0};

std::string range_name(const Op& op) {
  std::string name = op.spec->name;
  if (op.place.layer >= 0) name += " layer " + std::to_string(op.place.layer);
  if (op.place.micro_batch >= 0) name += " micro-batch " + std::to_string(op.place.micro_batch);
  return name;
}

}  // namespace

CudaInterpreter::PinnedMemory::PinnedMemory(uint64_t bytes) {
  if (bytes == 0) return;
  void* memory = nullptr;
  check_cuda(cudaMallocHost(&memory, bytes), "allocating the host's copy of inputs and metrics");
  data = static_cast<std::byte*>(memory);
  std::memset(data, 0, bytes);
}

CudaInterpreter::PinnedMemory::~PinnedMemory() {
  if (data != nullptr) cudaFreeHost(data);
}

CudaInterpreter::CudaInterpreter(const Program& program, MemoryPlan plan, const StateStorage& state,
                                 ThreadPool& pool, const Communicators& communicators,
                                 const InterpreterOptions& options)
    : program_(program), plan_(std::move(plan)), state_(state), pool_(pool), options_(options) {
  TROUPE_CHECK(&program.state() == &state.table(), "program and storage have different states");
  TROUPE_CHECK(plan_.device == Device::cuda && state.device() == Device::cuda,
               "planned for another device");
  const uint64_t bytes = plan_.persistent_bytes + plan_.transient_bytes + plan_.scratch_bytes();
  if (options.memory_of != nullptr) {
    memory_ = static_cast<const CudaInterpreter*>(options.memory_of)->memory_;
    TROUPE_CHECK(
        memory_->arena.bytes() >= bytes && memory_->offloaded.bytes() >= plan_.host_transient_bytes,
        "memory that is lent is too small");
    use_gpu(state.gpu());
  } else {
    DeviceMemory arena(bytes, "activations and scratch memory", state.gpu());
    use_gpu(state.gpu());
    memory_ = std::make_shared<const Memory>(
        std::move(arena),
        HostMemory(plan_.host_transient_bytes, "offloaded activations", Device::cuda));
  }
  uint64_t host_bytes = plan_.persistent_bytes;
  result_offset_.resize(static_cast<size_t>(program.value_count()), kNoResult);
  for (const ValueId id : program.results()) {
    if (is_persistent(program.value(id).role)) continue;
    result_offset_[static_cast<size_t>(id.index)] = host_bytes;
    host_bytes += MemoryPlan::aligned(program.value(id).bytes());
  }
  host_ = std::make_unique<PinnedMemory>(host_bytes);
  make_streams();
  context_ = std::make_unique<CudaContext>();
  bind();
  if (begun_ != nullptr) bind_events();
  if (PeerConnection::is_needed(program)) {
    const DeviceMemory& of_state = state.device_memory();
    peers_ = std::make_unique<PeerConnection>(
        program, communicators,
        std::vector<PeerMemory>{{memory_->arena.data(), memory_->arena.bytes()},
                                {of_state.data(), of_state.bytes()}});
  }
}

CudaInterpreter::~CudaInterpreter() {
  cudaSetDevice(state_.gpu());
  if (graph_ != nullptr) cudaGraphExecDestroy(graph_);
  context_.reset();  // libraries may know the streams still
  for (CUevent_st* const event : events_) cudaEventDestroy(event);
  for (CUstream_st* const stream : streams_) {
    if (stream != nullptr && stream != stream_) cudaStreamDestroy(stream);
  }
  if (stream_ != nullptr) cudaStreamDestroy(stream_);
}

CUevent_st* CudaInterpreter::make_event() {
  cudaEvent_t event = nullptr;
  check_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "making an event");
  events_.push_back(event);
  return event;
}

void CudaInterpreter::make_streams() {
  check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "making a stream");
  streams_.fill(stream_);
  std::array<bool, kQueueCount> is_used{};
  for (int32_t index = 0; index < program_.op_count(); ++index) {
    is_used[static_cast<size_t>(program_.op(index).place.queue)] = true;
  }
  const bool has_several = std::count(is_used.begin(), is_used.end(), true) > 1;
  if (!has_several || options_.shares_gpu || !plan_.dead_after.empty()) return;
  int lowest = 0;
  int highest = 0;
  check_cuda(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "asking for priorities");
  begun_ = make_event();
  for (size_t queue = 0; queue < kQueueCount; ++queue) {
    if (!is_used[queue] || static_cast<Queue>(queue) == Queue::compute) continue;
    check_cuda(cudaStreamCreateWithPriority(&streams_[queue], cudaStreamNonBlocking, highest),
               "making a stream");
    queue_ended_[queue] = make_event();
  }
}

// An event may be recorded again as soon as everything that waits for it has been told to.
void CudaInterpreter::bind_events() {
  const std::vector<QueueEvent> events = find_queue_events(program_, plan_);
  verify_queue_events(program_, plan_, events);
  std::vector<int32_t> last_waiter(ops_.size(), -1);
  for (const QueueEvent& event : events) {
    last_waiter[static_cast<size_t>(event.before)] = event.after;
  }
  std::vector<CUevent_st*> free;
  size_t next = 0;
  for (size_t index = 0; index < ops_.size(); ++index) {
    for (; next < events.size() && events[next].after == static_cast<int32_t>(index); ++next) {
      const auto before = static_cast<size_t>(events[next].before);
      ops_[index].waits_for.push_back(ops_[before].ended);
      if (last_waiter[before] == events[next].after) free.push_back(ops_[before].ended);
    }
    if (last_waiter[index] < 0) continue;
    if (free.empty()) free.push_back(make_event());
    ops_[index].ended = free.back();
    free.pop_back();
  }
}

std::byte* CudaInterpreter::scratch_of(Queue queue) const {
  const auto& bytes = plan_.scratch_bytes_of_queue;
  const auto before = std::accumulate(bytes.begin(), bytes.begin() + static_cast<int>(queue),
                                      plan_.persistent_bytes + plan_.transient_bytes);
  return memory_->arena.data() + before;
}

void CudaInterpreter::fork() {
  if (begun_ == nullptr) return;
  check_cuda(cudaEventRecord(begun_, stream_), "recording an event");
  for (CUstream_st* const stream : streams_) {
    if (stream == stream_) continue;
    check_cuda(cudaStreamWaitEvent(stream, begun_), "waiting for an event");
  }
}

void CudaInterpreter::join() {
  for (size_t queue = 0; queue < kQueueCount; ++queue) {
    if (queue_ended_[queue] == nullptr) continue;
    check_cuda(cudaEventRecord(queue_ended_[queue], streams_[queue]), "recording an event");
    check_cuda(cudaStreamWaitEvent(stream_, queue_ended_[queue]), "waiting for an event");
  }
}

CudaTensor CudaInterpreter::tensor(ValueId id) const {
  const Value& value = program_.value(id);
  CudaTensor tensor{nullptr, value.dtype, value.shape, nullptr};
  if (is_state(value.role)) {
    tensor.data = state_.device_address(value.state);
    return tensor;
  }
  std::byte* const transient = is_on_host(value.role)
                                   ? memory_->offloaded.data()
                                   : memory_->arena.data() + plan_.persistent_bytes;
  std::byte* const base = is_persistent(value.role) ? memory_->arena.data() : transient;
  tensor.data = base + plan_.offset[static_cast<size_t>(id.index)];
  if (value.rows.valid()) {
    tensor.live_rows = this->tensor(value.rows.counter).as<int32_t>() + value.rows.element;
    tensor.expected_rows = value.rows.expected;
  }
  return tensor;
}

TensorView CudaInterpreter::view(ValueId id) const {
  const Value& value = program_.value(id);
  const uint64_t offset = is_persistent(value.role) && !is_state(value.role)
                              ? plan_.offset[static_cast<size_t>(id.index)]
                              : result_offset_[static_cast<size_t>(id.index)];
  TROUPE_CHECK(offset != kNoResult,
               "the host sees inputs, metrics and results only, not " + value.name);
  return {host_->data + offset, value.dtype, value.shape, nullptr};
}

void CudaInterpreter::bind() {
  operands_ = Operands<CudaTensor>(program_, [this](ValueId id) { return tensor(id); });
  ops_.reserve(static_cast<size_t>(program_.op_count()));
  const DeviceTraits gpu = device_traits(state_.gpu());
  for (int32_t index = 0; index < program_.op_count(); ++index) {
    const Op& op = program_.op(index);
    BoundOp bound;
    KernelChoice choice;
    if (op.spec->cuda != nullptr) choice = op.spec->cuda({program_, op}, gpu);
    bound.kernel = choice.function;
    if (bound.kernel == nullptr) {
      throw_bad_request(std::string("--device cuda: the operation ") + op.spec->name +
                        " has no CUDA kernel yet. Use --device cpu.");
    }
    bound.arguments.attributes = &op.attributes;
    bound.arguments.inputs = operands_.inputs(index, op);
    bound.arguments.outputs = operands_.outputs(index, op);
    const uint64_t planned = plan_.scratch_bytes_of_queue[static_cast<size_t>(op.place.queue)];
    TROUPE_CHECK(MemoryPlan::bytes_of(choice.needs) <= planned, "the plan is for another GPU");
    bound.arguments.scratch = scratch_of(op.place.queue);
    bound.arguments.staging = bound.arguments.scratch + MemoryPlan::aligned(choice.needs.scratch);
    bound.arguments.multiprocessors = choice.multiprocessors;
    bound.arguments.stream = stream_of(op.place.queue);
    bound.arguments.context = context_.get();
    bound.range = range_name(op);
    ops_.push_back(std::move(bound));
  }
  if (!plan_.dead_after.empty() && plan_.transient_bytes > 0) {
    check_cuda(
        cudaMemset(memory_->arena.data() + plan_.persistent_bytes, 0xff, plan_.transient_bytes),
        "filling memory with NaN");
    check_cuda(cudaStreamSynchronize(nullptr), "filling memory with NaN");
  }
}

void CudaInterpreter::begin_run() {
  use_gpu(state_.gpu());
  if (peers_ == nullptr) return;
  if (options_.shares_gpu) peers_->barrier_on_host(pool_);
  if (is_connected_) return;
  std::vector<CudaKernelArguments*> arguments;
  for (BoundOp& op : ops_) arguments.push_back(&op.arguments);
  peers_->connect(arguments, pool_);
  is_connected_ = true;
}

std::string CudaInterpreter::describe(int32_t index) const {
  const Op& op = program_.op(index);
  std::string text = std::string("operation ") + std::to_string(index) + " (" + op.spec->name;
  for (const ValueId id : program_.outputs(op)) {
    text += " " + program_.value(id).name + " " + program_.value(id).shape.to_string();
  }
  return text + ")";
}

void CudaInterpreter::copy_inputs() {
  if (plan_.persistent_bytes == 0) return;
  check_cuda(cudaMemcpyAsync(memory_->arena.data(), host_->data, plan_.persistent_bytes,
                             cudaMemcpyHostToDevice, stream_),
             "copying the inputs to the GPU");
}

void CudaInterpreter::copy_results() {
  if (plan_.persistent_bytes > 0) {
    check_cuda(cudaMemcpyAsync(host_->data, memory_->arena.data(), plan_.persistent_bytes,
                               cudaMemcpyDeviceToHost, stream_),
               "copying metrics from the GPU");
  }
  for (const ValueId id : program_.results()) {
    const Value& value = program_.value(id);
    if (is_persistent(value.role)) continue;
    check_cuda(cudaMemcpyAsync(host_->data + result_offset_[static_cast<size_t>(id.index)],
                               tensor(id).data, value.bytes(), cudaMemcpyDeviceToHost, stream_),
               "copying results from the GPU");
  }
}

void CudaInterpreter::launch(size_t index) {
  const BoundOp& op = ops_[index];
  for (CUevent_st* const event : op.waits_for) {
    check_cuda(cudaStreamWaitEvent(op.arguments.stream, event), "waiting for an event");
  }
  if (trace_ != nullptr) trace_->begin_op(static_cast<int32_t>(index));
  nvtxRangePushA(op.range.c_str());
  const int64_t refused = context_->refused_products();
  op.kernel(op.arguments);
  if (context_->refused_products() > refused) {
    without_algorithm_.insert(static_cast<int32_t>(index));
  }
  nvtxRangePop();
  if (trace_ != nullptr) trace_->end_op();
  if (op.ended != nullptr) {
    check_cuda(cudaEventRecord(op.ended, op.arguments.stream), "recording an event");
  }
  poison_after(index);
}

void CudaInterpreter::poison_after(size_t index) {
  if (plan_.dead_after.empty()) return;
  // All bits set is NaN in every float type and -1 in the integers. The host's memory is left as it
  // is: a GPU's graph need not be able to fill that.
  for (const ValueId id : plan_.dead_after[index]) {
    if (is_on_host(program_.value(id).role)) continue;
    check_cuda(cudaMemsetAsync(tensor(id).data, 0xff, program_.value(id).bytes(), stream_),
               "filling memory with NaN");
  }
}

void CudaInterpreter::launch_all() {
  copy_inputs();
  fork();
  for (size_t index = 0; index < ops_.size(); ++index) launch(index);
  join();
  copy_results();
}

void CudaInterpreter::wait(CUstream_st* stream, const std::string& what) const {
  if (peers_ != nullptr) return peers_->wait(stream, what);
  check_cuda(cudaStreamSynchronize(stream), what);
}

void CudaInterpreter::capture() {
  check_cuda(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal),
             "capturing the step");
  launch_all();
  cudaGraph_t graph = nullptr;
  check_cuda(cudaStreamEndCapture(stream_, &graph), "capturing the step");
  // Kernels have the priorities of the streams that they were captured on.
  const unsigned long long flags = begun_ == nullptr ? 0 : cudaGraphInstantiateFlagUseNodePriority;
  const cudaError_t error = cudaGraphInstantiate(&graph_, graph, flags);
  cudaGraphDestroy(graph);
  check_cuda(error, "making a graph of the step");
}

void CudaInterpreter::run() {
  if (options_.profile && runs_ == learning_run()) {
    launches_.emplace(program_, trace_run());
  } else {
    run_untraced();
  }
}

std::vector<LaunchRecord> CudaInterpreter::trace_run() {
  // No rank's earlier work is under way when the first one begins to record.
  if (peers_ != nullptr) peers_->barrier_on_host(pool_);
  trace_ = std::make_unique<KernelTrace>();
  run_untraced();
  // What other ranks have launched has ended, too: only then are all records handed over.
  if (peers_ != nullptr) peers_->barrier_on_host(pool_);
  std::vector<LaunchRecord> records = trace_->finish(static_cast<uint32_t>(state_.gpu()));
  trace_.reset();
  return records;
}

std::vector<WorkSpan> CudaInterpreter::run_profiled() {
  TROUPE_CHECK(options_.profile, "the interpreter was not made for profiling");
  const bool learns = runs_ == learning_run();
  std::vector<LaunchRecord> records = trace_run();
  if (learns) launches_.emplace(program_, records);
  if (launches_.has_value()) launches_->attribute(records);
  std::vector<WorkSpan> spans;
  spans.reserve(records.size());
  for (const LaunchRecord& record : records) {
    spans.push_back({.op = record.op,
                     .name = record.name,
                     .begin_s = static_cast<double>(record.begin_ns - records[0].begin_ns) * 1e-9,
                     .duration_s = static_cast<double>(record.end_ns - record.begin_ns) * 1e-9});
  }
  return spans;
}

void CudaInterpreter::run_untraced() {
  begin_run();
  // The first run loads kernels and lets libraries choose theirs, which a capture must not do.
  if (options_.capture && runs_ == captured_run()) {
    capture();
    // Making a graph takes memory of the GPU, for which no rank must wait on it.
    if (peers_ != nullptr) peers_->barrier_on_host(pool_);
  }
  if (graph_ != nullptr) {
    check_cuda(cudaGraphLaunch(graph_, stream_), "launching the step");
  } else {
    launch_all();
  }
  ++runs_;
  wait(stream_, "running the step");
  if (peers_ != nullptr) peers_->first_run_is_over();
}

void CudaInterpreter::run_observed(const std::function<void(int32_t)>& after) {
  begin_run();
  copy_inputs();
  wait(stream_, "copying the inputs to the GPU");
  for (size_t index = 0; index < ops_.size(); ++index) {
    const auto number = static_cast<int32_t>(index);
    ops_[index].kernel(ops_[index].arguments);
    wait(ops_[index].arguments.stream, describe(number));
    after(number);
    poison_after(index);
  }
  copy_results();
  wait(stream_, "copying results from the GPU");
  if (peers_ != nullptr) peers_->first_run_is_over();
}

void CudaInterpreter::read(ValueId id, void* bytes) const {
  use_gpu(state_.gpu());
  check_cuda(cudaMemcpy(bytes, tensor(id).data, program_.value(id).bytes(), cudaMemcpyDeviceToHost),
             "reading a value");
}

void CudaInterpreter::write(ValueId id, const void* bytes) {
  use_gpu(state_.gpu());
  check_cuda(cudaMemcpy(tensor(id).data, bytes, program_.value(id).bytes(), cudaMemcpyHostToDevice),
             "writing a value");
  check_cuda(cudaStreamSynchronize(nullptr), "writing a value");
}

}  // namespace troupe
