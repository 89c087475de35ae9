#include "parallel/process_group.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <fmt/format.h>
#include <thread>

#include "program/op_spec.h"

namespace troupe {
namespace {

// Elements that are summed over all ranks before the next: the sums stay in the first-level cache.
constexpr int64_t kSumBlock = 1024;
constexpr int64_t kSumGrain = 32 * kSumBlock;

std::string describe(const TensorView& tensor) {
  return fmt::format("{} {}", name_of(tensor.dtype), tensor.shape.to_string());
}

// "operation 12 (all_reduce), layer 1, micro-batch 0"
std::string describe(const CollectiveCall& call) {
  if (call.op == nullptr) return "no operation";
  std::string text = fmt::format("operation {} ({})", call.index, call.op->spec->name);
  const Place& place = call.op->place;
  if (place.layer >= 0) text += fmt::format(", layer {}", place.layer);
  if (place.micro_batch >= 0) text += fmt::format(", micro-batch {}", place.micro_batch);
  return text;
}

std::string describe(const CollectiveCall& call, std::span<const TensorView> tensors) {
  std::string text = describe(call);
  if (!tensors.empty()) text += " of ";
  for (size_t i = 0; i < tensors.size(); ++i) {
    text += (i == 0 ? "" : ", ") + describe(tensors[i]);
  }
  return text;
}

bool same_type(const TensorView& a, const TensorView& b) {
  return a.dtype == b.dtype && a.shape == b.shape;
}

// This rank's share of the elements: whole blocks of cache lines, so that no two ranks write one.
struct Share {
  int64_t begin = 0;
  int64_t end = 0;
  Share(int64_t elements, int rank, int ranks) {
    constexpr int64_t kLine = 16;
    const int64_t lines = (elements + kLine - 1) / kLine;
    begin = std::min(elements, lines * rank / ranks * kLine);
    end = std::min(elements, lines * (rank + 1) / ranks * kLine);
  }
};

// Element by element over ranks 0, 1, ...; the sum replaces every rank's element.
template <class T>
void sum_in_place(std::span<const std::span<const TensorView>> ranks, size_t tensor, Share share,
                  ThreadPool& pool) {
  pool.parallel_ranges(share.end - share.begin, kSumGrain, [&](int64_t first, int64_t last, int) {
    std::array<T, kSumBlock> sum;
    for (int64_t at = share.begin + first; at < share.begin + last; at += kSumBlock) {
      const int64_t count = std::min(kSumBlock, share.begin + last - at);
      std::copy_n(ranks.front()[tensor].as<T>() + at, count, sum.data());
      for (const auto& tensors : ranks.subspan(1)) {
        const T* source = tensors[tensor].as<T>() + at;
        for (int64_t i = 0; i < count; ++i) sum[static_cast<size_t>(i)] += source[i];
      }
      for (const auto& tensors : ranks) {
        std::copy_n(sum.data(), count, tensors[tensor].as<T>() + at);
      }
    }
  });
}

}  // namespace

class ProcessGroup::Member : public Communicator {
 public:
  Member(ProcessGroup& group, int rank)
      : group_(group), rank_(rank), peers_(static_cast<size_t>(group.size())) {}

  void all_reduce(const CollectiveCall& call, std::span<const TensorView> tensors,
                  ThreadPool& pool) override {
    begin(call, tensors);
    for (size_t i = 0; i < tensors.size(); ++i) {
      const Share share(tensors[i].shape.elements(), rank_, group_.size());
      switch (tensors[i].dtype) {
        case DType::f64:
          sum_in_place<double>(peers_, i, share, pool);
          break;
        case DType::f32:
          sum_in_place<float>(peers_, i, share, pool);
          break;
        default:
          sum_in_place<int32_t>(peers_, i, share, pool);
          break;
      }
    }
    group_.end(rank_);
  }

  void prefix_sum(const CollectiveCall& call, const TensorView& own, const TensorView& running,
                  const TensorView& total) override {
    begin(call, {&own, 1});
    const auto elements = static_cast<size_t>(own.shape.elements());
    std::fill_n(total.as<int32_t>(), elements, 0);
    for (int rank = 0; rank < group_.size(); ++rank) {
      const auto* counts = peers_[static_cast<size_t>(rank)][0].as<int32_t>();
      for (size_t i = 0; i < elements; ++i) total.as<int32_t>()[i] += counts[i];
      if (rank == rank_) std::copy_n(total.as<int32_t>(), elements, running.as<int32_t>());
    }
    group_.end(rank_);
  }

 private:
  void begin(const CollectiveCall& call, std::span<const TensorView> tensors) {
    group_.begin(rank_, call, tensors);
    for (size_t i = 0; i < peers_.size(); ++i) peers_[i] = group_.slots_[i].tensors;
  }

  ProcessGroup& group_;
  const int rank_;
  std::vector<std::span<const TensorView>> peers_;  // what each rank called with
};

ProcessGroup::ProcessGroup(int size, std::chrono::milliseconds limit)
    : limit_(limit), slots_(static_cast<size_t>(size)) {
  TROUPE_CHECK(size >= 1, "a group has a member");
  for (int rank = 0; rank < size; ++rank) members_.push_back(std::make_unique<Member>(*this, rank));
}

ProcessGroup::~ProcessGroup() = default;

Communicator& ProcessGroup::member(int rank) {
  return *members_[static_cast<size_t>(rank)];
}

void ProcessGroup::meet(std::unique_lock<std::mutex>& lock, int rank, Meeting meeting) {
  if (failure_) std::rethrow_exception(failure_);
  Slot& slot = slots_[static_cast<size_t>(rank)];
  slot.waits = true;
  slot.meeting = meeting;
  if (++arrived_ == size()) {
    const std::string mismatch = mismatch_message();
    if (!mismatch.empty()) fail_locked(mismatch);
    arrived_ = 0;
    ++round_;
    for (Slot& each : slots_) each.waits = false;
    changed_.notify_all();
    return;
  }
  for (const Slot& each : slots_) {
    if (each.left) fail_locked(missing_message(rank));
  }
  const uint64_t round = round_;
  const auto over = [&] { return round_ != round || failure_ != nullptr; };
  if (meeting != Meeting::begin_collective) {
    changed_.wait(lock, over);
  } else if (!changed_.wait_for(lock, limit_, over)) {
    fail_locked(missing_message(rank));
  }
  if (round_ == round) std::rethrow_exception(failure_);
}

std::vector<uint64_t> ProcessGroup::exchange(int rank, uint64_t value) {
  std::unique_lock lock(mutex_);
  Slot& slot = slots_[static_cast<size_t>(rank)];
  slot.call = {};
  slot.tensors = {};
  slot.value = value;
  meet(lock, rank, Meeting::exchange);
  std::vector<uint64_t> values;
  for (const Slot& each : slots_) values.push_back(each.value);
  // Nobody may write the next number before all have read these.
  meet(lock, rank, Meeting::exchange);
  return values;
}

void ProcessGroup::begin(int rank, const CollectiveCall& call,
                         std::span<const TensorView> tensors) {
  std::unique_lock lock(mutex_);
  Slot& slot = slots_[static_cast<size_t>(rank)];
  slot.call = call;
  slot.tensors = tensors;
  meet(lock, rank, Meeting::begin_collective);
}

void ProcessGroup::end(int rank) {
  std::unique_lock lock(mutex_);
  meet(lock, rank, Meeting::end_collective);
}

std::string ProcessGroup::mismatch_message() const {
  const Slot& first = slots_.front();
  for (size_t rank = 1; rank < slots_.size(); ++rank) {
    const Slot& other = slots_[rank];
    const auto spec_of = [](const Slot& slot) {
      return slot.call.op == nullptr ? nullptr : slot.call.op->spec;
    };
    if (first.meeting == other.meeting && spec_of(first) == spec_of(other) &&
        std::equal(first.tensors.begin(), first.tensors.end(), other.tensors.begin(),
                   other.tensors.end(), same_type)) {
      continue;
    }
    return fmt::format(
        "The ranks do not run the same collective: rank 0 is in {}, rank {} in {}. All ranks end.",
        describe(first.call, first.tensors), rank, describe(other.call, other.tensors));
  }
  return {};
}

std::string ProcessGroup::missing_message(int rank) const {
  std::string missing;
  for (size_t other = 0; other < slots_.size(); ++other) {
    const Slot& slot = slots_[other];
    if (slot.waits) continue;
    missing += fmt::format("{}rank {} ({}, last seen in {})", missing.empty() ? "" : ", ", other,
                           slot.left ? "has ended" : "is missing", describe(slot.call));
  }
  return fmt::format("Rank {} waited in vain ({} s at most) in {} for: {}. All ranks end.", rank,
                     std::chrono::duration<double>(limit_).count(),
                     describe(slots_[static_cast<size_t>(rank)].call), missing);
}

void ProcessGroup::fail_locked(const std::string& message) {
  const auto cause = std::make_exception_ptr(UserError(ExitStatus::failed, message));
  if (!failure_) failure_ = cause;
  changed_.notify_all();
  std::rethrow_exception(failure_);
}

void ProcessGroup::leave(int rank) {
  const std::lock_guard lock(mutex_);
  slots_[static_cast<size_t>(rank)].left = true;
  if (failure_ || arrived_ == 0) return;
  for (int other = 0; other < size(); ++other) {
    if (!slots_[static_cast<size_t>(other)].waits) continue;
    failure_ = std::make_exception_ptr(UserError(ExitStatus::failed, missing_message(other)));
    break;
  }
  changed_.notify_all();
}

void ProcessGroup::rejoin() {
  const std::lock_guard lock(mutex_);
  for (Slot& slot : slots_) slot.left = false;
}

void ProcessGroup::fail(std::exception_ptr cause) {
  const std::lock_guard lock(mutex_);
  if (!failure_) failure_ = std::move(cause);
  changed_.notify_all();
}

std::exception_ptr ProcessGroup::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

namespace {

// Which ranks still run, for those that wait for their end.
class RunningRanks {
 public:
  explicit RunningRanks(int count) : running_(count) {}

  void ended(bool failed) {
    const std::lock_guard lock(mutex_);
    --running_;
    failed_ = failed_ || failed;
    changed_.notify_all();
  }

  // Waits for the end of all, after the first failure no longer than `grace`. False: some run on.
  bool wait(std::chrono::milliseconds grace) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return running_ == 0 || failed_; });
    return changed_.wait_for(lock, grace, [&] { return running_ == 0; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int running_;
  bool failed_ = false;
};

[[noreturn]] void exit_with(const std::exception_ptr& cause) {
  try {
    std::rethrow_exception(cause);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "troupe: %s A rank cannot be stopped; the process exits.\n", error.what());
  }
  std::fflush(nullptr);
  std::_Exit(static_cast<int>(ExitStatus::failed));
}

}  // namespace

void run_ranks(ProcessGroup& group, const std::function<void(int)>& body) {
  group.rejoin();
  RunningRanks running(group.size());
  std::vector<std::thread> threads;
  for (int rank = 0; rank < group.size(); ++rank) {
    threads.emplace_back([&, rank] {
      bool failed = false;
      try {
        body(rank);
      } catch (...) {
        failed = true;
        group.fail(std::current_exception());
      }
      group.leave(rank);
      running.ended(failed);
    });
  }
  if (!running.wait(2 * group.limit())) exit_with(group.failure());
  for (std::thread& thread : threads) thread.join();
  if (const std::exception_ptr cause = group.failure()) std::rethrow_exception(cause);
}

}  // namespace troupe
