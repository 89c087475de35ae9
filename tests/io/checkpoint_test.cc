#include "io/checkpoint.h"

#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "io/checkpoint_test_support.h"
#include "io/hash.h"

namespace troupe {
namespace {

using io_test::all_below;
using io_test::boxes_of;
using io_test::expect_phrase;
using io_test::FileCut;
using io_test::get_file;
using io_test::kAllRoles;
using io_test::load_and_compare;
using io_test::message_of;
using io_test::put_file;
using io_test::save;
using io_test::Slices;
using io_test::slices_of;
using io_test::small_model;
using io_test::TempFolder;

constexpr CheckpointRole kParameter = CheckpointRole::parameter;

// Rewrites index.json through `edit` and commits it again, as a hostile or foreign writer could.
template <class Edit>
void edit_index(const std::string& path, const Edit& edit) {
  nlohmann::ordered_json index = nlohmann::ordered_json::parse(get_file(path + "/index.json"));
  edit(index);
  const std::string text = index.dump();
  put_file(path + "/index.json", text);
  put_file(path + "/COMMIT", hash_to_hex(hash_bytes(text.data(), text.size())) + "\n");
}

TEST(Checkpoint, RoundTripsEverythingThatWasSaved) {
  const TempFolder dir;
  const std::string training =
      R"({"seed":18446744073709551615,"lr":0.1,"text":"é\n","nested":{"list":[1,-2,null,true]}})";
  const Slices slices = slices_of(small_model(), 1, true);
  const CheckpointInfo info = save_checkpoint(dir / "run", {42, "0.1.0", training, slices.to_save});
  EXPECT_EQ(info.step, 42);
  EXPECT_EQ(info.path, dir / "run/checkpoints/step_00000042");
  EXPECT_EQ(
      all_below(dir / "run/checkpoints"),
      (std::vector<std::string>{"step_00000042", "step_00000042/COMMIT", "step_00000042/index.json",
                                "step_00000042/shard_00000_00000.safetensors"}));
  const Checkpoint checkpoint = Checkpoint::open(info.path);
  EXPECT_EQ(checkpoint.step(), 42);
  EXPECT_EQ(checkpoint.troupe_version(), "0.1.0");
  EXPECT_EQ(nlohmann::json::parse(checkpoint.training()), nlohmann::json::parse(training));
  ASSERT_EQ(checkpoint.tensors().size(), 4U);
  EXPECT_EQ(checkpoint.tensors()[1].name, "w.m");
  EXPECT_EQ(checkpoint.tensors()[1].slices.size(), 6U);
  load_and_compare(info.path, small_model(), 1);
}

// What is saved can be read: the training state stands one level deep in the index.
TEST(Checkpoint, ATrainingStateIsNestedNoDeeperThanItIsRead) {
  const auto nested = [](int depth) {
    return "{\"a\":" + std::string(static_cast<size_t>(depth - 1), '[') +
           std::string(static_cast<size_t>(depth - 1), ']') + "}";
  };
  const Slices slices = slices_of(small_model(), 1, true);
  int most = 1;
  for (int depth = 2; depth < 100; ++depth) {
    const TempFolder dir;
    try {
      const CheckpointInfo info =
          save_checkpoint(dir / "run", {1, "0.1.0", nested(depth), slices.to_save});
      most = depth;
      EXPECT_EQ(Checkpoint::open(info.path).training(), nested(depth));
    } catch (const UserError&) {
      EXPECT_EQ(most, depth - 1) << "refused, though deeper ones are not";
      EXPECT_TRUE(list_checkpoints(dir / "run").empty());
      break;
    }
  }
  EXPECT_EQ(most, 63);
}

TEST(Checkpoint, AMovedCheckpointLoads) {
  const TempFolder dir;
  std::filesystem::rename(save(dir.path(), 3, small_model(), 1).path, dir / "elsewhere");
  load_and_compare(dir / "elsewhere", small_model(), 1);
}

TEST(Checkpoint, AnySlicingLoadsAnySlicing) {
  // Extents that no number of pieces divides, in one to four dimensions.
  const std::vector<std::pair<Shape, std::vector<std::vector<int64_t>>>> cases = {
      {{7}, {{1}, {2}, {3}, {7}}},
      {{5, 7}, {{1, 1}, {2, 1}, {1, 3}, {3, 2}, {5, 7}}},
      {{4, 3, 5}, {{1, 1, 1}, {4, 1, 1}, {1, 3, 1}, {1, 1, 5}, {2, 3, 2}}},
      {{2, 3, 2, 3}, {{1, 1, 1, 1}, {2, 1, 2, 1}, {1, 3, 1, 3}, {1, 1, 2, 1}}},
  };
  for (const auto& [shape, ways] : cases) {
    for (const std::vector<int64_t>& saved : ways) {
      const TempFolder dir;
      // Two slices per shard, so that slices come from several files.
      CheckpointOptions options;
      options.max_shard_bytes = 2 * 2 * static_cast<uint64_t>(shape.elements() / 2);
      const CheckpointInfo info =
          save(dir.path(), 1, {{"x", kParameter, DType::bf16, shape, saved}}, 5, options);
      for (const std::vector<int64_t>& loaded : ways) {
        SCOPED_TRACE(shape.to_string());
        load_and_compare(info.path, {{"x", kParameter, DType::bf16, shape, loaded}}, 5);
      }
    }
  }
}

TEST(Checkpoint, SlicesNeedNotFormAGrid) {
  // A pinwheel: no straight line cuts the square, so only the true test of overlap accepts it.
  const TempFolder dir;
  const FileCut whole{"x", kParameter, DType::i32, {3, 3}, {1, 1}};
  const std::vector<Box> boxes = {
      {{0, 0}, {1, 2}}, {{0, 2}, {2, 1}}, {{2, 1}, {1, 2}}, {{1, 0}, {2, 1}}, {{1, 1}, {1, 1}}};
  std::vector<std::vector<uint8_t>> memory;
  CheckpointContent content{0, "v", "{}", {}};
  for (const Box& box : boxes) memory.push_back(io_test::expected_bytes(whole, box, 1));
  for (size_t i = 0; i < boxes.size(); ++i) {
    content.slices.push_back({"x", kParameter, DType::i32, {3, 3}, boxes[i], memory[i].data()});
  }
  load_and_compare(save_checkpoint(dir.path(), content).path, {whole}, 1);
}

TEST(Checkpoint, ReplicasAndPartsMayBeAskedFor) {
  const TempFolder dir;
  const CheckpointInfo info = save(dir.path(), 1, small_model(), 1);
  // One rank's view: the second row of w, twice.
  const FileCut w = small_model()[0];
  const Box row{{1, 0}, {1, 6}};
  std::vector<uint8_t> first(12, 0);
  std::vector<uint8_t> second(12, 0);
  const std::vector<SliceToLoad> slices = {{"w", w.role, w.dtype, w.shape, row, first.data()},
                                           {"w", w.role, w.dtype, w.shape, row, second.data()}};
  const std::vector<CheckpointRole> roles = {kParameter};
  Checkpoint::open(info.path).load(slices, roles);
  EXPECT_EQ(first, io_test::expected_bytes(w, row, 1));
  EXPECT_EQ(second, first);
}

TEST(Checkpoint, TensorsWithoutElementsKeepTheirShape) {
  const TempFolder dir;
  const std::vector<FileCut> cuts = {{"none", kParameter, DType::f32, {0, 4}, {1, 1}},
                                     // Three pieces of an extent of two: one of them is empty.
                                     {"few", kParameter, DType::f32, {2}, {3}}};
  const CheckpointInfo info = save(dir.path(), 1, cuts, 1);
  load_and_compare(info.path, cuts, 1);
  std::vector<FileCut> other = cuts;
  other[0].shape = {0, 5};
  message_of(ExitStatus::bad_request, [&] { load_and_compare(info.path, other, 1); });
  const TempFolder empty;
  load_and_compare(save(empty.path(), 1, {}, 1).path, {}, 1);
}

TEST(Checkpoint, ShardsRespectTheirLimit) {
  const TempFolder dir;
  CheckpointOptions options;
  options.max_shard_bytes = 64;
  const CheckpointInfo info = save(dir.path(), 1, small_model(), 1, options);
  const nlohmann::json index = nlohmann::json::parse(get_file(info.path + "/index.json"));
  // Slices of 24 24 | 16 16 16 16 | 16 16 24 8 bytes.
  EXPECT_EQ(index["shards"].size(), 3U);
  load_and_compare(info.path, small_model(), 1);
}

TEST(Checkpoint, LoadingIsTotal) {
  const TempFolder dir;
  const std::string path = save(dir.path(), 1, small_model(), 1).path;
  const auto refuse = [&](const std::vector<FileCut>& cuts) {
    const Slices slices = slices_of(cuts, 1, false);
    const std::string message = message_of(
        ExitStatus::bad_request, [&] { Checkpoint::open(path).load(slices.to_load, kAllRoles); });
    for (const auto& memory : slices.memory) {
      EXPECT_EQ(*memory, std::vector<uint8_t>(memory->size(), 0xee)) << "a refusal wrote something";
    }
    return message;
  };
  std::vector<FileCut> cuts = small_model();
  cuts.push_back({"extra", kParameter, DType::f32, {2}, {1}});
  cuts.push_back({"more", kParameter, DType::f32, {2}, {2}});
  expect_phrase(refuse(cuts), "missing from the checkpoint: \"extra\", \"more\"");

  cuts = small_model();
  cuts.erase(cuts.begin() + 2, cuts.end());
  expect_phrase(refuse(cuts), "in the checkpoint but not expected: \"bias\", \"count\"");

  cuts = small_model();
  cuts[0].dtype = DType::f32;
  expect_phrase(refuse(cuts),
                "different: \"w\" (parameter bf16[4, 6] saved, parameter f32[4, 6] expected)");
  cuts = small_model();
  cuts[0].shape = {6, 4};
  expect_phrase(refuse(cuts), "parameter bf16[6, 4] expected");
  cuts[0].shape = {24};
  cuts[0].pieces = {1};
  expect_phrase(refuse(cuts), "parameter bf16[24] expected");
  cuts = small_model();
  cuts[2].role = CheckpointRole::optimizer;
  expect_phrase(refuse(cuts), "\"bias\" (state f64[3] saved, optimizer f64[3] expected)");

  cuts.clear();
  for (int i = 0; i < 20; ++i) {
    cuts.push_back({"t" + std::to_string(i), kParameter, DType::f32, {1}, {1}});
  }
  expect_phrase(refuse(cuts), "\"t7\" and 12 more");
}

TEST(Checkpoint, UnwantedRolesAndNamedTensorsMayStayBehind) {
  const TempFolder dir;
  const std::string path = save(dir.path(), 1, small_model(), 1).path;
  const Slices slices = slices_of({small_model()[0]}, 1, false);
  const std::vector<CheckpointRole> parameters = {kParameter};
  const Checkpoint checkpoint = Checkpoint::open(path);
  checkpoint.load(slices.to_load, parameters);
  EXPECT_EQ(*slices.memory[0], slices.expected[0]);

  std::vector<std::string> elsewhere = {"w.m", "bias"};
  expect_phrase(message_of(ExitStatus::bad_request,
                           [&] { checkpoint.load(slices.to_load, kAllRoles, elsewhere); }),
                "not expected: \"count\"");
  elsewhere.push_back("count");
  checkpoint.load(slices.to_load, kAllRoles, elsewhere);
}

TEST(Checkpoint, SomeOfItIsLoadedPieceByPiece) {
  const TempFolder dir;
  const std::string path = save(dir.path(), 1, small_model(), 1).path;
  const Checkpoint checkpoint = Checkpoint::open(path);
  for (const FileCut& cut : small_model()) {
    const Slices slices = slices_of({cut}, 1, false);
    for (size_t i = 0; i < slices.to_load.size(); ++i) {
      checkpoint.load_some({&slices.to_load[i], 1});
      EXPECT_EQ(*slices.memory[i], slices.expected[i]) << cut.name;
    }
  }
  const Slices missing = slices_of({{"extra", kParameter, DType::f32, {2}, {1}}}, 1, false);
  expect_phrase(message_of(ExitStatus::bad_request, [&] { checkpoint.load_some(missing.to_load); }),
                "missing from the checkpoint: \"extra\"");
}

TEST(Checkpoint, EveryTruncationOfEveryFileIsDetected) {
  const TempFolder dir;
  CheckpointOptions options;
  options.max_shard_bytes = 50;
  const CheckpointInfo info = save(dir.path(), 1, small_model(), 1, options);
  size_t files = 0;
  for (const std::string& name : all_below(info.path)) {
    const std::string whole = get_file(info.path + "/" + name);
    ++files;
    for (size_t length = 0; length < whole.size(); ++length) {
      put_file(info.path + "/" + name, whole.substr(0, length));
      ASSERT_TRUE(list_checkpoints(dir.path()).empty()) << name << " cut to " << length;
      message_of(ExitStatus::failed, [&] { load_and_compare(info.path, small_model(), 1); });
    }
    std::filesystem::remove(info.path + "/" + name);
    ASSERT_TRUE(list_checkpoints(dir.path()).empty()) << name << " removed";
    put_file(info.path + "/" + name, whole + "x");
    ASSERT_TRUE(list_checkpoints(dir.path()).empty()) << name << " made longer";
    put_file(info.path + "/" + name, whole);
  }
  EXPECT_EQ(files, 6U);  // four shards, index, commit record
  load_and_compare(info.path, small_model(), 1);
}

TEST(Checkpoint, EveryFlippedBitIsDetected) {
  const TempFolder dir;
  const CheckpointInfo info = save(dir.path(), 1, small_model(), 1);
  size_t named_tensors = 0;
  for (const std::string& name : all_below(info.path)) {
    const std::string whole = get_file(info.path + "/" + name);
    for (size_t byte = 0; byte < whole.size(); ++byte) {
      std::string damaged = whole;
      damaged[byte] = static_cast<char>(damaged[byte] ^ (1 << byte % 8));
      put_file(info.path + "/" + name, damaged);
      const std::string message =
          message_of(ExitStatus::failed, [&] { load_and_compare(info.path, small_model(), 1); });
      if (message.find(" is damaged: tensor ") != std::string::npos &&
          message.find("does not have the hash that was saved; load") != std::string::npos) {
        ++named_tensors;
      }
    }
    put_file(info.path + "/" + name, whole);
  }
  // Each byte of data, and nothing else, is caught by the hash of its slice.
  EXPECT_EQ(named_tensors, 4U * 6 * 2 + 4 * 6 * 4 + 3 * 8 + 8);
}

TEST(Checkpoint, ACommittedIndexThatContradictsItselfIsRefused) {
  using Json = nlohmann::ordered_json;
  using Edit = void (*)(Json&);
  const std::vector<std::pair<Edit, const char*>> table = {
      {[](Json& i) { i["format"] = "other"; }, "not that of a Troupe checkpoint"},
      {[](Json& i) { i["version"] = 2; }, "format version 2"},
      {[](Json& i) { i.erase("step"); }, "no \"step\""},
      {[](Json& i) { i["step"] = -1; }, "\"step\""},
      {[](Json& i) { i["training"] = 1; }, "\"training\""},
      {[](Json& i) { i["shards"] = 1; }, "\"shards\""},
      {[](Json& i) { i["shards"][0]["file"] = "../shard_00000_00000.safetensors"; },
       "plain file name"},
      {[](Json& i) { i["shards"].push_back(i["shards"][0]); }, "repeats the file"},
      {[](Json& i) { i["shards"][0]["header_xxh3"] = "0123"; }, "no hash of 16 digits"},
      {[](Json& i) { i["shards"][0]["header_xxh3"] = "0123456789abcdef"; }, "its header"},
      {[](Json& i) { i["shards"][0]["bytes"] = 1.5; }, "\"bytes\""},
      {[](Json& i) { i["shards"][0]["bytes"] = 7; }, "but 7 were saved"},
      {[](Json& i) { i["tensors"][0]["name"] = 1; }, "\"name\" that is no text"},
      {[](Json& i) { i["tensors"][0]["name"] = "w.m"; }, "tensor \"w.m\" twice"},
      {[](Json& i) { i["tensors"][0]["role"] = "gradient"; }, "the role \"gradient\""},
      {[](Json& i) { i["tensors"][0]["dtype"] = "f8"; }, "the dtype \"f8\""},
      {[](Json& i) { i["tensors"][0]["dtype"] = "f32"; }, "another dtype or shape"},
      {[](Json& i) {
         i["tensors"][0]["shape"] = {1, 2, 3, 4, 5};
       },
       "more than four"},
      {[](Json& i) {
         i["tensors"][0]["shape"] = {-4, -6};
       },
       "no integer from 0"},
      {[](Json& i) {
         i["tensors"][0]["shape"] = {int64_t{1} << 40, int64_t{1} << 40};
       },
       "too large"},
      {[](Json& i) {
         i["tensors"][0]["shape"] = {4, 7};
       },
       "only 24 of its 28"},
      {[](Json& i) {
         i["tensors"][0]["shape"] = {4, 5};
       },
       "reaches out of its shape"},
      {[](Json& i) { i["tensors"][0]["slices"].erase(0); }, "only 12 of its 24"},
      {[](Json& i) {
         i["tensors"][0]["slices"][1]["offset"] = {1, 0};
       },
       "overlap"},
      {[](Json& i) {
         i["tensors"][0]["slices"][1]["offset"] = {3, 0};
       },
       "reaches out"},
      {[](Json& i) {
         i["tensors"][0]["slices"][1]["offset"] = {std::numeric_limits<int64_t>::max(), 0};
       },
       "reaches out"},
      {[](Json& i) { i["tensors"][0]["slices"][1]["offset"] = Json::array({2}); },
       "different length"},
      {[](Json& i) {
         i["tensors"][0]["slices"][1]["shape"] = {2, 6, 1};
       },
       "different length"},
      {[](Json& i) { i["tensors"][0]["slices"][1]["file"] = "other"; }, "not among \"shards\""},
      {[](Json& i) { i["tensors"][0]["slices"][1]["tensor"] = "other"; }, "\"other\" is missing"},
      {[](Json& i) {
         i["tensors"][0]["slices"][1]["tensor"] = i["tensors"][0]["slices"][0]["tensor"];
       },
       "used twice"},
      {[](Json& i) { i["tensors"].erase(2); }, "hold 10 tensors, but its index refers to 9"},
      {[](Json& i) { i["tensors"] = Json::parse("[[]]"); }, "is not an object"},
  };
  for (const auto& [edit, phrase] : table) {
    SCOPED_TRACE(phrase);
    const TempFolder dir;
    const CheckpointInfo info = save(dir.path(), 1, small_model(), 1);
    edit_index(info.path, edit);
    const std::string message =
        message_of(ExitStatus::failed, [&] { Checkpoint::open(info.path); });
    expect_phrase(message, phrase);
    expect_phrase(message, info.path);
  }
}

TEST(Checkpoint, ListsCompleteOnesByStepAndExplainsTheOthers) {
  const TempFolder dir;
  EXPECT_TRUE(list_checkpoints(dir / "none").empty());
  EXPECT_FALSE(newest_checkpoint(dir / "none").has_value());
  for (const int64_t step : {int64_t{20}, int64_t{3}, int64_t{123'456'789}, int64_t{0}}) {
    save(dir.path(), step, small_model(), 1);
  }
  const std::string folder = dir / "checkpoints";
  std::filesystem::remove(folder + "/step_00000003/COMMIT");
  std::filesystem::copy(folder + "/step_00000020", folder + "/step_00000021");
  std::filesystem::create_directory(folder + "/.tmp_step_00000050_1");
  std::filesystem::create_directory(folder + "/step_7");
  std::filesystem::create_directory(folder + "/step_00000008");
  put_file(folder + "/step_00000009", "a file");

  std::vector<std::string> incomplete;
  const std::vector<CheckpointInfo> found = list_checkpoints(dir.path(), &incomplete);
  ASSERT_EQ(found.size(), 3U);
  EXPECT_EQ(found[0].step, 0);
  EXPECT_EQ(found[1].path, folder + "/step_00000020");
  EXPECT_EQ(found[2].path, folder + "/step_123456789");
  EXPECT_EQ(newest_checkpoint(dir.path())->step, 123'456'789);
  ASSERT_EQ(incomplete.size(), 5U);
  expect_phrase(incomplete[0],
                ".tmp_step_00000050_1: a save or a deletion that is under way or did not finish");
  expect_phrase(incomplete[1], "step_00000003: is not a complete checkpoint");
  expect_phrase(incomplete[2], "step_00000008: is not a complete checkpoint");
  expect_phrase(incomplete[3], "step_00000009: is not a complete checkpoint");
  expect_phrase(incomplete[4], "step_00000021: its index is that of step 20");
}

TEST(Checkpoint, DamagedOnesAreToldFromLeftovers) {
  const TempFolder dir;
  EXPECT_FALSE(has_checkpoint_folders(dir / "none"));
  std::filesystem::create_directories(dir / "checkpoints/.tmp_step_00000050_1");
  std::filesystem::create_directories(dir / "checkpoints/step_7");
  EXPECT_FALSE(has_checkpoint_folders(dir.path()));
  std::filesystem::create_directories(dir / "checkpoints/step_00000007");
  EXPECT_TRUE(has_checkpoint_folders(dir.path()));
}

TEST(Checkpoint, SavingAStepAgainReplacesIt) {
  const TempFolder dir;
  save(dir.path(), 5, small_model(), 1);
  const CheckpointInfo info = save(dir.path(), 5, small_model(), 2);
  load_and_compare(info.path, small_model(), 2);
  EXPECT_EQ(all_below(dir / "checkpoints").size(), 4U);
  // Also when the one in place is damaged.
  std::filesystem::remove(info.path + "/index.json");
  save(dir.path(), 5, small_model(), 3);
  load_and_compare(info.path, small_model(), 3);
  EXPECT_EQ(all_below(dir / "checkpoints").size(), 4U);
}

TEST(Checkpoint, PruningKeepsTheNewest) {
  const TempFolder dir;
  EXPECT_TRUE(prune_checkpoints(dir / "none", {.newest = 1}).empty());
  for (int64_t step = 1; step <= 5; ++step) save(dir.path(), step, small_model(), 1);
  // Incomplete folders neither count as kept nor are deleted.
  std::filesystem::remove(dir / "checkpoints/step_00000005/COMMIT");
  const std::vector<CheckpointInfo> removed = prune_checkpoints(dir.path(), {.newest = 2});
  ASSERT_EQ(removed.size(), 2U);
  EXPECT_EQ(removed[0].step, 1);
  EXPECT_EQ(removed[1].step, 2);
  const std::vector<CheckpointInfo> left = list_checkpoints(dir.path());
  ASSERT_EQ(left.size(), 2U);
  load_and_compare(left[0].path, small_model(), 1);
  load_and_compare(left[1].path, small_model(), 1);
  EXPECT_TRUE(path_exists(dir / "checkpoints/step_00000005"));
  EXPECT_FALSE(path_exists(dir / "checkpoints/step_00000001"));
  EXPECT_TRUE(prune_checkpoints(dir.path(), {.newest = 2}).empty());
}

std::vector<int64_t> steps_in(const std::string& dir) {
  std::vector<int64_t> steps;
  for (const CheckpointInfo& checkpoint : list_checkpoints(dir)) steps.push_back(checkpoint.step);
  return steps;
}

TEST(Checkpoint, PruningKeepsTheBestAndTheRetained) {
  const TempFolder dir;
  for (int64_t step = 1; step <= 9; ++step) save(dir.path(), step, small_model(), 1);
  EXPECT_EQ(best_checkpoint_step(dir.path()), std::nullopt);
  mark_best_checkpoint(dir.path(), 3);
  EXPECT_EQ(best_checkpoint_step(dir.path()), 3);
  prune_checkpoints(dir.path(), {.newest = 2, .retain_interval = 4});
  EXPECT_EQ(steps_in(dir.path()), (std::vector<int64_t>{3, 4, 7, 8, 9}));
  // The link is a way to load it.
  load_and_compare(dir / "checkpoints/best", small_model(), 1);
  mark_best_checkpoint(dir.path(), 9);
  prune_checkpoints(dir.path(), {.newest = 1});
  EXPECT_EQ(steps_in(dir.path()), (std::vector<int64_t>{8, 9})) << "the best does not count";
  // A mark of something that is gone is none.
  std::filesystem::remove_all(dir / "checkpoints/step_00000009");
  EXPECT_EQ(best_checkpoint_step(dir.path()), std::nullopt);
  EXPECT_EQ(steps_in(dir.path()), (std::vector<int64_t>{8}));
}

TEST(CheckpointDeathTest, TheCallersContractIsChecked) {
  const TempFolder dir;
  std::vector<FileCut> cuts = {{"x", kParameter, DType::f32, {4}, {2}}};
  const Slices slices = slices_of(cuts, 1, true);
  const auto save_these = [&](std::vector<SliceToSave> list) {
    save_checkpoint(dir.path(), {1, "v", "{}", std::move(list)});
  };
  std::vector<SliceToSave> list = slices.to_save;
  list.pop_back();
  EXPECT_DEATH(save_these(list), "tensor x has slices for only 2 of its 4 elements");
  list = slices.to_save;
  list[1].box.offset[0] = 1;
  EXPECT_DEATH(save_these(list), "tensor x has slices that overlap");
  list = slices.to_save;
  list.push_back(list[0]);
  EXPECT_DEATH(save_these(list), "tensor x has slices that overlap");
  list = slices.to_save;
  list[1].dtype = DType::i32;
  EXPECT_DEATH(save_these(list), "disagree about what it is");
  list = slices.to_save;
  list[0].name = list[1].name = "x@2";
  EXPECT_DEATH(save_these(list), "must not contain '@'");
  EXPECT_DEATH(save_checkpoint(dir.path(), {-1, "v", "{}", {}}), "needs a step");
  EXPECT_DEATH(save_checkpoint(dir.path(), {1, "v", "[]", {}}), "not a JSON object");
  EXPECT_DEATH(prune_checkpoints(dir.path(), {.newest = 0}), "at least one");
}

// As many elements as the tensor has; the two that overlap are not neighbours in any order.
TEST(CheckpointIndex, FindsSlicesThatOverlapAcrossOthers) {
  const std::vector<Box> boxes = {
      {{0, 0}, {4, 2}}, {{0, 2}, {1, 2}}, {{1, 2}, {1, 2}}, {{2, 1}, {2, 2}}};
  EXPECT_EQ(tiling_fault({4, 4}, boxes), "has slices that overlap");
  EXPECT_EQ(tiling_fault({4, 4}, std::vector<Box>{boxes[0], boxes[1], boxes[2], {{2, 2}, {2, 2}}}),
            "");
}

TEST(Checkpoint, RemovesOneStepButNotTheBest) {
  const TempFolder dir;
  for (int64_t step : {1, 2, 3}) save(dir.path(), step, small_model(), 10);
  mark_best_checkpoint(dir.path(), 2);
  for (int64_t step : {1, 2, 7}) remove_checkpoint(dir.path(), step);
  std::vector<int64_t> left;
  for (const CheckpointInfo& info : list_checkpoints(dir.path())) left.push_back(info.step);
  EXPECT_EQ(left, (std::vector<int64_t>{2, 3}));
}

TEST(Checkpoint, TheHashTellsContentsApart) {
  const TempFolder dir;
  const auto hash_of = [&](const char* run, uint64_t variant) {
    return Checkpoint::open(save(dir / run, 1, small_model(), variant).path).hash();
  };
  const uint64_t hash = hash_of("a", 10);
  EXPECT_EQ(hash_of("b", 10), hash);
  EXPECT_NE(hash_of("c", 11), hash);
}

}  // namespace
}  // namespace troupe
