// Weights in 8 and 4 bits: folders that the test writes from random codes and scales, with its own
// decoding, load to the bits of the decoded fp32 folder on one rank and in slices, come back byte
// for byte, and are refused by the tensor's name where something is wrong.
#include "io/hf_quantization.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <gtest/gtest.h>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/error.h"
#include "io/convert_dtype.h"
#include "io/hf_config.h"
#include "io/hf_weights.h"
#include "io/io_test_support.h"
#include "io/safetensors.h"
#include "model/parameter_layout.h"

namespace troupe {
namespace {

using namespace io_test;
using nlohmann::json;

struct Stored {
  TensorSpec spec;
  std::vector<std::byte> bytes;
};
using Tensors = std::vector<Stored>;

// Numbers that depend on nothing but how many were drawn before.
struct Draws {
  uint64_t state = 1;
  uint32_t below(uint32_t bound) {
    state = state * 6364136223846793005U + 1442695040888963407U;
    return static_cast<uint32_t>(state >> 33) % bound;
  }
};

double fp8_of(uint32_t code) {
  const int exponent = static_cast<int>(code >> 3 & 15U);
  const double mantissa = (code & 7U) / 8.0;
  const double value =
      exponent == 0 ? std::ldexp(mantissa, -6) : std::ldexp(1 + mantissa, exponent - 7);
  return (code & 128U) != 0 ? -value : value;
}

double fp4_of(uint32_t code) {
  const int exponent = static_cast<int>(code >> 1 & 3U);
  const double mantissa = (code & 1U) / 2.0;
  const double value = exponent == 0 ? mantissa : std::ldexp(1 + mantissa, exponent - 1);
  return (code & 8U) != 0 ? -value : value;
}

template <class T>
Stored stored(std::string name, FileDType dtype, std::vector<int64_t> shape,
              const std::vector<T>& values) {
  const auto bytes = std::as_bytes(std::span(values));
  return {{std::move(name), dtype, std::move(shape)}, {bytes.begin(), bytes.end()}};
}

// A matrix of random codes, each block of which holds the largest code and a power of two: then its
// scale is known from the products alone.
void add_fp8(const std::string& name, int64_t rows, int64_t columns, Draws& draws,
             Tensors& quantised, Tensors& plain) {
  const int64_t wide = (columns + 127) / 128;
  std::vector<float> scales(static_cast<size_t>((rows + 127) / 128 * wide));
  for (float& scale : scales) {
    scale = static_cast<float>(1 + draws.below(1U << 23)) * std::ldexp(1.0F, -30);
  }
  std::vector<uint8_t> codes(static_cast<size_t>(rows * columns));
  std::vector<float> values(codes.size());
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t column = 0; column < columns; ++column) {
      const bool first_row = row % 128 == 0;
      const uint32_t code = first_row && column % 128 == 0 ? 0x7e
                            : first_row && column % 128 == 1
                                ? 0xb8
                                : draws.below(127) + 128 * draws.below(2);
      const auto i = static_cast<size_t>(row * columns + column);
      codes[i] = static_cast<uint8_t>(code);
      values[i] = static_cast<float>(fp8_of(code)) *
                  scales[static_cast<size_t>(row / 128 * wide + column / 128)];
    }
  }
  quantised.push_back(stored(name, FileDType::f8e4m3, {rows, columns}, codes));
  quantised.push_back(
      stored(name + "_scale_inv", FileDType::f32, {(rows + 127) / 128, wide}, scales));
  plain.push_back(stored(name, FileDType::f32, {rows, columns}, values));
}

// All experts' matrices: rows x columns in the codes, transposed in the plain folder.
void add_mxfp4(const std::string& name, int64_t experts, int64_t rows, int64_t columns,
               Draws& draws, Tensors& quantised, Tensors& plain) {
  const int64_t groups = columns / 32;
  std::vector<uint8_t> scales(static_cast<size_t>(experts * rows * groups));
  for (uint8_t& scale : scales) scale = static_cast<uint8_t>(110 + draws.below(20));
  std::vector<uint8_t> codes(static_cast<size_t>(experts * rows * columns / 2));
  std::vector<float> values(codes.size() * 2);
  for (int64_t row = 0; row < experts * rows; ++row) {
    for (int64_t column = 0; column < columns; ++column) {
      const uint32_t code = column % 32 == 0 ? 7 : draws.below(16);
      const int64_t i = row * columns + column;
      codes[static_cast<size_t>(i / 2)] |= static_cast<uint8_t>(code << (i % 2 * 4));
      const int64_t there = (row / rows * columns + column) * rows + row % rows;
      values[static_cast<size_t>(there)] =
          static_cast<float>(std::ldexp(fp4_of(code), scales[static_cast<size_t>(i / 32)] - 127));
    }
  }
  quantised.push_back(stored(name + "_blocks", FileDType::u8, {experts, rows, groups, 16}, codes));
  quantised.push_back(stored(name + "_scales", FileDType::u8, {experts, rows, groups}, scales));
  plain.push_back(stored(name, FileDType::f32, {experts, columns, rows}, values));
}

// Any part of the values is what it is in the whole, and nothing beside it is written.
TEST(DequantiseMxfp4, GivesAnyPart) {
  constexpr int64_t kValues = 96;
  Draws draws;
  std::vector<std::byte> codes(kValues / 2);
  for (std::byte& code : codes) code = static_cast<std::byte>(draws.below(256));
  std::vector<std::byte> scales(kValues / 32);
  for (std::byte& scale : scales) scale = static_cast<std::byte>(120 + draws.below(10));
  std::vector<float> whole(kValues);
  dequantise_mxfp4(codes.data(), scales.data(), 0, kValues, whole.data());
  for (int64_t first = 0; first < kValues; first += 5) {
    for (int64_t count = 0; first + count <= kValues; count += 7) {
      std::vector<float> part(kValues + 64, -1000.0F);
      dequantise_mxfp4(codes.data(), scales.data(), first, count, part.data());
      for (int64_t i = 0; i < std::ssize(part); ++i) {
        ASSERT_EQ(part[static_cast<size_t>(i)],
                  i < count ? whole[static_cast<size_t>(first + i)] : -1000.0F)
            << first << " " << count << " " << i;
      }
    }
  }
}

// A family's fixture in sizes that are no multiples of a block, with random weights.
struct Model {
  explicit Model(HfQuantization kind) {
    const bool fp8 = kind == HfQuantization::fp8_block;
    const std::string path =
        std::string(TROUPE_FIXTURE_DIR) + (fp8 ? "/hf/deepseek_v3" : "/hf/gpt_oss");
    config = json::parse(get_file(path + "/config.json"));
    if (fp8) {
      config.update({{"hidden_size", 160},
                     {"moe_intermediate_size", 136},
                     {"intermediate_size", 264},
                     {"q_lora_rank", 136}});
    } else {
      config.update({{"hidden_size", 64}, {"intermediate_size", 32}});
    }
    plain_config = config;
    config["quantization_config"] =
        fp8 ? json::parse(R"({"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
                              "weight_block_size": [128, 128]})")
            : json::parse(R"({"modules_to_not_convert": ["lm_head"], "quant_method": "mxfp4"})");
    Draws draws;
    for (const HfTensor& tensor : hf_tensors(parse_hf_config(config.dump(), "config.json"))) {
      const Shape& shape = tensor.shape;
      const bool is_linear = tensor.name.find("_proj") != std::string::npos && shape.rank() == 2;
      if (fp8 && is_linear) {
        add_fp8(tensor.name, shape[0], shape[1], draws, quantised, plain);
      } else if (!fp8 && shape.rank() == 3) {
        add_mxfp4(tensor.name, shape[0], shape[1], shape[2], draws, quantised, plain);
      } else {
        std::vector<int64_t> extents;
        for (int i = 0; i < shape.rank(); ++i) extents.push_back(shape[i]);
        std::vector<float> values(static_cast<size_t>(shape.elements()));
        for (float& value : values) value = (static_cast<float>(draws.below(256)) - 128) / 256;
        const Stored tensor_of_both = stored(tensor.name, FileDType::f32, extents, values);
        quantised.push_back(tensor_of_both);
        plain.push_back(tensor_of_both);
      }
    }
  }
  Stored& find(const std::string& suffix) {
    const auto found = std::find_if(quantised.begin(), quantised.end(), [&](const Stored& tensor) {
      return tensor.spec.name.ends_with(suffix);
    });
    TROUPE_CHECK(found != quantised.end(), "no " + suffix);
    return *found;
  }
  std::string write(const std::string& name) const {
    const bool is_plain = name == "plain";
    const Tensors& tensors = is_plain ? plain : quantised;
    std::vector<TensorSpec> specs;
    for (const Stored& tensor : tensors) specs.push_back(tensor.spec);
    const Disk disk;
    SafetensorsFolderWriter writer(disk, folder / name, specs, uint64_t{1} << 30);
    for (size_t i = 0; i < tensors.size(); ++i) writer.append(i, tensors[i].bytes);
    writer.finish();
    put_file(folder / (name + "/config.json"), (is_plain ? plain_config : config).dump());
    return folder / name;
  }

  json config;
  json plain_config;
  Tensors quantised;
  Tensors plain;
  TempFolder folder;
};

struct State {
  State(const std::string& path, DType dtype, const ModelPart& part = {}, bool trained = false)
      : config(read_hf_config(path + "/config.json")),
        state(part.run == nullptr ? declare_model_state(config, dtype, trained)
                                  : declare_model_state(config, dtype, trained, part)),
        storage(state.table) {
    load_hf_weights(path, config, state, storage);
  }
  ModelConfig config;
  ModelState state;
  StateStorage storage;
};

void expect_same(const State& found, const State& expected) {
  for (const Parameter& parameter : found.state.parameters) {
    const Parameter& other = expected.state.parameters.at(parameter.number());
    for (const auto& [id, wanted] :
         {std::pair(parameter.value, other.value), std::pair(parameter.master, other.master)}) {
      if (!id.valid()) continue;
      const TensorView own = found.storage.view(id);
      ASSERT_EQ(std::memcmp(own.data, expected.storage.view(wanted).data,
                            static_cast<size_t>(own.shape.elements()) * size_of(own.dtype)),
                0)
          << parameter.full_name();
    }
  }
}

class QuantisedFolder : public ::testing::TestWithParam<HfQuantization> {};

TEST_P(QuantisedFolder, LoadsToTheBitsOfItsDecodedForm) {
  const Model model(GetParam());
  const std::string quantised = model.write("quantised");
  const std::string plain = model.write("plain");
  EXPECT_EQ(hf_folder_quantization(quantised), GetParam());
  EXPECT_EQ(hf_folder_quantization(plain), HfQuantization::none);
  for (const DType dtype : {DType::f32, DType::bf16, DType::f64}) {
    ASSERT_NO_FATAL_FAILURE(expect_same(State(quantised, dtype), State(plain, dtype)));
  }
  // With master weights, which are not rounded to bf16.
  expect_same(State(quantised, DType::bf16, {}, /*trained=*/true),
              State(plain, DType::bf16, {}, /*trained=*/true));
}

TEST_P(QuantisedFolder, SlicesAreThoseOfItsDecodedForm) {
  const Model model(GetParam());
  const std::string quantised = model.write("quantised");
  const std::string plain = model.write("plain");
  const ModelConfig config = read_hf_config(plain + "/config.json");
  struct Sizes {
    int32_t world, tp, ep, etp;
  };
  for (const Sizes& sizes :
       {Sizes{2, 2, 1, 1}, Sizes{2, 1, 2, 1}, Sizes{2, 2, 2, 1}, Sizes{4, 2, 2, 2}}) {
    if (sizes.etp > 1 && GetParam() == HfQuantization::mxfp4) continue;  // biases are not sliced
    OrRefusal<PipelinePartition> partition =
        even_partition(config.num_layers, 1, 1, StagePlacement::loop);
    OrRefusal<Layout> layout =
        try_layout({.world_size = sizes.world,
                    .tensor_parallel = sizes.tp,
                    .expert_parallel = sizes.ep,
                    .expert_tensor_parallel = sizes.etp,
                    .sequence_parallel = true,
                    .embedding_places = partition.value().embedding_ranks(false)});
    ASSERT_EQ(layout.refusal(), nullptr);
    const auto run = std::make_shared<const RunLayout>(RunLayout{
        std::move(layout.value()), std::move(partition.value()), {}, StateSharding::none});
    for (int32_t rank = 0; rank < sizes.world; ++rank) {
      SCOPED_TRACE(rank);
      const ModelPart part = {.run = run, .rank = rank};
      ASSERT_NO_FATAL_FAILURE(
          expect_same(State(quantised, DType::f32, part), State(plain, DType::f32, part)));
    }
  }
}

// With the source's scales, and, as each block here holds its largest code, without them.
TEST_P(QuantisedFolder, ComesBackByteForByte) {
  const Model model(GetParam());
  const std::string path = model.write("quantised");
  const State loaded(path, DType::f32);
  for (const std::string& source : {path, std::string()}) {
    const std::string copy = model.folder / (source.empty() ? "by_rule" : "copy");
    save_hf_model(copy, loaded.config, loaded.state, elements_in(loaded.storage), uint64_t{1} << 30,
                  {.config_json = model.config.dump(),
                   .dtype = FileDType::f32,
                   .quantization = GetParam(),
                   .scales_from = source});
    const SafetensorsFolder after = SafetensorsFolder::open(copy);
    size_t written = 0;
    for (const SafetensorsFile& file : after.files()) written += file.entries().size();
    EXPECT_EQ(written, model.quantised.size());
    for (const Stored& tensor : model.quantised) {
      const auto found = after.find(tensor.spec.name);
      ASSERT_NE(found.entry, nullptr) << tensor.spec.name;
      EXPECT_EQ(static_cast<const TensorSpec&>(*found.entry), tensor.spec);
      EXPECT_TRUE(std::ranges::equal(found.bytes(), tensor.bytes))
          << tensor.spec.name << " " << copy;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, QuantisedFolder,
                         ::testing::Values(HfQuantization::fp8_block, HfQuantization::mxfp4),
                         [](const auto& info) {
                           return info.param == HfQuantization::mxfp4 ? "mxfp4" : "fp8";
                         });

// Published folders have scales in bf16, too, which say the same numbers and come back as they are.
TEST(QuantisedFolders, ScalesMayHaveFewerBits) {
  for (const FileDType narrow : {FileDType::bf16, FileDType::f16}) {
    SCOPED_TRACE(name_of(narrow));
    Model wide(HfQuantization::fp8_block);
    Model model(HfQuantization::fp8_block);
    for (size_t i = 0; i < model.quantised.size(); ++i) {
      Stored& tensor = model.quantised[i];
      if (!tensor.spec.name.ends_with("_scale_inv")) continue;
      const int64_t count = elements_of(tensor.spec);
      std::vector<float> values(static_cast<size_t>(count));
      std::memcpy(values.data(), tensor.bytes.data(), tensor.bytes.size());
      for (float& value : values) value *= 1024;  // normal numbers in 16 bits
      tensor.spec.dtype = narrow;
      tensor.bytes.resize(bytes_of(tensor.spec));
      convert_elements(FileDType::f32, values.data(), narrow, tensor.bytes.data(), count);
      convert_elements(narrow, tensor.bytes.data(), DType::f32, wide.quantised[i].bytes.data(),
                       count);
    }
    const std::string path = model.write("quantised");
    const State loaded(path, DType::f32);
    ASSERT_NO_FATAL_FAILURE(expect_same(loaded, State(wide.write("quantised"), DType::f32)));
    EXPECT_EQ(hf_folder_dtype(path), DType::f32);
    save_hf_model(model.folder / "copy", loaded.config, loaded.state, elements_in(loaded.storage),
                  uint64_t{1} << 30,
                  {.config_json = model.config.dump(),
                   .quantization = HfQuantization::fp8_block,
                   .scales_from = path});
    EXPECT_EQ(get_file(model.folder / "copy/model.safetensors"),
              get_file(path + "/model.safetensors"));
  }
}

// Scales that the type of the source's cannot say are not rounded: weights would change.
TEST(QuantisedFolders, ScalesAreNotRounded) {
  Model model(HfQuantization::fp8_block);
  for (Stored& tensor : model.quantised) {
    if (!tensor.spec.name.ends_with("_scale_inv")) continue;
    tensor.spec.dtype = FileDType::bf16;
    tensor.bytes.resize(bytes_of(tensor.spec));
    for (size_t i = 0; i < tensor.bytes.size(); i += 2) {
      tensor.bytes[i] = std::byte{0};
      tensor.bytes[i + 1] = std::byte{0x3f};
    }
  }
  const std::string path = model.write("quantised");
  const State other(model.write("plain"), DType::f32);  // of other scales
  expect_phrase(message_of(ExitStatus::failed,
                           [&] {
                             save_hf_model(model.folder / "copy", other.config, other.state,
                                           elements_in(other.storage), uint64_t{1} << 30,
                                           {.config_json = model.config.dump(),
                                            .quantization = HfQuantization::fp8_block,
                                            .scales_from = path});
                           }),
                "_scale_inv are not exact as BF16");
}

// PyTorch's name of the type is that of MiniMax-M2's config.json.
TEST(QuantisedFolders, TheTypeHasTwoNames) {
  const auto quantization = [](const char* format) {
    json config = {
        {"quantization_config", {{"quant_method", "fp8"}, {"weight_block_size", {128, 128}}}}};
    if (format != nullptr) config["quantization_config"]["fmt"] = format;
    return parse_hf_quantization(config.dump(), "config.json");
  };
  for (const char* format : {"e4m3", "float8_e4m3fn", static_cast<const char*>(nullptr)}) {
    EXPECT_EQ(quantization(format), HfQuantization::fp8_block);
  }
  expect_phrase(message_of(ExitStatus::bad_request, [&] { quantization("e5m2"); }),
                "\"fmt\": \"e5m2\"; supported are \"e4m3\" and \"float8_e4m3fn\"");
}

void expect_refused(const Model& model, std::initializer_list<const char*> phrases,
                    ExitStatus status = ExitStatus::bad_request) {
  const std::string message =
      message_of(status, [&] { State(model.write("refused"), DType::f32); });
  for (const char* phrase : phrases) expect_phrase(message, phrase);
}

constexpr const char* kDown = "layers.1.mlp.experts.5.down_proj.weight";
constexpr const char* kDownScales = "layers.1.mlp.experts.5.down_proj.weight_scale_inv";

TEST(QuantisedRefusal, NamesTheTensor) {
  Model missing(HfQuantization::fp8_block);
  std::erase_if(missing.quantised,
                [](const Stored& tensor) { return tensor.spec.name.ends_with(kDownScales); });
  expect_refused(missing, {kDownScales, "is missing"});
  Model shape(HfQuantization::fp8_block);
  shape.find(kDownScales).spec.shape = {4, 1};
  expect_refused(shape, {kDownScales, "has the shape [4, 1]", "[2, 2]"});
  Model dtype(HfQuantization::fp8_block);
  dtype.find(kDownScales).spec.dtype = FileDType::i32;
  expect_refused(dtype, {kDownScales, "I32", "F32"});
  Model nan(HfQuantization::fp8_block);
  nan.find(kDown).bytes[3] = std::byte{0x7f};
  expect_refused(nan, {kDown, "not finite", "element 3"}, ExitStatus::failed);
  for (const auto& [value, text] : {std::pair(0.0F, " is 0 "), std::pair(-0.5F, " is -0.5 "),
                                    std::pair(std::numeric_limits<float>::infinity(), " is inf "),
                                    std::pair(std::numeric_limits<float>::quiet_NaN(), "nan ")}) {
    Model scale(HfQuantization::fp8_block);
    std::memcpy(&scale.find(kDownScales).bytes[4], &value, sizeof value);
    expect_refused(scale, {kDownScales, text, "at element 1 of 4; scales are positive and finite"},
                   ExitStatus::failed);
  }
  Model silent(HfQuantization::fp8_block);
  silent.config.erase("quantization_config");
  expect_refused(silent, {"_scale_inv", "has no place"});
  Model codes(HfQuantization::mxfp4);
  std::erase_if(codes.quantised, [](const Stored& tensor) {
    return tensor.spec.name == "model.layers.0.mlp.experts.down_proj_blocks";
  });
  expect_refused(codes, {"model.layers.0.mlp.experts.down_proj_blocks", "is missing"});
  Model scale(HfQuantization::mxfp4);
  scale.find("layers.1.mlp.experts.gate_up_proj_scales").bytes[0] = std::byte{255};
  expect_refused(scale, {"gate_up_proj", "not finite"}, ExitStatus::failed);
}

TEST(QuantisedRefusal, NamesTheMethod) {
  Model model(HfQuantization::fp8_block);
  model.config["quantization_config"]["weight_block_size"] = {64, 64};
  expect_refused(model, {"weight_block_size", "[64,64]"});
  Model other(HfQuantization::mxfp4);
  other.config["quantization_config"]["quant_method"] = "gptq";
  expect_refused(other, {"quantization_config", "gptq", "fp8", "mxfp4"});
}

// A model of another form than its architecture has, or whose rows no group of a scale divides.
TEST(QuantisedRefusal, NamesTheFormThatTheModelHas) {
  const auto refusal = [](const std::string& name, HfQuantization quantization) {
    const std::string path = std::string(TROUPE_FIXTURE_DIR "/hf/") + name + "/config.json";
    const ModelConfig config = parse_hf_config(get_file(path), path);
    return message_of(ExitStatus::bad_request,
                      [&] { hf_quantization_config(config, quantization); });
  };
  EXPECT_EQ(refusal("gpt_oss", HfQuantization::fp8_block),
            "The weights of GptOssForCausalLM are not written as fp8-block. Choose mxfp4, the form "
            "in which they are published, or bf16.");
  EXPECT_EQ(
      refusal("mixtral", HfQuantization::mxfp4),
      "The weights of MixtralForCausalLM are not written as mxfp4. Choose fp8-block or bf16.");
  expect_phrase(refusal("gpt_oss", HfQuantization::mxfp4),
                "has rows of 24 elements; mxfp4 needs a multiple of 32.");
}

// Weights that no scale reproduces: DeepSeek's scale, and the nearest of all 256 codes.
TEST(Quantise, RoundsToTheNearestFp8) {
  Draws draws;
  std::vector<float> values(130 * 131);
  for (float& value : values) {
    value = std::ldexp(static_cast<float>(draws.below(1U << 24)) - 0x1p23F,
                       -30 - static_cast<int>(draws.below(12)));
  }
  std::vector<uint8_t> codes(values.size());
  std::vector<float> scales(4);
  quantise_fp8(values, 131, {}, codes, scales);
  for (int64_t block = 0; block < 4; ++block) {
    float largest = 0;
    for (int64_t i = 0; i < 130 * 131; ++i) {
      if (i / 131 / 128 * 2 + i % 131 / 128 != block) continue;
      largest = std::max(largest, std::fabs(values[static_cast<size_t>(i)]));
    }
    EXPECT_EQ(scales[static_cast<size_t>(block)], largest / 448) << block;
  }
  for (size_t i = 0; i < values.size(); ++i) {
    const double quotient = values[i] / scales[i / 131 / 128 * 2 + i % 131 / 128];
    double nearest = 1e9;
    for (uint32_t code = 0; code < 256; ++code) {
      if ((code & 127U) != 127) nearest = std::min(nearest, std::fabs(fp8_of(code) - quotient));
    }
    // Of two codes as near the one with an even mantissa; nothing is added to the distance.
    ASSERT_EQ(std::fabs(fp8_of(codes[i]) - quotient), nearest) << i;
  }
}

TEST(Quantise, RoundsToTheNearestFp4) {
  // 7 is the largest: 7 / 6 needs the scale 2, and ties (0.25, 0.75, ...) go to even codes.
  std::vector<float> values(32);
  const float quotients[] = {3.5F, 0.25F, 0.75F, 1.25F, 1.75F, 2.5F, -2.5F, 0.26F};
  const uint8_t expected[] = {6, 0, 2, 2, 4, 4, 12, 1};
  for (size_t i = 0; i < 8; ++i) values[i] = 2 * quotients[i];
  std::vector<uint8_t> codes(16);
  std::vector<uint8_t> scales(1);
  quantise_mxfp4(values, {}, codes, scales);
  EXPECT_EQ(scales[0], 128);
  for (size_t i = 0; i < 8; ++i) {
    EXPECT_EQ(codes[i / 2] >> (i % 2 * 4) & 15, expected[i]) << i;
  }
}

// The largest code of a block may be any that is more than half of the largest of all.
TEST(Quantise, FindsTheScaleOfEveryLargestFp8Code) {
  constexpr float kScale = 0.1F;
  for (uint32_t largest = 0x77; largest <= 0x7e; ++largest) {
    std::vector<float> values;
    for (uint32_t code = 0; code <= largest; ++code) {
      values.push_back(static_cast<float>(fp8_of(code)) * kScale);
    }
    std::vector<uint8_t> codes(values.size());
    std::vector<float> scales(1);
    quantise_fp8(values, std::ssize(values), {}, codes, scales);
    for (size_t i = 0; i < values.size(); ++i) {
      ASSERT_EQ(static_cast<float>(fp8_of(codes[i])) * scales[0], values[i])
          << "code " << i << " of " << largest;
    }
  }
}

}  // namespace
}  // namespace troupe
