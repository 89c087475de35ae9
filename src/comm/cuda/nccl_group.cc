#include "comm/cuda/nccl_group.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <cuda_runtime.h>
#include <exception>
#include <fmt/format.h>
#include <nccl.h>
#include <optional>
#include <thread>
#include <utility>

#include "base/alarm.h"
#include "comm/staging.h"
#include "program/cuda/check.h"
#include "program/op_spec.h"

namespace troupe {
namespace {

// A way carries one tensor at a time between two GPUs: few of their processors suffice, and must,
// since a send keeps its own until its receiver has come.
constexpr int kBlocksOfWay = 4;
constexpr int kAnyBlocks = 0;

// NCCL finds the networks of all machines when it connects. Ranks that are done may wait for one
// that still writes to a slow disk. To give up takes milliseconds, or, where the network is gone,
// NCCL may wait for it without end.
constexpr std::chrono::seconds kConnectLimit{60};
constexpr std::chrono::minutes kEndLimit{10};
constexpr std::chrono::seconds kGiveUpLimit{10};

std::string describe_call(const CollectiveCall& call) {
  if (call.op == nullptr) return "no operation";
  std::string text = fmt::format("operation {} ({})", call.index, call.op->spec->name);
  if (call.op->place.layer >= 0) text += fmt::format(", layer {}", call.op->place.layer);
  if (call.op->place.micro_batch >= 0) {
    text += fmt::format(", micro-batch {}", call.op->place.micro_batch);
  }
  return text;
}

cudaEvent_t new_event() {
  cudaEvent_t event = nullptr;
  check_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "making an event");
  return event;
}

bool is_captured(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check_cuda(cudaStreamIsCapturing(stream, &status), "asking whether a stream is captured");
  return status != cudaStreamCaptureStatusNone;
}

TensorView view_of(const CudaTensor& tensor, void* data) {
  return {data, tensor.dtype, tensor.shape, nullptr};
}

int64_t bytes_of(const CudaTensor& tensor) {
  return tensor.shape.elements() * static_cast<int64_t>(size_of(tensor.dtype));
}

}  // namespace

NcclPace::~NcclPace() {
  for (CUevent_st* const event : ended_) {
    if (event != nullptr) cudaEventDestroy(event);
  }
}

void NcclPace::begin(CUstream_st* stream) {
  if (is_captured(stream)) return;
  CUevent_st* const event = ended_[count_ % kAhead];
  if (event == nullptr) return;
  watch_([event] { return static_cast<int>(cudaEventQuery(event)); });
}

void NcclPace::end(CUstream_st* stream) {
  if (is_captured(stream)) return;
  CUevent_st*& event = ended_[count_++ % kAhead];
  if (event == nullptr) event = new_event();
  check_cuda(cudaEventRecord(event, stream), "recording an event");
}

NcclGroup::NcclGroup(Options options) : options_(std::move(options)) {
  Communicator& communicator = *options_.communicator;
  // From here on no host has to be waited for long.
  const std::byte nothing{};
  gather(&nothing, 1, {});
  if (options_.has_collectives) {
    ncclUniqueId id{};
    if (communicator.rank() == 0) require(ncclGetUniqueId(&id), nullptr, "begin");
    const std::vector<std::byte> ids = gather(&id, sizeof(id), {});
    comm_ = make_comm(ids.data(), communicator.rank(), communicator.size(), kAnyBlocks);
    connect(comm_, communicator.rank(), communicator.size(), /*gathers=*/true);
  }
  make_ways();
}

// NCCL ends a communicator on all ranks of a machine together. Where something has gone wrong they
// may not come, and what they have under way is given up.
NcclGroup::~NcclGroup() {
  if (!is_idle_ || std::uncaught_exceptions() > 0) abort(alarm_text("give up its connections"));
  const Alarm alarm(kEndLimit, alarm_text("end its connections"));
  if (comm_ != nullptr) ncclCommDestroy(comm_);
  for (const std::unique_ptr<Way>& way : ways_) {
    if (way->comm != nullptr) ncclCommDestroy(way->comm);
    for (CUevent_st* const event : way->ended) cudaEventDestroy(event);
    if (way->posted != nullptr) cudaEventDestroy(way->posted);
    if (way->stream != nullptr) cudaStreamDestroy(way->stream);
  }
}

void NcclGroup::make_ways() {
  Communicator& communicator = *options_.communicator;
  const auto size = static_cast<size_t>(communicator.size());
  const auto own = static_cast<size_t>(communicator.rank());
  to_.resize(size);
  from_.resize(size);
  bool any = false;
  std::vector<ncclUniqueId> ids(size);
  for (size_t a = 0; a < size; ++a) {
    for (size_t b = 0; b < size; ++b) any |= options_.messages[a][b] > 0;
    if (options_.messages[own][a] > 0) require(ncclGetUniqueId(&ids[a]), nullptr, "begin");
  }
  if (!any) return;
  const std::vector<std::byte> all = gather(ids.data(), ids.size() * sizeof(ncclUniqueId), {});
  int lowest = 0;
  int highest = 0;
  check_cuda(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "asking for priorities");
  for (const StagedWay& each : staged_ways(options_.messages, communicator.rank())) {
    const auto sender = static_cast<size_t>(each.from);
    const auto receiver = static_cast<size_t>(each.to);
    const int place = sender == own ? 0 : 1;
    const std::byte* const id = all.data() + (sender * size + receiver) * sizeof(ncclUniqueId);
    Way& way = *ways_.emplace_back(std::make_unique<Way>());
    way.comm = make_comm(id, place, 2, kBlocksOfWay);
    connect(way.comm, place, 2, /*gathers=*/false);
    if (sender != own) {
      from_[sender] = &way;
      continue;
    }
    to_[receiver] = &way;
    check_cuda(cudaStreamCreateWithPriority(&way.stream, cudaStreamNonBlocking, highest),
               "making a stream");
    way.posted = new_event();
    for (int64_t i = 0; i < options_.messages[sender][receiver]; ++i) {
      way.ended.push_back(new_event());
    }
  }
}

std::string NcclGroup::alarm_text(const std::string& what) const {
  const Communicator& communicator = *options_.communicator;
  return fmt::format("Rank {} timed out waiting for NCCL to {}, in {}: a rank of it has not come.",
                     communicator.rank_at(communicator.rank()), what, describe());
}

std::chrono::milliseconds NcclGroup::connect_limit() const {
  return std::max<std::chrono::milliseconds>(options_.communicator->limit(), kConnectLimit);
}

ncclComm* NcclGroup::make_comm(const void* id, int place, int size, int most_blocks) const {
  ncclUniqueId unique;
  std::memcpy(&unique, id, sizeof(unique));
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 1;
  if (most_blocks != kAnyBlocks) {
    config.minCTAs = 1;
    config.maxCTAs = most_blocks;
  }
  ncclComm_t comm = nullptr;
  const Alarm alarm(connect_limit(), alarm_text("connect"));
  require(ncclCommInitRankConfig(&comm, size, unique, place, &config), nullptr, "connect");
  return comm;
}

void NcclGroup::connect(ncclComm* comm, int place, int size, bool gathers) const {
  const Alarm alarm(connect_limit(), alarm_text("connect"));
  const auto room = static_cast<size_t>(2 * size);
  void* memory = nullptr;
  check_cuda(cudaMalloc(&memory, room), "allocating memory to connect GPUs with");
  auto* const data = static_cast<std::byte*>(memory);
  cudaStream_t stream = nullptr;
  try {
    check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "making a stream");
    require(ncclGroupStart(), comm, "connect");
    for (int other = 0; other < size; ++other) {
      if (other == place) continue;
      // A way has one direction.
      if (gathers || place == 0) {
        require(ncclSend(data + other, 1, ncclInt8, other, comm, stream), comm, "connect");
      }
      if (gathers || place == 1) {
        require(ncclRecv(data + size + other, 1, ncclInt8, other, comm, stream), comm, "connect");
      }
    }
    require(ncclGroupEnd(), comm, "connect");
    if (gathers) {
      require(ncclAllGather(data, data + size, 1, ncclInt8, comm, stream), comm, "connect");
    }
    check_cuda(cudaStreamSynchronize(stream), "connecting GPUs");
  } catch (...) {
    if (stream != nullptr) cudaStreamDestroy(stream);
    cudaFree(memory);
    throw;
  }
  cudaStreamDestroy(stream);
  cudaFree(memory);
}

std::string NcclGroup::describe() const {
  const Communicator& communicator = *options_.communicator;
  std::vector<int32_t> ranks;
  for (int place = 0; place < communicator.size(); ++place) {
    ranks.push_back(communicator.rank_at(place));
  }
  return fmt::format("the group of the ranks {} ({})", fmt::join(ranks, ", "), options_.name);
}

void NcclGroup::require(int result, ncclComm* comm, const std::string& what) const {
  const auto code = static_cast<ncclResult_t>(result);
  if (code == ncclSuccess || code == ncclInProgress) return;
  const char* const detail = ncclGetLastError(comm);
  throw_failed(fmt::format(
      "NCCL failed to {}, in {}: {}{}. NCCL_DEBUG=INFO in the environment makes it say more; "
      "NCCL_SOCKET_IFNAME names the network through which the machines reach each other.",
      what, describe(), ncclGetErrorString(code),
      detail == nullptr || *detail == '\0' ? "" : fmt::format(" ({})", detail)));
}

std::vector<std::byte> NcclGroup::gather(const void* bytes, size_t count,
                                         const CollectiveCall& call) const {
  const size_t words = (count + sizeof(int64_t) - 1) / sizeof(int64_t);
  const auto size = static_cast<size_t>(options_.communicator->size());
  std::vector<int64_t> own(words, 0);
  std::memcpy(own.data(), bytes, count);
  std::vector<int64_t> all(words * size);
  const TensorView from{own.data(), DType::i64, Shape{static_cast<int64_t>(words)}, nullptr};
  const TensorView to{all.data(), DType::i64, Shape{static_cast<int64_t>(words * size)}, nullptr};
  options_.communicator->all_gather(call, from, to, *options_.pool);
  std::vector<std::byte> gathered(count * size);
  for (size_t place = 0; place < size; ++place) {
    std::memcpy(gathered.data() + place * count, all.data() + place * words, count);
  }
  return gathered;
}

void NcclGroup::wait_for(CUstream_st* stream, const CollectiveCall& call) {
  const auto start = std::chrono::steady_clock::now();
  for (;;) {
    const cudaError_t error = cudaStreamQuery(stream);
    if (error == cudaSuccess) return;
    if (error != cudaErrorNotReady) check_cuda(error, "running " + describe_call(call));
    try {
      check();
      if (std::chrono::steady_clock::now() - start > options_.communicator->limit()) {
        throw_failed(missing_text(call));
      }
    } catch (const UserError& error) {
      abort(error.what());
      throw;
    }
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}

void NcclGroup::exchange(const CudaKernelArguments& args, const CollectiveCall& call,
                         std::span<const PeerBlock> sends, std::span<const PeerBlock> receives,
                         std::span<const PeerWhole> wholes) {
  const bool by_host = *options_.is_first_run;
  std::optional<Alarm> alarm;  // NCCL may connect further ways now
  if (by_host) {
    check_cuda(cudaStreamSynchronize(args.stream), "running what comes before a collective");
    const std::byte nothing{};
    gather(&nothing, 1, call);
    alarm.emplace(connect_limit(), alarm_text("carry out " + describe_call(call)));
  }
  is_idle_ = false;
  options_.pace->begin(args.stream);
  launch_mark(args, options_.progress, call.index);
  const auto carry_out = [&](ncclResult_t result) {
    if (result != ncclSuccess) require(result, comm_, "carry out " + describe_call(call));
  };
  carry_out(ncclGroupStart());
  for (const PeerWhole& whole : wholes) {
    carry_out(ncclAllGather(whole.own, whole.all, static_cast<size_t>(whole.bytes), ncclInt8, comm_,
                            args.stream));
  }
  carry_out(ncclGroupEnd());
  carry_out(ncclGroupStart());
  for (const PeerBlock& block : sends) {
    carry_out(ncclSend(block.data, static_cast<size_t>(block.bytes), ncclInt8, block.place, comm_,
                       args.stream));
  }
  for (const PeerBlock& block : receives) {
    carry_out(ncclRecv(block.data, static_cast<size_t>(block.bytes), ncclInt8, block.place, comm_,
                       args.stream));
  }
  carry_out(ncclGroupEnd());
  launch_mark(args, options_.progress, kNoProgress);
  options_.pace->end(args.stream);
  if (by_host) wait_for(args.stream, call);
}

void NcclGroup::send(const CudaKernelArguments& args, const CollectiveCall& call, int place) {
  Way& way = to(place);
  const CudaTensor& x = args.input(0);
  const auto bytes = static_cast<size_t>(bytes_of(x));
  if (*options_.is_first_run) {
    std::vector<std::byte>& copy = way.by_host.emplace_back(bytes);
    check_cuda(cudaMemcpyAsync(copy.data(), x.data, bytes, cudaMemcpyDeviceToHost, args.stream),
               "copying a message to the host");
    check_cuda(cudaStreamSynchronize(args.stream), "copying a message to the host");
    options_.communicator->send(call, view_of(x, copy.data()), place);
    return;
  }
  is_idle_ = false;
  CUevent_st* const ended = way.ended[way.sent++ % way.ended.size()];
  check_cuda(cudaEventRecord(way.posted, args.stream), "recording an event");
  check_cuda(cudaStreamWaitEvent(way.stream, way.posted), "waiting for an event");
  require(ncclSend(x.data, bytes, ncclInt8, 1, way.comm, way.stream), way.comm,
          "carry out " + describe_call(call));
  check_cuda(cudaEventRecord(ended, way.stream), "recording an event");
}

void NcclGroup::finish_send(const CudaKernelArguments& args, const CollectiveCall& call,
                            int place) {
  Way& way = to(place);
  if (*options_.is_first_run) {
    options_.communicator->finish_send(call, place);
    way.by_host.pop_front();
    return;
  }
  CUevent_st* const ended = way.ended[way.finished++ % way.ended.size()];
  options_.pace->begin(args.stream);
  launch_mark(args, options_.progress, call.index);
  check_cuda(cudaStreamWaitEvent(args.stream, ended), "waiting for an event");
  launch_mark(args, options_.progress, kNoProgress);
  options_.pace->end(args.stream);
}

void NcclGroup::receive(const CudaKernelArguments& args, const CollectiveCall& call, int place) {
  Way& way = from(place);
  const CudaTensor& y = args.output(0);
  const auto bytes = static_cast<size_t>(bytes_of(y));
  if (*options_.is_first_run) {
    std::vector<std::byte> copy(bytes);
    options_.communicator->receive(call, view_of(y, copy.data()), place);
    check_cuda(cudaMemcpyAsync(y.data, copy.data(), bytes, cudaMemcpyHostToDevice, args.stream),
               "copying a message from the host");
    check_cuda(cudaStreamSynchronize(args.stream), "copying a message from the host");
    return;
  }
  is_idle_ = false;
  options_.pace->begin(args.stream);
  launch_mark(args, options_.progress, call.index);
  require(ncclRecv(y.data, bytes, ncclInt8, 0, way.comm, args.stream), way.comm,
          "carry out " + describe_call(call));
  launch_mark(args, options_.progress, kNoProgress);
  options_.pace->end(args.stream);
}

void NcclGroup::check() const {
  const auto look = [this](ncclComm* comm) {
    if (comm == nullptr) return;
    ncclResult_t error = ncclSuccess;
    require(ncclCommGetAsyncError(comm, &error), comm, "say how it is");
    require(error, comm, "exchange");
  };
  look(comm_);
  for (const std::unique_ptr<Way>& way : ways_) look(way->comm);
}

void NcclGroup::abort(const std::string& reason) {
  const Alarm alarm(kGiveUpLimit, reason);
  const auto end = [](ncclComm*& comm) {
    if (comm != nullptr) ncclCommAbort(std::exchange(comm, nullptr));
  };
  end(comm_);
  for (const std::unique_ptr<Way>& way : ways_) end(way->comm);
}

std::string NcclGroup::missing_text(const CollectiveCall& call) const {
  const Communicator& communicator = *options_.communicator;
  std::vector<int32_t> others;
  for (int place = 0; place < communicator.size(); ++place) {
    if (place != communicator.rank()) others.push_back(communicator.rank_at(place));
  }
  return fmt::format("Rank {} timed out ({} s) in {}, waiting for {} {}. All ranks end.",
                     communicator.rank_at(communicator.rank()),
                     std::chrono::duration<double>(communicator.limit()).count(),
                     describe_call(call), others.size() == 1 ? "rank" : "one of the ranks",
                     fmt::join(others, ", "));
}

}  // namespace troupe
