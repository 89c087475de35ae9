#include "comm/cuda/peer_connection.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <cuda_runtime.h>
#include <new>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <unistd.h>

#include "comm/collective_messages.h"
#include "program/cuda/check.h"
#include "program/op_spec.h"

namespace troupe {
namespace {

constexpr size_t kMemories = 3;  // of a rank: boards, arena, state
constexpr int64_t kAbsent = -1;
constexpr int kMemoryShift = 48;  // an operand: number of the memory, offset in it

uint64_t hash_of_machine() {
  std::array<char, 256> name{};
  gethostname(name.data(), name.size() - 1);
  uint64_t hash = 14695981039346656037ULL;
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211ULL;
  return hash;
}

int current_gpu() {
  int gpu = 0;
  check_cuda(cudaGetDevice(&gpu), "asking for the GPU in use");
  return gpu;
}

void refuse_larger_group(size_t size, size_t most, const std::string& kinds) {
  if (size <= most) return;
  throw_bad_request("--device cuda: a group of " + std::to_string(size) + " ranks (" + kinds +
                    "); at most " + std::to_string(most) + " can work together.");
}

bool is_in(RankGroup kind, const Op& op) {
  return op.spec->group != nullptr && op.spec->group(op.attributes) == kind;
}

// Every rank's `own`, by place.
std::vector<int64_t> gather_numbers(Communicator& communicator, std::span<const int64_t> own,
                                    ThreadPool& pool) {
  std::vector<int64_t> mine(own.begin(), own.end());
  std::vector<int64_t> all(mine.size() * static_cast<size_t>(communicator.size()));
  const TensorView from{mine.data(), DType::i64, Shape{static_cast<int64_t>(mine.size())}, nullptr};
  const TensorView to{all.data(), DType::i64, Shape{static_cast<int64_t>(all.size())}, nullptr};
  communicator.all_gather({}, from, to, pool);
  return all;
}

}  // namespace

// What a rank tells the members of a group about itself, as numbers.
struct PeerConnection::Greeting {
  static constexpr size_t kHandleWords = sizeof(cudaIpcMemHandle_t) / sizeof(int64_t);
  int64_t machine = 0;
  int64_t process = 0;
  int64_t gpu = 0;  // as its process counts
  std::array<int64_t, kMemories> base{};
  std::array<int64_t, kMemories> bytes{};
  std::array<std::array<int64_t, kHandleWords>, kMemories> handles{};
  int64_t numbers = 0;                      // of operands of its collectives
  std::array<int64_t, kMostPeers> sends{};  // messages to each member
};

// Of one kind, as this rank sees it.
struct PeerConnection::Group {
  Communicator* communicator = nullptr;
  std::vector<Greeting> greetings;                        // by place
  std::vector<std::array<std::byte*, kMemories>> memory;  // by place, on this GPU
  std::byte* address(int place, int64_t code) const {
    if (code == kAbsent) return nullptr;
    return memory[static_cast<size_t>(place)][static_cast<size_t>(code >> kMemoryShift)] +
           (code & ((int64_t{1} << kMemoryShift) - 1));
  }
};

bool PeerConnection::is_needed(const Program& program) {
  for (int32_t index = 0; index < program.op_count(); ++index) {
    if (program.op(index).spec->group != nullptr) return true;
  }
  return false;
}

PeerConnection::PeerConnection(const Program& program, const Communicators& communicators,
                               std::vector<PeerMemory> memory)
    : program_(program),
      communicators_(communicators),
      memory_(std::move(memory)),
      fault_(nullptr,
             [](PeerFault* fault) {
               if (fault != nullptr) cudaFreeHost(fault);
             }),
      progress_(nullptr, [](int32_t* progress) {
        if (progress != nullptr) cudaFreeHost(progress);
      }) {
  TROUPE_CHECK(memory_.size() + 1 == kMemories, "the memories of a rank");
  void* address = nullptr;
  check_cuda(cudaMallocHost(&address, sizeof(PeerFault)), "allocating memory of the host");
  fault_.reset(new (address) PeerFault);
  check_cuda(cudaMallocHost(&address, sizeof(int32_t)), "allocating memory of the host");
  progress_.reset(new (address) int32_t(kNoProgress));
  const size_t bytes = kRankGroupCount * sizeof(PeerBoard);
  check_cuda(cudaMalloc(&address, bytes), "allocating flags");
  memory_.insert(memory_.begin(), {static_cast<std::byte*>(address), bytes});
  check_cuda(cudaMemset(address, 0, bytes), "clearing flags");
  check_cuda(cudaStreamSynchronize(nullptr), "clearing flags");
}

PeerConnection::~PeerConnection() {
  for (void* memory : opened_) cudaIpcCloseMemHandle(memory);
  cudaFree(memory_.front().data);
}

int64_t PeerConnection::encode(const void* address) const {
  if (address == nullptr) return kAbsent;
  for (size_t i = 0; i < memory_.size(); ++i) {
    const auto offset =
        reinterpret_cast<intptr_t>(address) - reinterpret_cast<intptr_t>(memory_[i].data);
    if (memory_[i].data == nullptr || offset < 0 ||
        offset >= static_cast<int64_t>(memory_[i].bytes)) {
      continue;
    }
    return (static_cast<int64_t>(i) << kMemoryShift) | offset;
  }
  return kAbsent;  // of no bytes, and where the memory ends
}

void PeerConnection::open_memory(const Greeting& own, Group& group) const {
  group.memory.resize(group.greetings.size());
  for (size_t place = 0; place < group.greetings.size(); ++place) {
    const Greeting& other = group.greetings[place];
    const std::string rank =
        "rank " + std::to_string(group.communicator->rank_at(static_cast<int>(place)));
    if (other.machine != own.machine) {
      throw_bad_request("--device cuda: " + rank +
                        " is on another machine, whose GPUs cannot be reached through memory. "
                        "Leave --gpu-exchange peer out.");
    }
    const bool same_process = other.process == own.process;
    if (same_process && other.gpu != own.gpu) {
      int can = 0;
      check_cuda(
          cudaDeviceCanAccessPeer(&can, static_cast<int>(own.gpu), static_cast<int>(other.gpu)),
          "asking for peer access");
      if (can == 0) {
        throw_failed("GPU " + std::to_string(own.gpu) + " cannot reach the memory of GPU " +
                     std::to_string(other.gpu) + " (" + rank +
                     "), which several ranks need. Use --gpu-exchange nccl.");
      }
      const cudaError_t error = cudaDeviceEnablePeerAccess(static_cast<int>(other.gpu), 0);
      if (error == cudaErrorPeerAccessAlreadyEnabled) {
        cudaGetLastError();  // is not remembered
      } else {
        check_cuda(error, "enabling peer access");
      }
    }
    for (size_t i = 0; i < kMemories; ++i) {
      if (other.bytes[i] == 0) continue;
      std::byte*& memory = group.memory[place][i];
      if (same_process) {
        memory = reinterpret_cast<std::byte*>(other.base[i]);
        continue;
      }
      cudaIpcMemHandle_t handle;
      std::memcpy(&handle, other.handles[i].data(), sizeof(handle));
      void* opened = nullptr;
      check_cuda(cudaIpcOpenMemHandle(&opened, handle, cudaIpcMemLazyEnablePeerAccess),
                 "opening memory of " + rank);
      opened_.push_back(opened);
      memory = static_cast<std::byte*>(opened);
    }
  }
}

void PeerConnection::connect_group(RankGroup kind, std::span<CudaKernelArguments* const> arguments,
                                   ThreadPool& pool) {
  Group group;
  group.communicator = communicators_.of(kind);
  Communicator& communicator = *group.communicator;
  const int size = communicator.size();
  refuse_larger_group(static_cast<size_t>(size), kMostPeers, std::string(name_of(kind)));

  // This rank's operands, in the order of its collectives; and its messages, by receiver.
  std::vector<int64_t> operands;
  std::vector<std::vector<int64_t>> sent(static_cast<size_t>(size));
  for (int32_t index = 0; index < program_.op_count(); ++index) {
    const Op& op = program_.op(index);
    if (!is_in(kind, op)) continue;
    const CudaKernelArguments& own = *arguments[static_cast<size_t>(index)];
    if (const std::optional<MessageUse> message = message_use(op)) {
      if (message->action == MessageUse::Action::send) {
        sent[static_cast<size_t>(message->peer)].push_back(encode(own.input(0).data));
      }
      continue;
    }
    for (const CudaTensor& tensor : own.inputs) operands.push_back(encode(tensor.data));
    for (const CudaTensor& tensor : own.outputs) operands.push_back(encode(tensor.data));
    operands.push_back(encode(own.scratch));
  }

  Greeting greeting;
  greeting.machine = static_cast<int64_t>(hash_of_machine());
  greeting.process = getpid();
  greeting.gpu = current_gpu();
  greeting.numbers = static_cast<int64_t>(operands.size());
  for (size_t i = 0; i < kMemories; ++i) {
    const PeerMemory& memory = memory_[i];
    greeting.base[i] = reinterpret_cast<int64_t>(memory.data);
    greeting.bytes[i] = memory.data == nullptr ? 0 : static_cast<int64_t>(memory.bytes);
    if (greeting.bytes[i] == 0) continue;
    // Threads can do without; other processes will say that they cannot open it.
    cudaIpcMemHandle_t handle;
    if (cudaIpcGetMemHandle(&handle, memory.data) != cudaSuccess) {
      cudaGetLastError();  // is not remembered
      continue;
    }
    std::memcpy(greeting.handles[i].data(), &handle, sizeof(handle));
  }
  for (size_t place = 0; place < sent.size(); ++place) {
    greeting.sends[place] = static_cast<int64_t>(sent[place].size());
  }
  static_assert(sizeof(Greeting) % sizeof(int64_t) == 0);
  constexpr size_t kWords = sizeof(Greeting) / sizeof(int64_t);
  std::array<int64_t, kWords> words;
  std::memcpy(words.data(), &greeting, sizeof(greeting));
  const std::vector<int64_t> all_words = gather_numbers(communicator, words, pool);
  group.greetings.resize(static_cast<size_t>(size));
  std::memcpy(static_cast<void*>(group.greetings.data()), all_words.data(),
              all_words.size() * sizeof(int64_t));
  open_memory(greeting, group);

  int64_t most_sends = 0;
  for (const Greeting& each : group.greetings) {
    TROUPE_CHECK(each.numbers == greeting.numbers, "ranks of a group run other collectives");
    most_sends = std::max(most_sends, *std::max_element(each.sends.begin(), each.sends.end()));
  }
  std::vector<int64_t> all_operands;
  if (!operands.empty()) all_operands = gather_numbers(communicator, operands, pool);
  std::vector<int64_t> all_sent;  // by sender, receiver, number
  if (most_sends > 0) {
    std::vector<int64_t> padded;
    for (const std::vector<int64_t>& each : sent) {
      padded.insert(padded.end(), each.begin(), each.end());
      padded.resize(padded.size() + static_cast<size_t>(most_sends) - each.size(), kAbsent);
    }
    all_sent = gather_numbers(communicator, padded, pool);
  }

  PeerGroup members{.rank = communicator.rank(), .size = size};
  members.fault = fault_.get();
  members.waits_on_host = &waits_on_host_;
  members.limit_ns = static_cast<uint64_t>(std::chrono::nanoseconds(communicator.limit()).count());
  for (int place = 0; place < size; ++place) {
    members.boards[static_cast<size_t>(place)] =
        reinterpret_cast<PeerBoard*>(group.memory[static_cast<size_t>(place)][0]) +
        static_cast<int>(kind);
  }

  size_t next_operand = 0;
  std::vector<int64_t> received(static_cast<size_t>(size), 0);
  for (int32_t index = 0; index < program_.op_count(); ++index) {
    const Op& op = program_.op(index);
    if (!is_in(kind, op)) continue;
    CudaKernelArguments& own = *arguments[static_cast<size_t>(index)];
    if (const std::optional<MessageUse> message = message_use(op)) {
      const std::byte* source = nullptr;
      if (message->action == MessageUse::Action::receive) {
        const int from = message->peer;
        const int64_t number = received[static_cast<size_t>(from)]++;
        TROUPE_CHECK(
            number <
                group.greetings[static_cast<size_t>(from)].sends[static_cast<size_t>(members.rank)],
            "a message that no rank sends");
        source = group.address(
            from,
            all_sent[static_cast<size_t>((from * size + members.rank) * most_sends + number)]);
      }
      peers_.push_back(std::make_unique<CudaPeers>(members, index, source));
    } else {
      const size_t count = own.inputs.size() + own.outputs.size() + 1;
      std::vector<std::byte*> addresses;
      for (int place = 0; place < size; ++place) {
        const size_t first = static_cast<size_t>(place) * operands.size() + next_operand;
        for (size_t i = 0; i < count; ++i) {
          addresses.push_back(group.address(place, all_operands[first + i]));
        }
      }
      next_operand += count;
      peers_.push_back(
          std::make_unique<CudaPeers>(members, index, static_cast<int>(own.inputs.size()),
                                      static_cast<int>(own.outputs.size()), std::move(addresses)));
    }
    own.peers = peers_.back().get();
  }
}

// The unique numbers of NCCL's communicators, and the messages that ranks send each other, travel
// by way of the hosts.
void PeerConnection::connect_staged(Communicator& communicator,
                                    std::span<CudaKernelArguments* const> arguments,
                                    ThreadPool& pool) {
  std::string kinds;
  for (int i = 0; i < kRankGroupCount; ++i) {
    const auto kind = static_cast<RankGroup>(i);
    if (communicators_.of(kind) != &communicator || !is_staged(kind)) continue;
    kinds += (kinds.empty() ? "" : ", ") + std::string(name_of(kind));
  }
  const auto is_here = [&](const Op& op) {
    if (op.spec->group == nullptr) return false;
    const RankGroup kind = op.spec->group(op.attributes);
    return is_staged(kind) && communicators_.of(kind) == &communicator;
  };
  const auto size = static_cast<size_t>(communicator.size());
  refuse_larger_group(size, kMostMembers, kinds);
  std::vector<int64_t> own(size + 1, 0);  // messages by receiver, then collectives
  for (int32_t index = 0; index < program_.op_count(); ++index) {
    const Op& op = program_.op(index);
    if (!is_here(op)) continue;
    const std::optional<MessageUse> message = message_use(op);
    if (!message) {
      ++own[size];
    } else if (message->action == MessageUse::Action::send) {
      ++own[static_cast<size_t>(message->peer)];
    }
  }
  const std::vector<int64_t> all = gather_numbers(communicator, own, pool);
  std::vector<std::vector<int64_t>> messages(size);
  bool any = false;
  for (size_t place = 0; place < size; ++place) {
    const auto begin = all.begin() + static_cast<std::ptrdiff_t>(place * own.size());
    messages[place].assign(begin, begin + static_cast<std::ptrdiff_t>(size));
    any |= std::any_of(begin, begin + static_cast<std::ptrdiff_t>(own.size()),
                       [](int64_t count) { return count > 0; });
    TROUPE_CHECK(all[place * own.size() + size] == own[size],
                 "ranks of a group run other collectives");
  }
  if (!any) return;
  if (pace_ == nullptr) {
    pace_ = std::make_unique<NcclPace>([this](const std::function<int()>& query) {
      check_cuda(static_cast<cudaError_t>(watch(query)), "running a collective");
    });
  }
  nccl_.push_back(std::make_unique<NcclGroup>(NcclGroup::Options{.name = kinds,
                                                                 .communicator = &communicator,
                                                                 .pool = &pool,
                                                                 .has_collectives = own[size] > 0,
                                                                 .messages = std::move(messages),
                                                                 .progress = progress_.get(),
                                                                 .is_first_run = &waits_on_host_,
                                                                 .pace = pace_.get()}));
  const PeerGroup members{.rank = communicator.rank(), .size = communicator.size()};
  for (int32_t index = 0; index < program_.op_count(); ++index) {
    const Op& op = program_.op(index);
    if (!is_here(op)) continue;
    CudaKernelArguments& of_op = *arguments[static_cast<size_t>(index)];
    std::vector<std::byte*> operands;
    for (const CudaTensor& tensor : of_op.inputs) {
      operands.push_back(static_cast<std::byte*>(tensor.data));
    }
    for (const CudaTensor& tensor : of_op.outputs) {
      operands.push_back(static_cast<std::byte*>(tensor.data));
    }
    operands.push_back(of_op.scratch);
    peers_.push_back(std::make_unique<CudaPeers>(*nccl_.back(), members, op, index,
                                                 static_cast<int>(of_op.inputs.size()),
                                                 static_cast<int>(of_op.outputs.size()), operands));
    of_op.peers = peers_.back().get();
  }
}

void PeerConnection::connect(std::span<CudaKernelArguments* const> arguments, ThreadPool& pool) {
  std::set<const Communicator*> staged;
  for (int i = 0; i < kRankGroupCount; ++i) {
    const auto kind = static_cast<RankGroup>(i);
    if (communicators_.of(kind) == nullptr) continue;
    if (!is_staged(kind)) {
      connect_group(kind, arguments, pool);
    } else if (staged.insert(communicators_.of(kind)).second) {
      connect_staged(*communicators_.of(kind), arguments, pool);
    }
  }
  for (int32_t index = 0; index < program_.op_count(); ++index) {
    TROUPE_CHECK(program_.op(index).spec->group == nullptr ||
                     arguments[static_cast<size_t>(index)]->peers != nullptr,
                 std::string("no communicator for ") + program_.op(index).spec->name);
  }
}

void PeerConnection::barrier_on_host(ThreadPool& pool) const {
  for (Communicator* const communicator : communicators_.members) {
    const std::array<int64_t, 1> nothing{};
    if (communicator != nullptr) gather_numbers(*communicator, nothing, pool);
  }
}

void PeerConnection::wait(CUstream_st* stream, const std::string& what) {
  const auto query = [stream] { return static_cast<int>(cudaStreamQuery(stream)); };
  const auto error =
      nccl_.empty() ? cudaStreamSynchronize(stream) : static_cast<cudaError_t>(watch(query));
  // A rank that was missing is the cause of whatever else goes wrong.
  check_flags();
  check_cuda(error, what);
  for (const std::unique_ptr<NcclGroup>& group : nccl_) group->is_idle();
}

// NCCL waits for a rank without limit, so the host looks how long the GPU has been in an operation.
int PeerConnection::watch(const std::function<int()>& query) {
  using Clock = std::chrono::steady_clock;
  constexpr int kLooks = 256;  // between those at NCCL's own errors, which take longer
  const volatile int32_t* const progress = progress_.get();
  int32_t seen = kNoProgress;
  Clock::time_point since = Clock::now();
  for (int look = 1;; ++look) {
    const int error = query();
    if (error != cudaErrorNotReady) return error;
    if (*progress != seen) {
      seen = *progress;
      since = Clock::now();
    }
    try {
      if (look % kLooks == 0) {
        for (const std::unique_ptr<NcclGroup>& group : nccl_) group->check();
      }
      if (seen != kNoProgress) check_progress(seen, Clock::now() - since);
    } catch (const UserError& reason) {
      for (const std::unique_ptr<NcclGroup>& group : nccl_) group->abort(reason.what());
      throw;
    }
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}

void PeerConnection::check_progress(int32_t index, std::chrono::nanoseconds waited) const {
  const Op& op = program_.op(index);
  const Communicator& communicator = *communicators_.of(op.spec->group(op.attributes));
  if (waited <= communicator.limit()) return;
  for (const std::unique_ptr<NcclGroup>& group : nccl_) {
    if (&group->communicator() != &communicator) continue;
    throw UserError(ExitStatus::failed, group->missing_text({&op, index}));
  }
  TROUPE_CHECK(false, "no NCCL group for the operation that waits");
}

void PeerConnection::check_flags() const {
  const volatile PeerFault* const fault = fault_.get();
  if (fault->happened == 0) return;
  const int32_t index = fault->op;
  const Op& op = program_.op(index);
  Communicator& communicator = *communicators_.of(op.spec->group(op.attributes));
  const std::array absent = {AbsentRank{.rank = communicator.rank_at(fault->place)}};
  throw UserError(ExitStatus::failed, missing_message(communicator.rank_at(communicator.rank()), {},
                                                      site_of({.op = &op, .index = index}),
                                                      communicator.limit(), absent));
}

}  // namespace troupe
