// The index of a checkpoint, committed with its right hash, beside shards that are in order. What
// is accepted is loaded as the saved tensors, and its training state is read.
#include <array>

#include "harness.h"
#include "io/checkpoint.h"
#include "io/hash.h"
#include "io/hf_config.h"
#include "io/model_config_json.h"
#include "options/options.h"
#include "train/training_checkpoint.h"

namespace troupe::fuzz {
namespace {

constexpr std::array kRoles = {CheckpointRole::parameter, CheckpointRole::optimizer,
                               CheckpointRole::state};

std::string training_state() {
  const std::string path = "tests/fixtures/hf/mixtral/config.json";
  Options options;
  options.command = Command::train;
  return R"({"position":{"step":3,"updates":3,"consumed_samples":12,"scheduled_samples":12},)"
         R"("model":)" +
         write_model_config(parse_hf_config(read_source_file(path), path)) +
         R"(,"compute_dtype":"f32","seed":1234,"seq_length":16,"split":"969,30,1",)"
         R"("tokenizer_type":"byte","options":)" +
         to_json(options) + "}";
}

struct Tensors {
  std::array<float, 6> weight = {0, 1, 2, 3, 4, 5};
  std::array<double, 2> moment = {6, 7};
  int64_t count = 8;
};

std::string save() {
  Tensors tensors;
  const Shape shape = {2, 3};
  Box upper;
  upper.shape = {1, 3};
  Box lower = upper;
  lower.offset[0] = 1;
  Box vector;
  vector.shape = {2};
  CheckpointContent content;
  content.step = 3;
  content.troupe_version = "0.1.0";
  content.training = training_state();
  content.slices = {
      {"w", CheckpointRole::parameter, DType::f32, shape, upper, tensors.weight.data()},
      {"w", CheckpointRole::parameter, DType::f32, shape, lower, tensors.weight.data() + 3},
      {"w.exp_avg", CheckpointRole::optimizer, DType::f64, {2}, vector, tensors.moment.data()},
      {"count", CheckpointRole::state, DType::i64, {}, {}, &tensors.count}};
  return save_checkpoint(scratch_folder(), content, {.max_shard_bytes = 32, .hook = {}}).path;
}

const std::string& checkpoint_folder() {
  static const std::string path = save();
  return path;
}

void load(const Checkpoint& checkpoint) {
  Tensors tensors;
  tensors.weight.fill(-1);
  const Shape shape = {2, 3};
  Box whole;
  whole.shape = shape;
  Box vector;
  vector.shape = {2};
  const std::array<SliceToLoad, 3> slices = {
      SliceToLoad{"w", CheckpointRole::parameter, DType::f32, shape, whole, tensors.weight.data()},
      SliceToLoad{
          "w.exp_avg", CheckpointRole::optimizer, DType::f64, {2}, vector, tensors.moment.data()},
      SliceToLoad{"count", CheckpointRole::state, DType::i64, {}, {}, &tensors.count}};
  checkpoint.load(slices, kRoles);
  for (const float value : tensors.weight) {
    if (!(value >= 0 && value <= 5)) report_finding("an element was not loaded");
  }
}

}  // namespace

void parse(std::string_view input) {
  const std::string& folder = checkpoint_folder();
  const std::string name = folder.substr(scratch_folder().size() + 1);
  put_file(name + "/index.json", input);
  put_file(name + "/COMMIT", hash_to_hex(hash_bytes(input.data(), input.size())) + "\n");
  const Checkpoint checkpoint = Checkpoint::open(folder);
  // Both are tried: the one may refuse what the other takes.
  try {
    load(checkpoint);
  } catch (const UserError&) {
  }
  read_stored_run(checkpoint);
}

std::vector<std::string> seeds() {
  const std::string name = checkpoint_folder().substr(scratch_folder().size() + 1);
  std::string text;
  std::FILE* file = std::fopen((scratch_folder() + "/" + name + "/index.json").c_str(), "rb");
  for (int c = std::fgetc(file); c != EOF; c = std::fgetc(file))
    text.push_back(static_cast<char>(c));
  std::fclose(file);
  return {text};
}

}  // namespace troupe::fuzz
