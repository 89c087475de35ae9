// What is left on the disk when a save, a replacement or a deletion is cut short at any of its
// steps.
#include <functional>
#include <map>
#include <set>
#include <signal.h>
#include <string>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

#include "io/checkpoint.h"
#include "io/checkpoint_test_support.h"
#include "io/disk_death.h"

namespace troupe {
namespace {

using io_test::all_below;
using io_test::dies_at_step;
using io_test::expect_phrase;
using io_test::load_and_compare;
using io_test::message_of;
using io_test::save;
using io_test::small_model;
using io_test::TempFolder;

CheckpointOptions options_with(const DiskHook& hook) {
  CheckpointOptions options;
  options.max_shard_bytes = 50;  // four shards
  options.hook = hook;
  return options;
}

// The steps of the complete checkpoints below `dir`, each of which must load in full as the variant
// that `variant_of_step` has for it, or one of the two for step 2.
std::vector<int64_t> loadable_steps(const std::string& dir, uint64_t* variant_of_step_2) {
  std::vector<int64_t> steps;
  for (const CheckpointInfo& info : list_checkpoints(dir)) {
    steps.push_back(info.step);
    if (info.step != 2) {
      load_and_compare(info.path, small_model(), static_cast<uint64_t>(info.step) * 10);
      continue;
    }
    const Checkpoint checkpoint = Checkpoint::open(info.path);
    *variant_of_step_2 = checkpoint.troupe_version() == "1.2.3" ? 20 : 21;
    load_and_compare(info.path, small_model(), *variant_of_step_2);
  }
  return steps;
}

void save_step_2_again(const std::string& dir, const CheckpointOptions& options) {
  save_checkpoint(dir, {2, "2.0.0", "{}", io_test::slices_of(small_model(), 21, true).to_save},
                  options);
}

TEST(CheckpointFault, DyingAtAnyStepOfASaveKeepsTheOldOnesAndMayAddTheNewOne) {
  int step = 0;
  bool seen_without = false;
  bool seen_with = false;
  for (;; ++step) {
    SCOPED_TRACE(step);
    const TempFolder dir;
    save(dir.path(), 1, small_model(), 10);
    const bool died = dies_at_step(step, [&](const DiskHook& hook) {
      save(dir.path(), 2, small_model(), 20, options_with(hook));
    });
    uint64_t variant = 20;
    const std::vector<int64_t> steps = loadable_steps(dir.path(), &variant);
    if (steps == std::vector<int64_t>{1}) {
      seen_without = true;
      EXPECT_FALSE(seen_with && died) << "a checkpoint vanished between two steps";
    } else {
      EXPECT_EQ(steps, (std::vector<int64_t>{1, 2}));
      seen_with = true;
    }
    // The next save puts everything in order.
    save(dir.path(), 3, small_model(), 30);
    EXPECT_EQ(loadable_steps(dir.path(), &variant).size(), steps.size() + 1);
    for (const std::string& name : all_below(dir / "checkpoints")) {
      EXPECT_EQ(name.rfind("step_", 0), 0U) << name << " was left behind";
    }
    if (!died) break;
  }
  EXPECT_TRUE(seen_without && seen_with);
  // Four shards, each created, synchronised and written once for its header; ten slices; the index,
  // the commit record.
  EXPECT_GT(step, 4 * 3 + 10 + 2 * 3);
}

TEST(CheckpointFault, DyingAtAnyStepOfTheFirstSaveLeavesNothingOrAll) {
  for (int step = 0;; ++step) {
    SCOPED_TRACE(step);
    const TempFolder dir;
    const bool died = dies_at_step(step, [&](const DiskHook& hook) {
      save(dir / "deep/run", 1, small_model(), 10, options_with(hook));
    });
    uint64_t variant = 0;
    EXPECT_LE(loadable_steps(dir / "deep/run", &variant).size(), 1U);
    save(dir / "deep/run", 1, small_model(), 10);
    EXPECT_EQ(loadable_steps(dir / "deep/run", &variant).size(), 1U);
    if (!died) break;
  }
}

TEST(CheckpointFault, DyingAtAnyStepOfAReplacementKeepsTheOldOrTheNew) {
  bool seen_old = false;
  bool seen_new = false;
  bool seen_aside = false;
  for (int step = 0;; ++step) {
    SCOPED_TRACE(step);
    const TempFolder dir;
    save(dir.path(), 1, small_model(), 10);
    save(dir.path(), 2, small_model(), 20);
    const bool died = dies_at_step(
        step, [&](const DiskHook& hook) { save_step_2_again(dir.path(), options_with(hook)); });
    uint64_t variant = 0;
    EXPECT_EQ(loadable_steps(dir.path(), &variant), (std::vector<int64_t>{1, 2}));
    (variant == 20 ? seen_old : seen_new) = true;
    EXPECT_FALSE(variant == 20 && seen_new) << "the new one vanished again";
    seen_aside |= !path_exists(dir / "checkpoints/step_00000002");

    // What comes next (here another save, or pruning) restores the usual name and keeps the
    // content.
    if (step % 2 == 0) {
      save(dir.path(), 3, small_model(), 30);
    } else {
      prune_checkpoints(dir.path(), {.newest = 9});
    }
    uint64_t variant_after = 0;
    EXPECT_EQ(loadable_steps(dir.path(), &variant_after).size(), step % 2 == 0 ? 3U : 2U);
    EXPECT_EQ(variant_after, variant);
    for (const std::string& name : all_below(dir / "checkpoints")) {
      EXPECT_EQ(name.rfind("step_", 0), 0U) << name << " was left behind";
    }
    if (!died) break;
  }
  EXPECT_TRUE(seen_old && seen_new && seen_aside);
}

TEST(CheckpointFault, DyingDuringTheRecoveryItselfLosesNothing) {
  // First a death between the two renames of a replacement, then one at every step of the next
  // save.
  for (int step = 0;; ++step) {
    SCOPED_TRACE(step);
    const TempFolder dir;
    save(dir.path(), 2, small_model(), 20);
    int first_death = 0;
    while (path_exists(dir / "checkpoints/step_00000002")) {
      ASSERT_TRUE(dies_at_step(first_death++, [&](const DiskHook& hook) {
        save_step_2_again(dir.path(), options_with(hook));
      }));
    }
    const bool died = dies_at_step(
        step, [&](const DiskHook& hook) { save_step_2_again(dir.path(), options_with(hook)); });
    uint64_t variant = 0;
    EXPECT_EQ(loadable_steps(dir.path(), &variant), (std::vector<int64_t>{2}));
    if (!died) {
      EXPECT_EQ(variant, 21U);
      EXPECT_EQ(all_below(dir / "checkpoints")[0], "step_00000002");
      break;
    }
  }
}

// The first half of a replacement whose second half was damaged later: the new folder does not
// count, so the old one is the checkpoint of its step.
TEST(CheckpointFault, ACompleteOldFolderBeatsADamagedNewOne) {
  const TempFolder dir;
  const TempFolder other;
  save(dir.path(), 2, small_model(), 20);
  save(other.path(), 2, small_model(), 21);
  const std::string step = dir / "checkpoints/step_00000002";
  std::filesystem::rename(step, dir / "checkpoints/.old_step_00000002");
  std::filesystem::copy(other / "checkpoints/step_00000002", step);
  std::filesystem::resize_file(step + "/shard_00000_00000.safetensors", 100);
  // Another save puts the folder in order.
  save(dir.path(), 3, small_model(), 30);
  EXPECT_FALSE(path_exists(dir / "checkpoints/.old_step_00000002"));
  load_and_compare(step, small_model(), 20);
}

TEST(CheckpointFault, DyingWhileMarkingTheBestLeavesTheOldOrTheNewMark) {
  bool seen_old = false;
  bool seen_new = false;
  for (int step = 0;; ++step) {
    SCOPED_TRACE(step);
    const TempFolder dir;
    for (int64_t s : {1, 3}) save(dir.path(), s, small_model(), static_cast<uint64_t>(s) * 10);
    mark_best_checkpoint(dir.path(), 1);
    const bool died = dies_at_step(
        step, [&](const DiskHook& hook) { mark_best_checkpoint(dir.path(), 3, hook); });
    const std::optional<int64_t> best = best_checkpoint_step(dir.path());
    EXPECT_TRUE(best == 1 || best == 3);
    (best == 1 ? seen_old : seen_new) = true;
    // What was left behind goes with the next save.
    save(dir.path(), 4, small_model(), 40);
    for (const std::string& name : all_below(dir / "checkpoints")) {
      EXPECT_NE(name[0], '.') << name << " was left behind";
    }
    EXPECT_EQ(best_checkpoint_step(dir.path()), best);
    if (!died) break;
  }
  EXPECT_TRUE(seen_old && seen_new);
}

// What has returned outlasts a loss of power: each folder is synchronised after its last change of
// names, except for what is removed under a name that no one takes for a checkpoint.
TEST(CheckpointFault, NamesAreDurableInTheEnd) {
  const TempFolder dir;
  std::set<std::string> changed;  // folders since they were synchronised
  const DiskHook hook = [&](std::string_view operation, const std::string& path) {
    if (operation == "rename" || operation == "make link" || operation == "make directory") {
      changed.insert(parent_path(path));
    }
    if (operation == "sync directory") changed.erase(path);
  };
  const auto expect_durable = [&](const char* what, const std::function<void()>& change) {
    change();
    EXPECT_TRUE(changed.empty()) << what << ": " << *changed.begin();
    changed.clear();
  };
  expect_durable("save", [&] { save(dir.path(), 1, small_model(), 10, options_with(hook)); });
  save(dir.path(), 2, small_model(), 20);
  expect_durable("replacement", [&] { save_step_2_again(dir.path(), options_with(hook)); });
  expect_durable("mark", [&] { mark_best_checkpoint(dir.path(), 1, hook); });
  expect_durable("another mark", [&] { mark_best_checkpoint(dir.path(), 2, hook); });
  expect_durable("removal", [&] { remove_checkpoint(dir.path(), 1, hook); });
  save(dir.path(), 3, small_model(), 30);
  save(dir.path(), 4, small_model(), 40);
  expect_durable("pruning", [&] { prune_checkpoints(dir.path(), {.newest = 1}, hook); });
}

TEST(CheckpointFault, DyingAtAnyStepOfPruningNeverShowsHalfACheckpoint) {
  for (int step = 0;; ++step) {
    SCOPED_TRACE(step);
    const TempFolder dir;
    for (int64_t s : {1, 3, 4}) save(dir.path(), s, small_model(), static_cast<uint64_t>(s) * 10);
    const bool died = dies_at_step(
        step, [&](const DiskHook& hook) { prune_checkpoints(dir.path(), {.newest = 1}, hook); });
    uint64_t variant = 0;
    const std::vector<int64_t> steps = loadable_steps(dir.path(), &variant);
    ASSERT_FALSE(steps.empty());
    EXPECT_EQ(steps.back(), 4);
    prune_checkpoints(dir.path(), {.newest = 1});
    EXPECT_EQ(loadable_steps(dir.path(), &variant), (std::vector<int64_t>{4}));
    EXPECT_EQ(all_below(dir / "checkpoints")[0], "step_00000004");
    if (!died) break;
  }
}

TEST(CheckpointFault, AnErrorAtAnyStepOfAReplacementIsReportedAndLeavesTheOldOrTheNew) {
  for (int step = 0;; ++step) {
    SCOPED_TRACE(step);
    const TempFolder dir;
    save(dir.path(), 1, small_model(), 10);
    save(dir.path(), 2, small_model(), 20);
    int count = 0;
    bool failed = false;
    const DiskHook hook = [&](std::string_view, const std::string& path) {
      if (count++ == step) throw_failed(path + ": cannot write: No space left on device");
    };
    try {
      save_step_2_again(dir.path(), options_with(hook));
    } catch (const UserError& error) {
      failed = true;
      EXPECT_EQ(error.status(), ExitStatus::failed);
      expect_phrase(error.what(), "No space left on device");
    }
    uint64_t variant = 0;
    EXPECT_EQ(loadable_steps(dir.path(), &variant), (std::vector<int64_t>{1, 2}));
    for (const std::string& name : all_below(dir / "checkpoints")) {
      EXPECT_NE(name.rfind(".tmp_step", 0), 0U) << name << " was left behind";
    }
    EXPECT_TRUE(path_exists(dir / "checkpoints/step_00000002"));
    if (!failed) {
      EXPECT_EQ(variant, 21U);
      break;
    }
  }
}

TEST(CheckpointFault, AFileThatMayNotGrowFailsTheSaveOnly) {
  // The limit on file sizes makes write(2) itself fail, half-way through a shard.
  const TempFolder dir;
  save(dir.path(), 1, small_model(), 10);
  const pid_t child = ::fork();
  if (child == 0) {
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{600, 600};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    int result = 1;
    try {
      save(dir.path(), 2, small_model(), 20);
    } catch (const UserError& error) {
      const std::string message = error.what();
      if (message.find("saving step 2 failed (earlier checkpoints are intact)") == 0 &&
          message.find("shard_00000_00000.safetensors: cannot write") != std::string::npos &&
          message.find("File too large") != std::string::npos) {
        result = 0;
      }
    }
    ::_exit(result);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "no clear message, or no failure";
  std::vector<std::string> incomplete;
  const std::vector<CheckpointInfo> left = list_checkpoints(dir.path(), &incomplete);
  ASSERT_EQ(left.size(), 1U);
  load_and_compare(left[0].path, small_model(), 10);
  EXPECT_TRUE(incomplete.empty()) << incomplete[0];
}

TEST(CheckpointFault, AFolderThatCannotBeMadeIsNamed) {
  const TempFolder dir;
  io_test::put_file(dir / "run", "a file is in the way");
  expect_phrase(
      message_of(ExitStatus::bad_request, [&] { save(dir / "run", 1, small_model(), 1); }),
      dir / "run is a file, not a folder.");
}

}  // namespace
}  // namespace troupe
