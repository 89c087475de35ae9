#include "io/hf_weights.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <fmt/format.h>
#include <string_view>
#include <unordered_map>

#include "base/error.h"
#include "base/text.h"
#include "io/convert_dtype.h"
#include "io/file.h"
#include "io/hf_config.h"
#include "io/safetensors.h"

namespace troupe {
namespace {

// What a parameter is called: a tensor for each section of the cut of its rows, or one for all of
// it. Of experts each has tensors of its own, with its number for the braces; names without braces
// are of all experts together.
struct HfName {
  std::string_view parameter;  // within its layer (ParameterSpec::name)
  bool of_experts = false;
  std::vector<std::string_view> tensors = {};
  HfArrangement arrangement = {};
};
using HfNames = std::vector<HfName>;

// A router's bias, within its layer. Whatever the weights are, it is f32: it is compared with
// scores that are close to each other.
constexpr std::string_view kRouterBias = "mlp.gate.e_score_correction_bias";

// Outside the layers, and within "model.layers.N.".
const HfNames& common_names() {
  static const HfNames kNames = {
      {.parameter = "embedding", .tensors = {"model.embed_tokens.weight"}},
      {.parameter = "final_norm", .tensors = {"model.norm.weight"}},
      {.parameter = "head", .tensors = {"lm_head.weight"}},
      {.parameter = "input_norm", .tensors = {"input_layernorm.weight"}},
      {.parameter = "w_qkv",
       .tensors = {"self_attn.q_proj.weight", "self_attn.k_proj.weight",
                   "self_attn.v_proj.weight"}},
      {.parameter = "b_qkv",
       .tensors = {"self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"}},
      {.parameter = "q_norm", .tensors = {"self_attn.q_norm.weight"}},
      {.parameter = "k_norm", .tensors = {"self_attn.k_norm.weight"}},
      {.parameter = "w_q", .tensors = {"self_attn.q_proj.weight"}},
      {.parameter = "w_q_down", .tensors = {"self_attn.q_a_proj.weight"}},
      {.parameter = "q_latent_norm", .tensors = {"self_attn.q_a_layernorm.weight"}},
      {.parameter = "w_q_up", .tensors = {"self_attn.q_b_proj.weight"}},
      {.parameter = "w_kv_down", .tensors = {"self_attn.kv_a_proj_with_mqa.weight"}},
      {.parameter = "kv_latent_norm", .tensors = {"self_attn.kv_a_layernorm.weight"}},
      {.parameter = "w_kv_up", .tensors = {"self_attn.kv_b_proj.weight"}},
      {.parameter = "w_attention_out", .tensors = {"self_attn.o_proj.weight"}},
      {.parameter = "post_attention_norm", .tensors = {"post_attention_layernorm.weight"}},
      {.parameter = "w_gate_up", .tensors = {"mlp.gate_proj.weight", "mlp.up_proj.weight"}},
      {.parameter = "w_down", .tensors = {"mlp.down_proj.weight"}},
      {.parameter = "w_router", .tensors = {"mlp.gate.weight"}},
      {.parameter = "w_gate_up",
       .of_experts = true,
       .tensors = {"mlp.experts.{}.gate_proj.weight", "mlp.experts.{}.up_proj.weight"}},
      {.parameter = "w_down", .of_experts = true, .tensors = {"mlp.experts.{}.down_proj.weight"}},
      {.parameter = "w_shared_gate_up",
       .tensors = {"mlp.shared_expert.gate_proj.weight", "mlp.shared_expert.up_proj.weight"}},
      {.parameter = "w_shared_down", .tensors = {"mlp.shared_expert.down_proj.weight"}},
      {.parameter = "w_shared_gate", .tensors = {"mlp.shared_expert_gate.weight"}},
  };
  return kNames;
}

// Where an architecture has other names.
const HfNames& names_of(std::string_view architecture) {
  static const HfNames kMixtral = {
      {.parameter = "w_router", .tensors = {"block_sparse_moe.gate.weight"}},
      {.parameter = "w_gate_up",
       .of_experts = true,
       .tensors = {"block_sparse_moe.experts.{}.w1.weight",
                   "block_sparse_moe.experts.{}.w3.weight"}},
      {.parameter = "w_down",
       .of_experts = true,
       .tensors = {"block_sparse_moe.experts.{}.w2.weight"}},
  };
  static const HfNames kDeepseek = {
      {.parameter = "w_shared_gate_up",
       .tensors = {"mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"}},
      {.parameter = "w_shared_down", .tensors = {"mlp.shared_experts.down_proj.weight"}},
  };
  static const HfNames kGptOss = {
      {.parameter = "sinks", .tensors = {"self_attn.sinks"}},
      {.parameter = "b_attention_out", .tensors = {"self_attn.o_proj.bias"}},
      {.parameter = "w_router", .tensors = {"mlp.router.weight"}},
      {.parameter = "b_router", .tensors = {"mlp.router.bias"}},
      {.parameter = "w_gate_up",
       .of_experts = true,
       .tensors = {"mlp.experts.gate_up_proj"},
       .arrangement = {.transposed = true, .interleaved = true}},
      {.parameter = "b_gate_up",
       .of_experts = true,
       .tensors = {"mlp.experts.gate_up_proj_bias"},
       .arrangement = {.interleaved = true}},
      {.parameter = "w_down",
       .of_experts = true,
       .tensors = {"mlp.experts.down_proj"},
       .arrangement = {.transposed = true}},
      {.parameter = "b_down", .of_experts = true, .tensors = {"mlp.experts.down_proj_bias"}},
  };
  static const HfNames kNone;
  if (architecture == "GptOssForCausalLM") return kGptOss;
  if (architecture == "MixtralForCausalLM") return kMixtral;
  if (architecture == "DeepseekV2ForCausalLM" || architecture == "DeepseekV3ForCausalLM" ||
      architecture == "Glm4MoeForCausalLM") {
    return kDeepseek;
  }
  return kNone;
}

std::string layer_prefix(int32_t layer) {
  return layer < 0 ? "" : fmt::format("model.layers.{}.", layer);
}

// Appends the tensors of one parameter.
void add_tensors(const ParameterSpec& parameter, const HfNames& own,
                 std::vector<HfTensor>& tensors) {
  const bool of_experts = parameter.gradient_class == GradientClass::expert;
  const auto is_name = [&](const HfName& name) {
    return name.parameter == parameter.name && name.of_experts == of_experts;
  };
  auto name = std::find_if(own.begin(), own.end(), is_name);
  if (name == own.end()) {
    name = std::find_if(common_names().begin(), common_names().end(), is_name);
    if (name == common_names().end()) {
      throw_bad_request(fmt::format(
          "The parameter {} has no name in Hugging Face's architectures that Troupe writes.",
          parameter.full_name()));
    }
  }
  // The shape of one expert's, or of all.
  const Shape& whole = parameter.whole_shape;
  const std::string prefix = layer_prefix(parameter.layer);
  if (of_experts && name->tensors.front().find('{') == std::string_view::npos) {
    tensors.push_back({.name = prefix + std::string(name->tensors.front()),
                       .shape = whole,
                       .arrangement = name->arrangement,
                       .parameter = parameter.id});
    return;
  }
  const int rows = of_experts ? 1 : 0;
  std::vector<int64_t> extents;
  for (int i = rows; i < whole.rank(); ++i) extents.push_back(whole[i]);
  std::vector<int64_t> sections = {whole[rows]};
  for (const Cut& cut : parameter.cuts) {
    if (cut.dimension != rows || name->tensors.size() == 1) continue;
    sections.clear();
    for (const CutSection& section : cut.sections) sections.push_back(section.size);
  }
  TROUPE_CHECK(sections.size() == name->tensors.size(),
               "a tensor for each section of " + parameter.full_name());
  int64_t offset = 0;
  for (int64_t expert = 0; expert < (of_experts ? whole[0] : 1); ++expert) {
    for (size_t i = 0; i < sections.size(); ++i) {
      extents.front() = sections[i];
      const Shape shape(extents);
      tensors.push_back({.name = prefix + fmt::format(fmt::runtime(name->tensors[i]), expert),
                         .shape = shape,
                         .parameter = parameter.id,
                         .offset = offset});
      offset += shape.elements();
    }
  }
}

std::vector<int64_t> file_shape_of(const HfTensor& tensor) {
  std::vector<int64_t> extents;
  for (int i = 0; i < tensor.shape.rank(); ++i) extents.push_back(tensor.shape[i]);
  if (tensor.arrangement.transposed) std::swap(extents.end()[-1], extents.end()[-2]);
  return extents;
}

// Calls move(element of the file, element of the parameter) for every element of a tensor of all
// experts.
template <class Move>
void for_each_arranged(const HfTensor& tensor, const Move& move) {
  const Shape& shape = tensor.shape;
  const int64_t rows = shape[1];
  const int64_t columns = shape.rank() == 3 ? shape[2] : 1;
  for (int64_t expert = 0; expert < shape[0]; ++expert) {
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t half = rows / 2;
      const int64_t there = !tensor.arrangement.interleaved ? row
                            : row < half                    ? 2 * row
                                                            : 2 * (row - half) + 1;
      for (int64_t column = 0; column < columns; ++column) {
        const int64_t within =
            tensor.arrangement.transposed ? column * rows + there : there * columns + column;
        move(expert * rows * columns + within, (expert * rows + row) * columns + column);
      }
    }
  }
}

// The bytes of a tensor of the file in the order of the parameter, or, with `to_file`, the other
// way.
std::vector<std::byte> arranged(const HfTensor& tensor, std::span<const std::byte> bytes,
                                bool to_file) {
  std::vector<std::byte> moved(bytes.size());
  const auto size = bytes.size() / static_cast<size_t>(tensor.shape.elements());
  for_each_arranged(tensor, [&](int64_t in_file, int64_t in_parameter) {
    const int64_t from = to_file ? in_parameter : in_file;
    const int64_t to = to_file ? in_file : in_parameter;
    std::memcpy(moved.data() + static_cast<size_t>(to) * size,
                bytes.data() + static_cast<size_t>(from) * size, size);
  });
  return moved;
}

// Is this a copy of the embedding, which a folder may hold where the head is tied to it? Another
// tensor under the head's name is refused: its values would be lost.
bool is_tied_copy(const SafetensorsFolder& folder, const SafetensorsFile& file,
                  const TensorEntry& entry, const ModelConfig& config) {
  if (!config.tie_embeddings || entry.name != "lm_head.weight") return false;
  const auto embedding = folder.find("model.embed_tokens.weight");
  const auto bytes = file.bytes(entry);
  const bool same = embedding.entry != nullptr && embedding.entry->dtype == entry.dtype &&
                    embedding.entry->shape == entry.shape &&
                    std::equal(bytes.begin(), bytes.end(), embedding.bytes().begin());
  if (!same) {
    throw_bad_request(
        fmt::format("{}: the tensor {} differs from the embedding, which the "
                    "configuration ties it to (tie_word_embeddings).",
                    file.path(), entry.name));
  }
  return true;
}

// Layers of multi-token prediction are numbered after the model's.
bool is_of_prediction_layer(const TensorEntry& entry, const ModelConfig& config, int32_t layers) {
  constexpr std::string_view kPrefix = "model.layers.";
  if (!entry.name.starts_with(kPrefix)) return false;
  int64_t layer = -1;
  const char* end = entry.name.data() + entry.name.size();
  std::from_chars(entry.name.data() + kPrefix.size(), end, layer);
  return layer >= config.num_layers && layer < int64_t{config.num_layers} + layers;
}

void refuse_unused(const SafetensorsFolder& folder, const std::vector<HfTensor>& tensors,
                   const ModelConfig& config, int32_t prediction_layers) {
  for (const SafetensorsFile& file : folder.files()) {
    for (const TensorEntry& entry : file.entries()) {
      const auto found = std::lower_bound(
          tensors.begin(), tensors.end(), entry.name,
          [](const HfTensor& tensor, const std::string& name) { return tensor.name < name; });
      if (found != tensors.end() && found->name == entry.name) continue;
      if (is_tied_copy(folder, file, entry, config)) continue;
      if (is_of_prediction_layer(entry, config, prediction_layers)) continue;
      throw_bad_request(fmt::format("{}: the tensor {} has no place in a {} of this configuration.",
                                    file.path(), printable(entry.name), config.hf_architecture));
    }
  }
}

// Gradients come without those of biases, or with zeros for them.
enum class FolderContents : uint8_t { weights, gradients };

// Opens a folder, checks it against the model, and hands over every tensor's raw bytes.
void visit_folder(
    const std::string& path, const ModelConfig& config, FolderContents contents,
    int32_t prediction_layers,
    const std::function<void(const HfTensor&, FileDType, std::span<const std::byte>)>& visit,
    const WorkReport& report = {}) {
  const SafetensorsFolder folder = SafetensorsFolder::open(path);
  const std::vector<HfTensor> tensors = hf_tensors(config);
  refuse_unused(folder, tensors, config, prediction_layers);
  uint64_t done = 0;
  uint64_t total = 0;
  for (const SafetensorsFile& file : folder.files()) total += file.file_bytes();
  for (const HfTensor& tensor : tensors) {
    if (!tensor.parameter.valid() && contents == FolderContents::gradients) continue;
    const auto located = folder.find(tensor.name);
    if (located.entry == nullptr) {
      throw_bad_request(fmt::format("{}: the tensor {} is missing.", path, tensor.name));
    }
    const std::string where = fmt::format("{}: the tensor {}", located.file->path(), tensor.name);
    const std::vector<int64_t> shape = file_shape_of(tensor);
    if (located.entry->shape != shape) {
      throw_bad_request(fmt::format("{} has the shape [{}], the configuration needs [{}].", where,
                                    fmt::join(located.entry->shape, ", "), fmt::join(shape, ", ")));
    }
    if (!can_convert(located.entry->dtype, DType::f32)) {
      throw_bad_request(fmt::format("{} has the dtype {}; weights are floating-point.", where,
                                    name_of(located.entry->dtype)));
    }
    if (tensor.arrangement.is_plain()) {
      visit(tensor, located.entry->dtype, located.bytes());
    } else {
      visit(tensor, located.entry->dtype, arranged(tensor, located.bytes(), /*to_file=*/false));
    }
    done += located.bytes().size();
    if (report) report(done, total);
  }
}

// One bad weight makes every loss NaN; here it still has a name. `data`: the tensor's elements from
// `first` on.
void require_finite(const std::string& folder, const HfTensor& tensor, DType dtype,
                    const std::byte* data, int64_t first, int64_t elements) {
  const int64_t within = first_not_finite(dtype, data, elements);
  if (within < 0) return;
  const int64_t at = first + within;
  throw_failed(
      fmt::format("{}: the tensor {} is not finite as {} at element {} of {}: the weights are "
                  "damaged, or too large for this type. Fetch them again.",
                  folder, tensor.name, name_of(dtype), at, tensor.shape.elements()));
}

// A parameter that is being loaded.
struct Target {
  const Parameter* parameter = nullptr;
  std::vector<SliceRun> runs;
  int64_t written = 0;  // elements
};

// Copies what the rank holds of the tensor.
void load_tensor(const std::string& folder, const HfTensor& tensor, FileDType dtype,
                 std::span<const std::byte> bytes, Target& target, const StateStorage& storage) {
  const int64_t end = tensor.offset + tensor.shape.elements();
  const size_t source_size = tensor.shape.elements() == 0
                                 ? 0
                                 : bytes.size() / static_cast<size_t>(tensor.shape.elements());
  auto run = std::lower_bound(
      target.runs.begin(), target.runs.end(), tensor.offset,
      [](const SliceRun& other, int64_t first) { return other.whole + other.elements <= first; });
  for (; run != target.runs.end() && run->whole < end; ++run) {
    const int64_t begin = std::max(run->whole, tensor.offset);
    const int64_t elements = std::min(run->whole + run->elements, end) - begin;
    const int64_t first = begin - tensor.offset;
    const std::byte* source = bytes.data() + static_cast<size_t>(first) * source_size;
    const int64_t place = run->own + begin - run->whole;  // in the slice
    const TensorView value = storage.view(target.parameter->value);
    std::byte* own =
        static_cast<std::byte*>(value.data) +
        static_cast<size_t>(place - target.parameter->held.begin) * size_of(value.dtype);
    convert_elements(dtype, source, value.dtype, own, elements);
    require_finite(folder, tensor, value.dtype, own, first, elements);
    if (target.parameter->master.valid()) {
      const IndexRange& shard = target.parameter->shard;
      const int64_t from = std::max(place, shard.begin);
      const int64_t to = std::min(place + elements, shard.end);
      if (from < to) {
        const TensorView master = storage.view(target.parameter->master);
        convert_elements(dtype, source + static_cast<size_t>(from - place) * source_size,
                         master.dtype,
                         static_cast<std::byte*>(master.data) +
                             static_cast<size_t>(from - shard.begin) * size_of(master.dtype),
                         to - from);
      }
    }
    target.written += elements;
  }
}

void load_bias(const std::string& folder, const HfTensor& tensor, FileDType dtype,
               std::span<const std::byte> bytes, const ModelState& state,
               const StateStorage& storage) {
  const StateId bias = state.expert_biases[static_cast<size_t>(tensor.layer)];
  if (!bias.valid()) return;  // another rank's
  const TensorView view = storage.view(bias);
  auto* data = static_cast<std::byte*>(view.data);
  convert_elements(dtype, bytes.data(), view.dtype, data, tensor.shape.elements());
  require_finite(folder, tensor, view.dtype, data, 0, tensor.shape.elements());
}

}  // namespace

std::vector<HfTensor> hf_tensors(const ModelConfig& config) {
  const Model model(config);
  std::vector<HfTensor> tensors;
  for (const ParameterSpec& parameter : model.parameters()) {
    add_tensors(parameter, names_of(config.hf_architecture), tensors);
  }
  for (const RouterStateSpec& state : model.router_states()) {
    tensors.push_back({.name = layer_prefix(state.layer) + std::string(kRouterBias),
                       .shape = state.shape,
                       .parameter = {},
                       .layer = state.layer});
  }
  std::sort(tensors.begin(), tensors.end(),
            [](const HfTensor& a, const HfTensor& b) { return a.name < b.name; });
  return tensors;
}

DType hf_folder_dtype(const std::string& folder) {
  const SafetensorsFolder open = SafetensorsFolder::open(folder);
  DType widest = DType::bf16;
  for (const SafetensorsFile& file : open.files()) {
    for (const TensorEntry& entry : file.entries()) {
      if (entry.name.ends_with(kRouterBias)) continue;
      if (entry.dtype == FileDType::f64) return DType::f64;
      if (entry.dtype == FileDType::f32 || entry.dtype == FileDType::f16) widest = DType::f32;
    }
  }
  return widest;
}

void load_hf_weights(const std::string& folder, const ModelConfig& config, const ModelState& state,
                     const StateStorage& storage, const WorkReport& report) {
  ModelConfig named = config;
  const std::string config_path = join_path(folder, "config.json");
  named.hf_architecture = read_hf_config(config_path).hf_architecture;
  std::unordered_map<int32_t, Target> targets;
  for (const Parameter& parameter : state.parameters) {
    targets[parameter.id.index] = {
        &parameter, runs_within(runs_of(parameter.slice, parameter.whole_shape), parameter.held)};
  }
  visit_folder(
      folder, named, FolderContents::weights, hf_prediction_layers(config_path),
      [&](const HfTensor& tensor, FileDType dtype, std::span<const std::byte> bytes) {
        if (!tensor.parameter.valid())
          return load_bias(folder, tensor, dtype, bytes, state, storage);
        const auto target = targets.find(tensor.parameter.index);
        if (target == targets.end()) return;  // another rank's
        load_tensor(folder, tensor, dtype, bytes, target->second, storage);
      },
      report);
  for (const auto& [number, target] : targets) {
    const IndexRange& held = target.parameter->held;
    TROUPE_CHECK(target.written == held.end - held.begin,
                 "a parameter was not filled exactly once");
  }
}

void read_hf_gradients(
    const std::string& folder, const ModelConfig& config,
    const std::function<void(const HfTensor&, const std::vector<double>&)>& take) {
  std::vector<double> data;
  visit_folder(folder, config, FolderContents::gradients, /*prediction_layers=*/0,
               [&](const HfTensor& tensor, FileDType dtype, std::span<const std::byte> bytes) {
                 data.resize(static_cast<size_t>(tensor.shape.elements()));
                 convert_elements(dtype, bytes.data(), DType::f64, data.data(),
                                  tensor.shape.elements());
                 take(tensor, data);
               });
}

namespace {

// The bytes of a tensor in the file's dtype, in `rounded` where they are not those of memory.
std::span<const std::byte> bytes_as(FileDType dtype, const HfTensor& tensor, const TensorView& view,
                                    std::vector<std::byte>& rounded) {
  const auto* data = static_cast<const std::byte*>(view.data) +
                     static_cast<size_t>(tensor.offset) * size_of(view.dtype);
  const int64_t elements = tensor.shape.elements();
  const size_t bytes = static_cast<size_t>(elements) * size_of(dtype);
  if (to_file_dtype(view.dtype) == dtype) return {data, bytes};
  rounded.resize(bytes);
  convert_elements(to_file_dtype(view.dtype), data, dtype, rounded.data(), elements);
  const int64_t at = first_not_finite(dtype, rounded.data(), elements);
  if (at >= 0) {
    throw_failed(
        fmt::format("The tensor {} is not finite as {}, at element {} of {}. Write it in a "
                    "type that holds it, such as fp32.",
                    tensor.name, name_of(dtype), at, elements));
  }
  return rounded;
}

}  // namespace

void save_hf_model(const std::string& folder, const ModelConfig& config, const ModelState& state,
                   const StateStorage& storage, uint64_t max_shard_bytes, const HfExport& what,
                   const WorkReport& report) {
  // First: it may refuse.
  const std::string config_json =
      what.config_json.empty() ? write_hf_config(config) : what.config_json;
  TROUPE_CHECK(state.part.layout().world_size() == 1, "only a whole model is written");
  const std::vector<HfTensor> tensors = hf_tensors(config);
  const FileDType dtype = what.dtype.value_or(to_file_dtype(state.dtype));
  std::vector<TensorSpec> specs;
  uint64_t total = 0;
  for (const HfTensor& tensor : tensors) {
    specs.push_back(
        {tensor.name, tensor.parameter.valid() ? dtype : FileDType::f32, file_shape_of(tensor)});
    total += bytes_of(specs.back());
  }
  std::vector<std::byte> rounded;
  const Disk disk;
  SafetensorsFolderWriter writer(disk, folder, specs, max_shard_bytes);
  uint64_t done = 0;
  const auto append = [&](size_t tensor, std::span<const std::byte> bytes) {
    constexpr size_t kPiece = size_t{64} << 20;  // between reports
    for (size_t first = 0; first < bytes.size(); first += kPiece) {
      const auto piece = bytes.subspan(first, std::min(kPiece, bytes.size() - first));
      writer.append(tensor, piece);
      done += piece.size();
      if (report) report(done, total);
    }
  };
  for (size_t i = 0; i < tensors.size(); ++i) {
    const TensorView view = storage.view(
        tensors[i].parameter.valid() ? state.get(tensors[i].parameter).value
                                     : state.expert_biases[static_cast<size_t>(tensors[i].layer)]);
    const std::span<const std::byte> bytes = bytes_as(specs[i].dtype, tensors[i], view, rounded);
    if (tensors[i].arrangement.is_plain()) {
      append(i, bytes);
    } else {
      append(i, arranged(tensors[i], bytes, /*to_file=*/true));
    }
  }
  for (const HfFile& file : what.files) {
    disk.write_file(join_path(folder, file.name), file.contents);
  }
  disk.write_file(join_path(folder, "config.json"), config_json);
  writer.finish();
}

}  // namespace troupe
