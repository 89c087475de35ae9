#include "comm/mpi/mpi_post.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <deque>
#include <fmt/format.h>
#include <mpi.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <thread>
#include <unistd.h>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/text.h"
#include "comm/mpi/mpi_entry.h"

namespace troupe {
namespace {

constexpr int kMessageTag = 0;
constexpr int kFirstChannelTag = 1;
// MPI counts in int; longer blocks are cut.
constexpr int64_t kLongestBlock = int64_t{1} << 30;

void check(int code, const char* action) {
  if (code == MPI_SUCCESS) return;
  std::string text(MPI_MAX_ERROR_STRING, '\0');
  int length = 0;
  MPI_Error_string(code, text.data(), &length);
  text.resize(static_cast<size_t>(length));
  throw_failed(fmt::format("MPI cannot {}: {}.", action, text));
}

// Where bytes lie, for one message. Absolute addresses, to be used with MPI_BOTTOM.
class BlocksType {
 public:
  explicit BlocksType(std::span<const Block> blocks) {
    std::vector<int> lengths;
    std::vector<MPI_Aint> addresses;
    for (const Block& block : blocks) {
      for (int64_t at = 0; at < block.bytes; at += kLongestBlock) {
        MPI_Aint address = 0;
        check(MPI_Get_address(static_cast<std::byte*>(block.data) + at, &address), "take memory");
        addresses.push_back(address);
        lengths.push_back(static_cast<int>(std::min(kLongestBlock, block.bytes - at)));
      }
      bytes_ += block.bytes;
    }
    check(MPI_Type_create_hindexed(static_cast<int>(lengths.size()), lengths.data(),
                                   addresses.data(), MPI_BYTE, &type_),
          "describe memory");
    check(MPI_Type_commit(&type_), "describe memory");
  }
  ~BlocksType() { MPI_Type_free(&type_); }  // messages under way keep what they need
  BlocksType(const BlocksType&) = delete;
  BlocksType& operator=(const BlocksType&) = delete;

  MPI_Datatype type() const { return type_; }
  int64_t bytes() const { return bytes_; }

 private:
  MPI_Datatype type_ = MPI_DATATYPE_NULL;
  int64_t bytes_ = 0;
};

std::vector<int32_t> find_machines(MPI_Comm world, int rank, int size) {
  MPI_Comm machine = MPI_COMM_NULL;
  check(MPI_Comm_split_type(world, MPI_COMM_TYPE_SHARED, rank, MPI_INFO_NULL, &machine),
        "find the ranks of this machine");
  const auto own = static_cast<int32_t>(rank);
  int32_t first = own;
  check(MPI_Allreduce(&own, &first, 1, MPI_INT32_T, MPI_MIN, machine),
        "find the ranks of this machine");
  MPI_Comm_free(&machine);
  std::vector<int32_t> machines(static_cast<size_t>(size));
  check(MPI_Allgather(&first, 1, MPI_INT32_T, machines.data(), 1, MPI_INT32_T, world),
        "find the machines of all ranks");
  return machines;
}

std::vector<std::string> find_processes(MPI_Comm world, int size) {
  // A rank's: the name of its machine, which ends with a zero, and its process.
  constexpr size_t kLongestName = 64;
  using Place = std::array<char, kLongestName + sizeof(int32_t)>;
  std::array<char, MPI_MAX_PROCESSOR_NAME + 1> name{};
  int length = 0;
  check(MPI_Get_processor_name(name.data(), &length), "name this machine");
  Place own{};
  std::copy_n(name.begin(), std::min(kLongestName - 1, static_cast<size_t>(length)), own.begin());
  const auto process = static_cast<int32_t>(getpid());
  std::memcpy(own.data() + kLongestName, &process, sizeof(process));
  std::vector<Place> all(static_cast<size_t>(size));
  check(MPI_Allgather(own.data(), static_cast<int>(own.size()), MPI_BYTE, all.data(),
                      static_cast<int>(own.size()), MPI_BYTE, world),
        "find the processes of all ranks");
  std::vector<std::string> processes;
  for (const Place& place : all) {
    int32_t number = 0;
    std::memcpy(&number, place.data() + kLongestName, sizeof(number));
    processes.push_back(fmt::format("{}, process {}", printable(place.data()), number));
  }
  return processes;
}

}  // namespace

struct MpiPost::State {
  struct SentMessage {
    std::string bytes;
    MPI_Request request = MPI_REQUEST_NULL;
  };
  struct Slot {
    MPI_Request request = MPI_REQUEST_NULL;
    int64_t received = -1;  // the bytes that must come; -1: they are sent
    bool in_use = false;
  };

  size_t free_slot() {
    const auto found =
        std::find_if(slots.begin(), slots.end(), [](const Slot& slot) { return !slot.in_use; });
    const auto index = static_cast<size_t>(found - slots.begin());
    if (found == slots.end()) slots.emplace_back();
    slots[index] = {.request = MPI_REQUEST_NULL, .received = -1, .in_use = true};
    return index;
  }

  MPI_Comm world = MPI_COMM_NULL;
  std::deque<SentMessage> messages;  // under way
  std::vector<Slot> slots;           // of transfers
};

std::string MpiPost::library() {
  std::string text(MPI_MAX_LIBRARY_VERSION_STRING, '\0');
  int length = 0;
  if (MPI_Get_library_version(text.data(), &length) != MPI_SUCCESS) return "MPI";
  text.resize(static_cast<size_t>(length));
  return text.substr(0, text.find_first_of(",\n"));
}

MpiPost::MpiPost() : state_(std::make_unique<State>()) {
  int provided = MPI_THREAD_SINGLE;
  check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &provided), "start");
  if (provided < MPI_THREAD_SERIALIZED) {
    throw_failed("This MPI library cannot be called by several threads of a process in turn.");
  }
  check(MPI_Comm_dup(MPI_COMM_WORLD, &state_->world), "start");
  check(MPI_Comm_set_errhandler(state_->world, MPI_ERRORS_RETURN), "start");
  int rank = 0;
  int size = 1;
  check(MPI_Comm_rank(state_->world, &rank), "start");
  check(MPI_Comm_size(state_->world, &size), "start");
  set_place(rank, find_machines(state_->world, rank, size), find_processes(state_->world, size));
}

MpiPost::~MpiPost() = default;

void MpiPost::send_message(int to, std::string bytes) {
  std::deque<State::SentMessage>& messages = state_->messages;
  while (!messages.empty()) {
    int done = 0;
    check(MPI_Test(&messages.front().request, &done, MPI_STATUS_IGNORE), "send");
    if (done == 0) break;
    messages.pop_front();
  }
  State::SentMessage& message = messages.emplace_back();
  message.bytes = std::move(bytes);
  check(MPI_Isend(message.bytes.data(), static_cast<int>(message.bytes.size()), MPI_BYTE, to,
                  kMessageTag, state_->world, &message.request),
        "send");
}

std::optional<MpiPost::Message> MpiPost::next_message() {
  int found = 0;
  MPI_Status status;
  check(MPI_Iprobe(MPI_ANY_SOURCE, kMessageTag, state_->world, &found, &status), "receive");
  if (found == 0) return std::nullopt;
  int bytes = 0;
  check(MPI_Get_count(&status, MPI_BYTE, &bytes), "receive");
  Message message{.from = status.MPI_SOURCE,
                  .bytes = std::string(static_cast<size_t>(bytes), '\0')};
  check(MPI_Recv(message.bytes.data(), bytes, MPI_BYTE, message.from, kMessageTag, state_->world,
                 MPI_STATUS_IGNORE),
        "receive");
  return message;
}

MpiPost::Transfer MpiPost::send(int to, int channel, std::span<const Block> blocks) {
  const BlocksType type(blocks);
  const size_t slot = state_->free_slot();
  check(MPI_Isend(MPI_BOTTOM, 1, type.type(), to, kFirstChannelTag + channel, state_->world,
                  &state_->slots[slot].request),
        "send");
  return slot;
}

MpiPost::Transfer MpiPost::receive(int from, int channel, std::span<const Block> blocks) {
  const BlocksType type(blocks);
  const size_t slot = state_->free_slot();
  state_->slots[slot].received = type.bytes();
  check(MPI_Irecv(MPI_BOTTOM, 1, type.type(), from, kFirstChannelTag + channel, state_->world,
                  &state_->slots[slot].request),
        "receive");
  return slot;
}

bool MpiPost::done(Transfer transfer) {
  State::Slot& slot = state_->slots[transfer];
  TROUPE_CHECK(slot.in_use, "a transfer that is over");
  int done = 0;
  MPI_Status status;
  check(MPI_Test(&slot.request, &done, &status), "finish a transfer");
  if (done == 0) return false;
  slot.in_use = false;
  if (slot.received >= 0) {
    MPI_Count bytes = 0;
    check(MPI_Get_elements_x(&status, MPI_BYTE, &bytes), "receive");
    if (bytes != slot.received) throw_failed("A rank has sent less than is expected.");
  }
  return true;
}

void MpiPost::finish() {
  for (State::SentMessage& message : state_->messages) {
    check(MPI_Wait(&message.request, MPI_STATUS_IGNORE), "send");
  }
  state_->messages.clear();
  MPI_Comm_free(&state_->world);
  check(MPI_Finalize(), "end");
}

namespace {

// MPICH's launcher drops what it has not read from its pipe when a process aborts, and with it the
// message that says why.
void wait_until_read(int descriptor) {
  constexpr auto kLimit = std::chrono::seconds(5);
  struct stat file = {};
  if (fstat(descriptor, &file) != 0 || !S_ISFIFO(file.st_mode)) return;
  const auto end = std::chrono::steady_clock::now() + kLimit;
  int unread = 0;
  while (ioctl(descriptor, FIONREAD, &unread) == 0 && unread > 0 &&
         std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace

void MpiPost::abort(int status) {
  wait_until_read(STDOUT_FILENO);
  wait_until_read(STDERR_FILENO);
  MPI_Abort(MPI_COMM_WORLD, status);
}

}  // namespace troupe

extern "C" __attribute__((visibility("default"))) const troupe::MpiEntry troupe_mpi_entry = {
    .name = troupe::MpiPost::library,
    .join = []() -> troupe::Post* { return new troupe::MpiPost; }};
