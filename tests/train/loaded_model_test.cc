// What is taken of a model on disk: its weights in parts, its tokenizer, and how it was evaluated.
#include "train/loaded_model.h"

#include <filesystem>
#include <gtest/gtest.h>
#include <string>
#include <tuple>

#include "io/file.h"
#include "support/errors.h"
#include "support/files.h"
#include "train/weights_in_parts.h"

namespace troupe {
namespace {

using testing::expect_phrase;
using testing::message_of;

const std::string kFolderTokenizers = TROUPE_FIXTURE_DIR "/tokenizers/";

TEST(LoadedWeights, OfAFolderAreTheSameInParts) {
  int folders = 0;
  for (const auto& entry : std::filesystem::directory_iterator(TROUPE_FIXTURE_DIR "/hf")) {
    if (!path_exists(join_path(entry.path(), "model.safetensors"))) continue;
    ++folders;
    for (const DType dtype : {DType::f32, DType::bf16}) {
      expect_same_in_parts(find_model(entry.path(), dtype), dtype);
    }
  }
  EXPECT_GT(folders, 20);
}

class LoadedTokenizer : public ::testing::Test {
 protected:
  LoadedTokenizer() { options.load = folder.path(); }
  void copy(const std::string& file) const {
    std::filesystem::copy(kFolderTokenizers + file, folder.path());
  }
  TokenizerModel found() {
    note.clear();
    return tokenizer_of(model, options, note);
  }
  testing::TempFolder folder;
  SavedModel model;
  Options options;
  std::string note;
};

TEST_F(LoadedTokenizer, IsThatOfTheFolder) {
  EXPECT_EQ(found().type, "byte");
  expect_phrase(note, "holds no tokenizer (tokenizer.json, tokenizer.model)");
  copy("unigram/tokenizer.model");
  EXPECT_EQ(found().type, "SentencePieceTokenizer");
  EXPECT_EQ(note, "");
  copy("gpt2/tokenizer.json");
  EXPECT_EQ(found().type, "HuggingFaceTokenizer") << "the newer of two";
}

// One that is not read here is no reason to refuse a folder that also has another.
TEST_F(LoadedTokenizer, MayBeTheOtherOfTwo) {
  testing::put_file(folder / "tokenizer.json", R"({"model": {"type": "WordPiece"}})");
  expect_phrase(message_of(ExitStatus::bad_request, [&] { found(); }), "WordPiece");
  copy("unigram/tokenizer.model");
  EXPECT_EQ(found().type, "SentencePieceTokenizer");
}

TEST_F(LoadedTokenizer, IsTheOneThatIsNamed) {
  copy("gpt2/tokenizer.json");
  copy("unigram/tokenizer.model");
  options.given.emplace_back("tokenizer-type");
  EXPECT_EQ(found().type, "byte");
  EXPECT_EQ(note, "");
  options.tokenizer_type = "SentencePieceTokenizer";
  EXPECT_EQ(found().contents, testing::get_file(kFolderTokenizers + "unigram/tokenizer.model"));
  options.tokenizer_model = kFolderTokenizers + "bpe/tokenizer.model";
  EXPECT_EQ(found().contents, testing::get_file(kFolderTokenizers + "bpe/tokenizer.model"));
}

TEST_F(LoadedTokenizer, OfACheckpointIsItsOwn) {
  model.from_checkpoint = true;
  model.identity.tokenizer = {.type = "NullTokenizer", .path = "x", .contents = "9 8", .eod = ""};
  EXPECT_EQ(found().contents, "9 8");
  options.tokenizer_model = "other.json";
  EXPECT_EQ(message_of(ExitStatus::bad_request, [&] { found(); }),
            "--tokenizer-model other.json: the checkpoint in " + folder.path() +
                " has its own tokenizer (NullTokenizer); leave the flag out.");
}

class EvaluationAsSaved : public ::testing::Test {
 protected:
  EvaluationAsSaved() {
    model.from_checkpoint = true;
    model.identity.sequence = 24;
    saved.command = Command::train;
    saved.micro_batch_size = 3;
    saved.eval_iters = 7;
    saved.split = "8,1,1";
    saved.eod_mask_loss = true;
    saved.global_batch_size = 12;
    saved.ranks = 2;
  }
  Options options_of(const Options& asked) {
    model.identity.options_json = to_json(saved);
    return evaluation_options(model, asked);
  }
  SavedModel model;
  Options saved;
  Options asked;
};

TEST_F(EvaluationAsSaved, TakesWhatWasNotAsked) {
  Options result = options_of(asked);
  EXPECT_EQ(result.seq_length, 24);
  EXPECT_EQ(result.micro_batch_size, 3);
  EXPECT_EQ(result.eval_iters, 7);
  EXPECT_EQ(result.split, "8,1,1");
  EXPECT_TRUE(result.eod_mask_loss);
  EXPECT_FALSE(result.reset_attention_mask);
  EXPECT_EQ(evaluation_samples(model, result), 7 * 12);

  saved.eval_micro_batch_size = 5;
  EXPECT_EQ(options_of(asked).micro_batch_size, 5) << "batches of evaluation may be others";
  saved.eval_iters = 0;
  EXPECT_EQ(options_of(asked).eval_iters, Options{}.eval_iters) << "it was not evaluated";

  asked.micro_batch_size = 2;
  asked.seq_length = 8;
  asked.split = "1,1,0";
  asked.given = {"micro-batch-size", "split"};
  result = options_of(asked);
  EXPECT_EQ(result.micro_batch_size, 2);
  EXPECT_EQ(result.seq_length, 8);
  EXPECT_EQ(result.split, "1,1,0");
}

TEST_F(EvaluationAsSaved, TakesTheLargestBatchOfARamp) {
  saved.rampup_batch_size = "6 6 60";
  EXPECT_EQ(evaluation_samples(model, options_of(asked)), 7 * 12);
}

TEST_F(EvaluationAsSaved, OfAFolderIsAsAsked) {
  model.from_checkpoint = false;
  model.config.max_position_embeddings = 40;
  asked.eval_iters = 4;
  asked.micro_batch_size = 2;
  const Options result = options_of(asked);
  EXPECT_EQ(result.seq_length, 40);
  EXPECT_EQ(result.split, asked.split);
  EXPECT_EQ(result.micro_batch_size, 2);
  EXPECT_EQ(evaluation_samples(model, result), 8);
}

// Each of the options by which a model was evaluated, with a value that is no default.
TEST_F(EvaluationAsSaved, TakesEachOfTheOptions) {
  saved.eval_iters = 1;
  saved.reset_attention_mask = true;
  saved.keep_partial_validation_sample = true;
  saved.loss_chunk_tokens = 96;
  saved.moe_dispatch_fwd_dtype = MessageDtype::mxfp8;
  saved.fp4_format = Fp4Format::e2m1;
  saved.fp8_format = Fp8Format::e4m3;
  saved.fp8_recipe = Fp8Recipe::tensorwise;
  saved.fp8_modules = {"experts"};
  saved.fp8_amax_history_len = 17;
  saved.fp8_amax_compute_algo = AmaxChoice::most_recent;
  saved.fp8_margin = 3;
  saved.first_last_layers_bf16 = true;
  saved.num_layers_at_start_in_bf16 = 2;
  saved.num_layers_at_end_in_bf16 = 4;
  const auto precision_of = [](const Options& options) {
    return std::tie(options.fp4_format, options.fp8_format, options.fp8_recipe, options.fp8_modules,
                    options.fp8_amax_history_len, options.fp8_amax_compute_algo, options.fp8_margin,
                    options.first_last_layers_bf16, options.num_layers_at_start_in_bf16,
                    options.num_layers_at_end_in_bf16);
  };
  const Options result = options_of(asked);
  EXPECT_EQ(result.eval_iters, 1);
  EXPECT_TRUE(result.reset_attention_mask);
  EXPECT_TRUE(result.keep_partial_validation_sample);
  EXPECT_EQ(result.loss_chunk_tokens, 96);
  EXPECT_EQ(result.moe_dispatch_fwd_dtype, saved.moe_dispatch_fwd_dtype);
  EXPECT_EQ(precision_of(result), precision_of(saved));
  for (const char* const recipe : {"fp8-format", "fp4-format"}) {
    asked.given = {recipe};
    const Options other = options_of(asked);
    EXPECT_EQ(precision_of(other), precision_of(asked)) << "all of another recipe: " << recipe;
    EXPECT_EQ(other.loss_chunk_tokens, 96);
  }
  asked.given = {"fp8-margin"};
  EXPECT_EQ(options_of(asked).fp8_margin, asked.fp8_margin);
  EXPECT_EQ(options_of(asked).fp8_recipe, saved.fp8_recipe);
}

TEST_F(EvaluationAsSaved, CountsSamplesOfTheBatchesOfItsRanks) {
  saved.global_batch_size = std::nullopt;
  saved.ranks = 16;
  saved.tensor_model_parallel_size = 2;
  saved.pipeline_model_parallel_size = 2;
  EXPECT_EQ(evaluation_samples(model, options_of(asked)), 7 * 3 * 4) << "of 4 replicas, 3 each";
}

TEST_F(LoadedTokenizer, OfAnotherTypeWithoutFilesIsNotReadFromTheFolder) {
  options.tokenizer_type = "NullTokenizer";
  options.given.emplace_back("tokenizer-type");
  model.config.vocab_size = 77;
  EXPECT_EQ(found().type, "NullTokenizer");
  EXPECT_EQ(found().contents, "77 76") << "the ids of the model";
}

}  // namespace
}  // namespace troupe
