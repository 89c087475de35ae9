#include "train/run_saver.h"

#include <algorithm>
#include <fmt/format.h>
#include <thread>
#include <utility>

#include "base/error.h"
#include "base/units.h"
#include "io/checkpoint.h"
#include "io/file.h"

namespace troupe {
namespace {

constexpr std::chrono::seconds kRetryAfter{60};
// Between the attempts at the end of a run, when no step can be waited for.
constexpr std::chrono::seconds kLastPauses[] = {std::chrono::seconds(1), std::chrono::seconds(5)};

}  // namespace

RunSaver::RunSaver(const SaveSpec& spec, int32_t rank, ProcessGroup* group)
    : spec_(spec), rank_(rank), group_(group), last_try_(Clock::now()) {}

void RunSaver::go_on_from(int64_t step, bool by_clock) {
  last_saved_step_ = step;
  last_clock_step_ = by_clock ? step : -1;
}

void RunSaver::lock() {
  if (is_off()) return;
  try {
    lock_ = std::make_unique<FolderLock>(spec_.folder);
  } catch (const UserError& error) {
    throw UserError(error.status(), fmt::format("--save {}", error.what()));
  }
}

void RunSaver::refuse_foreign_folder() const {
  if (is_off()) return;
  if (last_saved_step_ < 0) {
    if (!has_checkpoint_folders(spec_.folder)) return;
    throw_bad_request(
        fmt::format("--save {0}: the folder holds another run. Give --load {0} to go on with it, "
                    "or save into another folder.",
                    spec_.folder));
  }
  const auto newest = newest_checkpoint(spec_.folder);
  if (!newest || newest->step <= last_saved_step_) return;  // going on with this run
  throw_bad_request(
      fmt::format("--save {}: the folder holds later checkpoints ({}) than --ckpt-step {}. Save "
                  "into another folder, or remove them.",
                  spec_.folder, newest->path, last_saved_step_));
}

std::string RunSaver::missing_room(uint64_t bytes) const {
  const std::optional<uint64_t> room = free_bytes(spec_.folder);
  if (!room || *room >= bytes) return "";
  return fmt::format(
      "--save {}: a checkpoint takes {} ({} bytes), and {} ({} bytes) are free there.",
      spec_.folder, format_bytes(bytes), bytes, format_bytes(*room), *room);
}

void RunSaver::require_room(const RunIdentity& identity, const ModelState& state,
                            const StateStorage& storage) {
  last_try_ = Clock::now();
  if (is_off()) return;
  const uint64_t bytes =
      checkpoint_bytes(identity, state, storage, group_, parts(SaveReason::asked));
  const std::string fault = leads() ? missing_room(bytes) : "";
  if (fault.empty()) return;
  throw UserError(ExitStatus::does_not_fit,
                  fault +
                      " Make room, save elsewhere, or leave the optimizer out "
                      "(--no-save-optim).");
}

bool RunSaver::is_due() const {
  if (is_off()) return false;
  const auto waited = Clock::now() - last_try_;
  if (has_failed_) return waited >= kRetryAfter;
  return spec_.minutes > 0 &&
         waited >= std::chrono::duration<double, std::ratio<60>>(spec_.minutes);
}

SavedParts RunSaver::parts(SaveReason reason) const {
  return {
      .optimizer = spec_.optimizer, .seed = spec_.seed, .by_clock = reason == SaveReason::clock};
}

std::string RunSaver::write(const SavedParts& parts, const RunIdentity& identity,
                            const TrainingPosition& position, const ModelState& state,
                            const StateStorage& storage) const {
  const uint64_t bytes = checkpoint_bytes(identity, state, storage, group_, parts);
  const std::string fault = leads() ? missing_room(bytes) : "";
  bool has_room = fault.empty();
  if (group_ != nullptr) has_room = group_->exchange(rank_, has_room ? 1 : 0).front() != 0;
  if (!has_room) throw SaveFailed(ExitStatus::failed, fault);
  storage.to_host();
  return save_training_checkpoint(spec_.folder, identity, position, state, storage, group_, {},
                                  parts)
      .path;
}

void RunSaver::attempt(SaveReason reason, const RunIdentity& identity,
                       const TrainingPosition& position, const ModelState& state,
                       const StateStorage& storage, const Say& say) {
  const auto start = Clock::now();
  // An attempt by the clock stands in for the save that has failed.
  if (has_failed_ && reason == SaveReason::clock) reason = failed_reason_;
  std::string path;
  try {
    path = write(parts(reason), identity, position, state, storage);
  } catch (const SaveFailed& error) {
    has_failed_ = true;
    failed_reason_ = reason;
    failure_ = error.what();
    if (!failure_.ends_with('.')) failure_ += '.';
    last_try_ = Clock::now();
    return;
  }
  has_failed_ = false;
  last_warning_.reset();
  last_saved_step_ = position.step;
  last_try_ = Clock::now();
  if (!leads()) return;
  const double seconds = std::chrono::duration<double>(last_try_ - start).count();
  say(fmt::format("saved {} in {}", path, format_duration(seconds)), false);
  try {
    tidy(position, reason);
  } catch (const UserError& error) {
    say(fmt::format("Warning: {} (the new checkpoint is complete)", error.what()), true);
  }
}

void RunSaver::save(SaveReason reason, const RunIdentity& identity,
                    const TrainingPosition& position, const ModelState& state,
                    const StateStorage& storage, const Say& say) {
  if (is_off() || last_saved_step_ == position.step) return;
  attempt(reason, identity, position, state, storage, say);
  if (!has_failed_ || !leads()) return;
  // With saves that follow each other closely, each failing, once is enough for a while.
  if (last_warning_ && Clock::now() - *last_warning_ < kRetryAfter) return;
  last_warning_ = Clock::now();
  say(fmt::format("Warning: the checkpoint of step {} was not saved: {} Training goes on; the next "
                  "attempt comes within {}.",
                  position.step, failure_, format_duration(kRetryAfter.count())),
      true);
}

void RunSaver::save_last(const RunIdentity& identity, const TrainingPosition& position,
                         const ModelState& state, const StateStorage& storage, const Say& say) {
  if (is_off() || last_saved_step_ == position.step) return;
  attempt(SaveReason::asked, identity, position, state, storage, say);
  for (const std::chrono::seconds pause : kLastPauses) {
    if (!has_failed_) return;
    if (leads()) {
      say(fmt::format("Warning: the last checkpoint, of step {}, was not saved: {} Trying again "
                      "in {}.",
                      position.step, failure_, format_duration(pause.count())),
          true);
    }
    std::this_thread::sleep_for(pause);
    attempt(SaveReason::asked, identity, position, state, storage, say);
  }
  if (!has_failed_) return;
  if (leads()) say("Warning: " + failure_, true);
  throw_failed(fmt::format("The last checkpoint, of step {}, could not be saved. {}", position.step,
                           kept()));
}

std::string RunSaver::kept() const {
  return last_saved_step_ < 0 ? "Nothing was saved."
                              : fmt::format("The checkpoint of step {} is kept.", last_saved_step_);
}

void RunSaver::tidy(const TrainingPosition& position, SaveReason reason) {
  if (spec_.best && position.best_step == position.step) {
    mark_best_checkpoint(spec_.folder, position.step);
  }
  const int64_t clock_step =
      std::exchange(last_clock_step_, reason == SaveReason::clock ? position.step : -1);
  // While steps are being skipped, a checkpoint may hold the weights that are to blame. It must not
  // push out those that were saved before.
  if (position.skipped_in_row > 0) return;
  const int64_t retained = spec_.retain_interval.value_or(0);
  if (clock_step >= 0 && (retained == 0 || clock_step % retained != 0)) {
    remove_checkpoint(spec_.folder, clock_step);
  }
  if (spec_.newest > 0 || retained > 0) {
    prune_checkpoints(spec_.folder,
                      {.newest = std::max(1, spec_.newest), .retain_interval = retained});
  }
}

}  // namespace troupe
