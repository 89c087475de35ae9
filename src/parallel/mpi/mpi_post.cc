#include "parallel/mpi/mpi_post.h"

#include <algorithm>
#include <deque>
#include <fmt/format.h>
#include <mpi.h>
#include <utility>
#include <vector>

#include "base/error.h"

namespace troupe {
namespace {

constexpr int kNoteTag = 0;
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

}  // namespace

struct MpiPost::State {
  struct SentNote {
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
  std::deque<SentNote> notes;  // under way
  std::vector<Slot> slots;     // of transfers
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
  set_place(rank, size, find_machines(state_->world, rank, size));
}

MpiPost::~MpiPost() = default;

void MpiPost::send_note(int to, std::string bytes) {
  std::deque<State::SentNote>& notes = state_->notes;
  while (!notes.empty()) {
    int done = 0;
    check(MPI_Test(&notes.front().request, &done, MPI_STATUS_IGNORE), "send");
    if (done == 0) break;
    notes.pop_front();
  }
  State::SentNote& note = notes.emplace_back();
  note.bytes = std::move(bytes);
  check(MPI_Isend(note.bytes.data(), static_cast<int>(note.bytes.size()), MPI_BYTE, to, kNoteTag,
                  state_->world, &note.request),
        "send");
}

std::optional<MpiPost::Note> MpiPost::next_note() {
  int found = 0;
  MPI_Status status;
  check(MPI_Iprobe(MPI_ANY_SOURCE, kNoteTag, state_->world, &found, &status), "receive");
  if (found == 0) return std::nullopt;
  int bytes = 0;
  check(MPI_Get_count(&status, MPI_BYTE, &bytes), "receive");
  Note note{.from = status.MPI_SOURCE, .bytes = std::string(static_cast<size_t>(bytes), '\0')};
  check(MPI_Recv(note.bytes.data(), bytes, MPI_BYTE, note.from, kNoteTag, state_->world,
                 MPI_STATUS_IGNORE),
        "receive");
  return note;
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
    TROUPE_CHECK(bytes == slot.received, "a rank has sent less than is expected");
  }
  return true;
}

void MpiPost::finish() {
  for (State::SentNote& note : state_->notes) {
    check(MPI_Wait(&note.request, MPI_STATUS_IGNORE), "send");
  }
  state_->notes.clear();
  MPI_Comm_free(&state_->world);
  check(MPI_Finalize(), "end");
}

void MpiPost::abort(int status) {
  MPI_Abort(MPI_COMM_WORLD, status);
}

}  // namespace troupe
