// Which data sets are for training, and which for validation.
#include "options/data_options.h"

#include <fstream>
#include <gtest/gtest.h>

#include "support/errors.h"
#include "support/files.h"

namespace troupe {
namespace {

using testing::message_of;
using Words = std::vector<std::string>;

TEST(DataSpec, IsTheWholePathOrTheTrainingSplit) {
  Options options;
  options.data_path = {"0.3", "a", "0.7", "b"};
  options.split = "8,1,1";
  DataSpec spec = data_spec_of(options);
  EXPECT_EQ(spec.path.prefixes, (Words{"a", "b"}));
  EXPECT_EQ(spec.path.weights, (std::vector<double>{0.3, 0.7}));
  EXPECT_EQ(spec.split, "8,1,1");
  options.train_data_path = {"c"};
  spec = data_spec_of(options);
  EXPECT_EQ(spec.path.prefixes, Words{"c"});
  EXPECT_EQ(spec.split, "1,0,0") << "validation has data of its own";
  options.mock_data = true;
  spec = data_spec_of(options);
  EXPECT_TRUE(spec.mock);
  EXPECT_TRUE(spec.path.prefixes.empty());
  EXPECT_EQ(spec.split, "8,1,1");
}

TEST(DataSpec, ReadsTheFileOfAllSplits) {
  const testing::TempFolder folder;
  const std::string path = folder / "splits.json";
  std::ofstream(path) << R"({"train": ["2", "a", 1, "b"], "valid": "c d", "test": []})";
  Options options;
  options.per_split_data_args_path = path;
  EXPECT_EQ(data_spec_of(options).path.weights, (std::vector<double>{2, 1}));
  const ValidationSpec validation = validation_spec_of(options);
  ASSERT_TRUE(validation.mixture.has_value());
  EXPECT_EQ(validation.mixture->prefixes, (Words{"c", "d"}));
  std::ofstream(path) << R"({"train": ["a"]})";
  EXPECT_EQ(message_of(ExitStatus::bad_request, [&] { validation_spec_of(options); }),
            "--per-split-data-args-path " + path +
                ": no \"valid\" in it; it is an object of \"train\", \"valid\" and \"test\".");
}

TEST(DataSpec, ASplitOfNothingIsRefused) {
  const testing::TempFolder folder;
  const std::string path = folder / "splits.json";
  Options options;
  options.per_split_data_args_path = path;
  for (const char* empty : {"[]", "\" \"", "{}", "3", "null"}) {
    std::ofstream(path) << R"({"train": )" << empty << "}";
    EXPECT_EQ(
        message_of(ExitStatus::bad_request, [&] { data_spec_of(options); }),
        "--per-split-data-args-path " + path + ": \"train\" is no list of data sets (and weights).")
        << empty;
  }
  std::ofstream(path) << "[]";
  EXPECT_NE(message_of(ExitStatus::bad_request, [&] { data_spec_of(options); })
                .find("no \"train\" in it"),
            std::string::npos);
}

TEST(ValidationSpec, IsAShareAMixtureOrSetsByName) {
  Options options;
  options.data_path = {"a"};
  EXPECT_TRUE(validation_spec_of(options).is_share());
  options.valid_data_path = {"NAME=x/y", "z/books", "news"};
  options.keep_partial_validation_sample = true;
  ValidationSpec spec = validation_spec_of(options);
  EXPECT_TRUE(spec.keep_partial);
  EXPECT_FALSE(spec.is_share() || spec.mixture);
  ASSERT_EQ(spec.sets.size(), 3U);
  EXPECT_EQ(spec.sets[0].name, "NAME");
  EXPECT_EQ(spec.sets[0].prefix, "x/y");
  EXPECT_EQ(spec.sets[1].name, "books");
  EXPECT_EQ(spec.sets[2].name, "news");
  options.valid_data_path = {"x", "y"};
  options.train_data_path = {"a"};
  spec = validation_spec_of(options);
  ASSERT_TRUE(spec.mixture.has_value()) << "as in Megatron";
  EXPECT_EQ(spec.mixture->prefixes, (Words{"x", "y"}));
  options.multiple_validation_sets = true;
  EXPECT_EQ(validation_spec_of(options).sets.size(), 2U);
}

TEST(ValidationSpec, RefusesWhatHasNoNameOrOneTwice) {
  Options options;
  for (const char* wrong : {"=x", "NAME=", "folder/"}) {
    options.valid_data_path = {wrong};
    EXPECT_EQ(message_of(ExitStatus::bad_request, [&] { validation_spec_of(options); }),
              "--valid-data-path \"" + std::string(wrong) +
                  "\": give a data set as PREFIX or NAME=PREFIX.");
  }
  options.valid_data_path = {"a/x", "b/x"};
  EXPECT_EQ(message_of(ExitStatus::bad_request, [&] { validation_spec_of(options); }),
            "--valid-data-path: two sets are called \"x\". Name them: NAME=PREFIX.");
  options.valid_data_path = {};
  options.train_data_path = {"a"};
  EXPECT_EQ(message_of(ExitStatus::bad_request, [&] { validation_spec_of(options); }),
            "--train-data-path is for training alone: evaluations need --valid-data-path.");
}

}  // namespace
}  // namespace troupe
