// Ranks as processes that exchange messages through a post, one rank each.
//
// A rank that comes to a collective announces it to all other members, with what it calls; so every
// member knows who is missing, and whether all call the same, before it takes anything from
// anybody. Tensors go straight to their receivers. Sums are taken by the same code as between
// threads (ordered_sum.h), in the same order: a rank gets the terms of its share from all others,
// sums them, and where all ranks need the sum, sends it to them.
//
// Terms that wait to be summed take memory of their own, beside the memory plan: at most 16 MiB per
// call.
//
// Several threads of a rank may call at the same time, for different members. A thread of the
// group's own keeps messages moving that this rank has sent and not finished, while it computes: a
// post does nothing unless it is called. It also answers other ranks, which ask in waits without
// limit: so a rank that is dead can be told from one that writes to a slow disk.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "comm/collective_messages.h"
#include "comm/post/post.h"
#include "comm/process_group.h"
#include "comm/processes.h"

namespace troupe {

// What ranks tell each other in messages.
struct Announcement {
  enum class Kind : uint8_t {
    collective,
    exchange,
    message,  // of send()
    waits,    // the rank has waited for long already
    ended,    // it has come to the end of a run_ranks(), or of all
    failed,   // so all ranks must end
    spoken,   // it has said what has failed
    asks,     // is the receiver alive?
    answers,
  };
  Kind kind = Kind::collective;
  uint64_t room = 0;    // of collectives, exchanges and messages: among which ranks
  uint64_t number = 0;  // exchange: what is handed over; ended: of the run; failed: the status
  int32_t channel = 0;  // on which the sender's tensors come
  int32_t index = -1;   // of the operation, see CallSite; failed: the rank it began with
  int32_t layer = -1;
  int32_t micro_batch = -1;
  std::string text;                     // the operation's kind; failed: the message
  std::vector<TensorView> tensors;      // without data
  std::vector<int32_t> waits_for = {};  // waits: the ranks

  CallSite site() const { return {text, index, layer, micro_batch}; }
};

class PostGroup : public ProcessGroup {
 public:
  // Ends all processes; see Processes::fail().
  using Fail = std::function<void(ExitStatus, const std::string&)>;

  // `post` must outlive the group. What run_ranks() throws goes to `fail` at once, and not on to
  // the caller: what is under way must not lose its memory while MPI works on it.
  PostGroup(Post& post, std::chrono::milliseconds limit, Fail fail);
  ~PostGroup() override;

  std::string name_of_rank(int32_t rank) const override;
  Communicator& member(int rank, const std::vector<int32_t>& members) override;
  using ProcessGroup::member;
  std::vector<uint64_t> exchange(int rank, uint64_t value) override;
  std::vector<std::string> gather(int rank, std::string bytes) override;

  // Waits until all ranks have come here. The group does nothing any more then.
  void finish();
  // Ends what goes on in the background.
  void stop();
  // Tells the others that this rank has failed, or was told so itself. Then lets messages go on for
  // a while, in which another rank may speak and end all processes. True: none has, and this one is
  // to speak.
  bool announce_failure(ExitStatus status, const std::string& message);

 private:
  class Member;
  class Call;
  using Clock = std::chrono::steady_clock;
  // What came for the members of a room and is not taken yet, by rank.
  struct Mail {
    std::map<int32_t, std::deque<Announcement>> calls;  // collectives and exchanges
    std::map<int32_t, std::deque<Announcement>> messages;
  };
  struct Wait {
    CallSite site = {};
    bool has_limit = true;
    std::function<std::vector<int32_t>()> absent;  // the ranks that are waited for
    // A rank that ends has announced all that it ever does, but its last transfers may go on.
    bool for_transfer = false;
  };

  void run(const std::function<void(int)>& body) override;
  // What goes on in the background.
  void move_messages();
  // Waits until all ranks have ended their run of this number.
  void end(uint64_t number);
  int next_channel();
  void announce_to_all(const Announcement& announcement);
  // Takes in all that has come.
  void read_messages();
  // Reads messages until `done`, or throws. Gives up the lock now and then.
  template <class Done>
  void wait(std::unique_lock<std::mutex>& lock, const Wait& wait, const Done& done);
  void wait_for(std::unique_lock<std::mutex>& lock, const CallSite& site, int32_t other,
                Post::Transfer transfer);
  std::string missing(const Wait& wait) const;
  std::string_view process_of(int32_t rank) const {
    return post_.process_of_rank()[static_cast<size_t>(rank)];
  }
  // Has nothing come from the rank for too long, since `start`?
  bool is_silent(int32_t rank, Clock::time_point start) const;
  bool has_ended(int32_t rank) const;
  Member& member_of_all();

  Post& post_;
  const int rank_;
  // Guards everything below, and the post.
  std::mutex mutex_;
  int last_channel_ = 0;
  uint64_t runs_ = 0;            // how many run_ranks() there were
  bool runs_now_ = false;        // the last one of them
  std::vector<uint64_t> ended_;  // by rank, the number of the last one it has ended
  std::vector<CallSite> seen_;   // by rank, where it announced something last
  // By rank, the ranks that it has waited for there for long; empty: it has not, as far as is
  // known.
  std::vector<std::vector<int32_t>> waits_for_;
  std::vector<Clock::time_point> heard_;  // by rank, when anything came from it last
  std::set<std::string> names_;           // of operations, for seen_
  std::vector<bool> gone_;                // by rank: its process is
  std::exception_ptr failure_;            // of another rank, or of the post
  int32_t origin_ = -1;                   // the rank that it began with, if another has told so
  int32_t lowest_failed_;                 // of these; the group's size: none
  int32_t speaker_ = -1;                  // the rank that has said what failed
  Fail fail_;
  std::vector<std::string> gathered_;  // in gather(), which may be cut short
  // Of calls that were cut short.
  std::vector<std::deque<std::vector<std::byte>>> abandoned_;
  std::map<uint64_t, Mail> mail_;  // by room
  std::map<std::vector<int32_t>, std::unique_ptr<Member>> members_;
  int messages_ = 0;  // sent and not finished
  bool is_over_ = false;
  std::condition_variable changed_;  // one of these two
  std::thread mover_;                // the last member: it uses the others
};

// " [2026-11-22 21:40:16 +0000]" where standard error is no terminal, else nothing: the logs of
// several hosts are compared by it.
std::string time_for_logs();

class PostProcesses : public Processes {
 public:
  explicit PostProcesses(std::unique_ptr<Post> post) : post_(std::move(post)) {}

  int rank() const override { return post_->rank(); }
  int size() const override { return post_->size(); }
  ProcessGroup& group(std::chrono::milliseconds limit) override;
  void finish() override;
  [[noreturn]] void fail(ExitStatus status, const std::string& message) override;

 private:
  PostGroup& group();

  const std::unique_ptr<Post> post_;
  std::unique_ptr<PostGroup> group_;
};

}  // namespace troupe
