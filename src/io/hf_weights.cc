#include "io/hf_weights.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <fmt/format.h>
#include <limits>
#include <nlohmann/json.hpp>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "base/error.h"
#include "base/text.h"
#include "io/convert_dtype.h"
#include "io/file.h"
#include "io/hf_config.h"
#include "io/safetensors.h"

namespace troupe {
namespace {

std::vector<int64_t> file_shape_of(const HfTensor& tensor) {
  std::vector<int64_t> extents;
  for (int i = 0; i < tensor.shape.rank(); ++i) extents.push_back(tensor.shape[i]);
  if (tensor.arrangement.has_unit_dimension) extents.insert(extents.end() - 1, 1);
  if (tensor.arrangement.transposed) std::swap(extents.end()[-1], extents.end()[-2]);
  return extents;
}

// The row of the file, of an expert's, that is a row of the parameter.
int64_t file_row(const HfTensor& tensor, int64_t row) {
  const int64_t half = tensor.shape[1] / 2;
  if (!tensor.arrangement.interleaved) return row;
  return row < half ? 2 * row : 2 * (row - half) + 1;
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
      const int64_t there = file_row(tensor, row);
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
  if (!config.tie_embeddings || entry.name != kHfHead) return false;
  const auto embedding =
      folder.find(hf_name_in(folder, config, hf_embedding_of(config.hf_architecture)));
  const auto bytes = file.bytes(entry);
  const bool same = embedding.entry != nullptr && embedding.entry->dtype == entry.dtype &&
                    embedding.entry->shape == entry.shape &&
                    std::equal(bytes.begin(), bytes.end(), embedding.bytes().begin());
  file.forget(entry);
  if (!same) {
    throw_bad_request(
        fmt::format("{}: the tensor {} differs from the embedding, which the "
                    "configuration ties it to (tie_word_embeddings).",
                    file.path(), entry.name));
  }
  return true;
}

// Is it the name of a tensor of those among `layers` layers of multi-token prediction that the
// configuration has not?
bool is_of_left_out_layer(std::string_view name, const ModelConfig& config, int32_t layers) {
  constexpr std::string_view kPrefix = "model.layers.";
  if (hf_mtp_names_of(config) == HfMtpNames::apart && layers > 0) {
    return config.mtp_num_layers == 0 && name.starts_with("mtp.");
  }
  if (!name.starts_with(kPrefix)) return false;
  int64_t layer = -1;
  std::from_chars(name.data() + kPrefix.size(), name.data() + name.size(), layer);
  return layer >= int64_t{config.num_layers} + config.own_mtp_layers() &&
         layer < int64_t{config.num_layers} + layers;
}

constexpr std::string_view kFp8Scales = "_scale_inv";
constexpr std::string_view kMxfp4Codes = "_blocks";
constexpr std::string_view kMxfp4Scales = "_scales";
constexpr FileDType kFp8ScaleTypes[] = {FileDType::f32, FileDType::bf16, FileDType::f16};

// How the folder holds a tensor.
HfQuantization quantization_of(const SafetensorsFolder& folder, const HfTensor& tensor,
                               HfQuantization of_folder) {
  const TensorEntry* entry = folder.find(tensor.name).entry;
  if (entry != nullptr && entry->dtype == FileDType::f8e4m3) {
    if (of_folder == HfQuantization::fp8_block) return HfQuantization::fp8_block;
  } else if (entry == nullptr && tensor.arrangement.transposed &&
             of_folder == HfQuantization::mxfp4) {
    return HfQuantization::mxfp4;
  }
  return HfQuantization::none;
}

const HfTensor* find_tensor(const std::vector<HfTensor>& tensors, std::string_view name) {
  const auto found = std::lower_bound(
      tensors.begin(), tensors.end(), name,
      [](const HfTensor& tensor, std::string_view wanted) { return tensor.name < wanted; });
  return found != tensors.end() && found->name == name ? &*found : nullptr;
}

// Is it the codes or the scales of a tensor that the folder holds in that form?
bool is_of_quantised(const SafetensorsFolder& folder, const std::vector<HfTensor>& tensors,
                     std::string_view name, HfQuantization of_folder) {
  for (const auto& [suffix, quantization] : {std::pair(kFp8Scales, HfQuantization::fp8_block),
                                             std::pair(kMxfp4Codes, HfQuantization::mxfp4),
                                             std::pair(kMxfp4Scales, HfQuantization::mxfp4)}) {
    if (quantization != of_folder || !name.ends_with(suffix)) continue;
    const HfTensor* tensor = find_tensor(tensors, name.substr(0, name.size() - suffix.size()));
    return tensor != nullptr && quantization_of(folder, *tensor, of_folder) == quantization;
  }
  return false;
}

void refuse_unused(const SafetensorsFolder& folder, const std::vector<HfTensor>& tensors,
                   const ModelConfig& config, int32_t prediction_layers,
                   HfQuantization quantization) {
  for (const SafetensorsFile& file : folder.files()) {
    for (const TensorEntry& entry : file.entries()) {
      if (find_tensor(tensors, entry.name) != nullptr) continue;
      if (is_of_quantised(folder, tensors, entry.name, quantization)) continue;
      if (is_tied_copy(folder, file, entry, config)) continue;
      if (is_of_left_out_layer(entry.name, config, prediction_layers)) continue;
      if (is_of_hf_vision(folder, config, entry.name)) continue;
      throw_bad_request(fmt::format("{}: the tensor {} has no place in a {} of this configuration.",
                                    file.path(), printable(entry.name), config.hf_architecture));
    }
  }
}

// Gradients come without those of biases, or with zeros for them.
enum class FolderContents : uint8_t { weights, gradients };

// A tensor as a folder holds it.
struct StoredTensor {
  HfQuantization quantization = HfQuantization::none;
  FileDType dtype = FileDType::f32;       // of what read_stored gives
  std::span<const std::byte> bytes = {};  // in the order of the parameter; codes in the file's
  std::span<const std::byte> scales = {};
  FileDType scale_dtype = FileDType::f32;  // of fp8
};

// Elements [first, first + count) in the order of the parameter. Those of quantised tensors are
// decoded into the buffer, and nothing else of them is read.
const std::byte* read_stored(const HfTensor& tensor, const StoredTensor& stored, int64_t first,
                             int64_t count, std::vector<float>& buffer) {
  if (stored.quantization == HfQuantization::none) {
    return stored.bytes.data() + static_cast<size_t>(first) * size_of(stored.dtype);
  }
  buffer.resize(static_cast<size_t>(count));
  const int64_t columns = tensor.shape[tensor.shape.rank() - 1];
  if (stored.quantization == HfQuantization::fp8_block) {
    dequantise_fp8(stored.bytes.data(), stored.scales.data(), columns, first, count, buffer.data());
  } else {
    const int64_t rows = tensor.shape[1];
    for (int64_t done = 0; done < count;) {
      const int64_t row = (first + done) / columns;
      const int64_t column = (first + done) % columns;
      const int64_t piece = std::min(count - done, columns - column);
      const int64_t there = row / rows * rows + file_row(tensor, row % rows);
      dequantise_mxfp4(stored.bytes.data(), stored.scales.data(), there * columns + column, piece,
                       buffer.data() + done);
      done += piece;
    }
  }
  return reinterpret_cast<const std::byte*>(buffer.data());
}

// What the folder must hold, in one of these types; empty: in any floating-point one.
SafetensorsFolder::Located find_required(const SafetensorsFolder& folder, const TensorSpec& wanted,
                                         std::span<const FileDType> dtypes) {
  const auto located = folder.find(wanted.name);
  if (located.entry == nullptr) {
    throw_bad_request(fmt::format("{}: the tensor {} is missing.", folder.path(), wanted.name));
  }
  const std::string where = fmt::format("{}: the tensor {}", located.file->path(), wanted.name);
  if (located.entry->shape != wanted.shape) {
    throw_bad_request(fmt::format("{} has the shape [{}], the configuration needs [{}].", where,
                                  fmt::join(located.entry->shape, ", "),
                                  fmt::join(wanted.shape, ", ")));
  }
  const FileDType dtype = located.entry->dtype;
  if (dtypes.empty() && !can_convert(dtype, DType::f32)) {
    throw_bad_request(fmt::format(
        "{} has the dtype {}; weights are floating-point, or quantised as the config.json says.",
        where, name_of(dtype)));
  }
  if (!dtypes.empty() && std::find(dtypes.begin(), dtypes.end(), dtype) == dtypes.end()) {
    std::vector<std::string_view> names;
    for (const FileDType possible : dtypes) names.push_back(name_of(possible));
    throw_bad_request(fmt::format("{} has the dtype {}; codes and scales of this kind are {}.",
                                  where, name_of(dtype), fmt::join(names, ", ")));
  }
  return located;
}

// The tensors of a file that one quantised tensor is: codes, scales.
std::pair<TensorSpec, TensorSpec> quantised_specs(const HfTensor& tensor,
                                                  HfQuantization quantization) {
  const Shape& shape = tensor.shape;
  if (quantization == HfQuantization::fp8_block) {
    TROUPE_CHECK(shape.rank() == 2, "fp8 blocks are those of a matrix");
    return {{tensor.name, FileDType::f8e4m3, {shape[0], shape[1]}},
            {tensor.name + std::string(kFp8Scales),
             FileDType::f32,
             {fp8_blocks(shape[0]), fp8_blocks(shape[1])}}};
  }
  if (shape[2] % kMxfp4Group != 0) {
    throw_bad_request(
        fmt::format("The tensor {} has rows of {} elements; mxfp4 needs a multiple of {}.",
                    tensor.name, shape[2], kMxfp4Group));
  }
  const int64_t groups = shape[2] / kMxfp4Group;
  return {{tensor.name + std::string(kMxfp4Codes),
           FileDType::u8,
           {shape[0], shape[1], groups, kMxfp4Group / 2}},
          {tensor.name + std::string(kMxfp4Scales), FileDType::u8, {shape[0], shape[1], groups}}};
}

// A copy that differs is refused: its values would be lost.
void require_same_copy(const SafetensorsFolder& folder, const HfTensor& copy) {
  const auto located = folder.find(copy.name);
  if (located.entry == nullptr) return;
  const auto original = folder.find(copy.copy_of);
  const auto bytes = located.bytes();
  if (original.entry != nullptr && original.entry->dtype == located.entry->dtype &&
      original.entry->shape == located.entry->shape &&
      std::equal(bytes.begin(), bytes.end(), original.bytes().begin())) {
    located.forget();
    return;
  }
  throw_bad_request(
      fmt::format("{}: the tensor {} differs from {}, which layers of multi-token prediction share "
                  "here. Without these layers the folder can be read.",
                  located.file->path(), copy.name, copy.copy_of));
}

// A tensor of an open folder, whose shape and dtype are those that the model needs.
struct FoundTensor {
  HfTensor tensor;
  HfQuantization quantization = HfQuantization::none;
  SafetensorsFolder::Located stored;  // codes of a quantised one
  SafetensorsFolder::Located scales;
};

// Checks a folder against the model, and finds every tensor but copies; sorted by name.
std::vector<FoundTensor> find_tensors(const SafetensorsFolder& folder, const ModelConfig& config,
                                      FolderContents contents, int32_t prediction_layers,
                                      HfQuantization of_folder) {
  const std::vector<HfTensor> tensors = hf_tensors(config, &folder);
  refuse_unused(folder, tensors, config, prediction_layers, of_folder);
  std::vector<FoundTensor> found;
  for (const HfTensor& tensor : tensors) {
    if (tensor.is_copy()) {
      require_same_copy(folder, tensor);
      continue;
    }
    if (!tensor.parameter.valid() && contents == FolderContents::gradients) continue;
    FoundTensor& next = found.emplace_back();
    next.tensor = tensor;
    next.quantization = quantization_of(folder, tensor, of_folder);
    if (next.quantization == HfQuantization::none) {
      next.stored = find_required(folder, {.name = tensor.name, .shape = file_shape_of(tensor)},
                                  /*dtypes=*/{});
      continue;
    }
    const auto [codes, scales] = quantised_specs(tensor, next.quantization);
    next.stored = find_required(folder, codes, std::span(&codes.dtype, 1));
    const bool is_fp8 = next.quantization == HfQuantization::fp8_block;
    next.scales = find_required(
        folder, scales,
        is_fp8 ? std::span<const FileDType>(kFp8ScaleTypes) : std::span(&scales.dtype, 1));
  }
  return found;
}

// Calls visit(tensor, its StoredTensor).
template <class Visit>
void visit_tensor(const FoundTensor& found, const Visit& visit) {
  StoredTensor stored = {.quantization = found.quantization, .bytes = found.stored.bytes()};
  std::vector<std::byte> moved;
  if (found.quantization != HfQuantization::none) {
    stored.scales = found.scales.bytes();
    stored.scale_dtype = found.scales.entry->dtype;
  } else {
    stored.dtype = found.stored.entry->dtype;
    if (!found.tensor.arrangement.is_plain()) {
      moved = arranged(found.tensor, stored.bytes, /*to_file=*/false);
      stored.bytes = moved;
    }
  }
  visit(found.tensor, stored);
  found.stored.forget();
  if (found.scales.entry != nullptr) found.scales.forget();
}

// Elements of the whole parameter among which are all of the tensor.
IndexRange range_of(const HfTensor& tensor) {
  IndexRange range = {std::numeric_limits<int64_t>::max(), 0};
  for (const HfPiece& piece : tensor.pieces()) {
    range.begin = std::min(range.begin, piece.offset);
    range.end = std::max(range.end, piece.offset + piece.elements);
  }
  return range;
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

// Copies elements [first, first + elements) of the tensor to `place` of the slice.
void load_piece(const std::string& folder, const HfTensor& tensor, const StoredTensor& stored,
                int64_t first, int64_t elements, int64_t place, const Parameter& parameter,
                const StateStorage& storage, std::vector<float>& buffer) {
  const std::byte* source = read_stored(tensor, stored, first, elements, buffer);
  const StateId checked =
      storage.table()[parameter.value].is_stored ? parameter.value : parameter.master;
  // Those that `id` has, which holds elements `range` of the slice.
  const auto convert = [&](StateId id, const IndexRange& range) {
    const int64_t from = std::max(place, range.begin);
    const int64_t to = std::min(place + elements, range.end);
    if (!id.valid() || !storage.table()[id].is_stored || from >= to) return;
    const TensorView view = storage.view(id);
    std::byte* own = static_cast<std::byte*>(view.data) +
                     static_cast<size_t>(from - range.begin) * size_of(view.dtype);
    convert_elements(stored.dtype,
                     source + static_cast<size_t>(from - place) * size_of(stored.dtype), view.dtype,
                     own, to - from);
    if (id != checked) return;
    require_finite(folder, tensor, view.dtype, own, first + from - place, to - from);
  };
  convert(parameter.value, parameter.held);
  convert(parameter.master, parameter.shard);
}

// The scales of a tensor in fp8. A block whose scale is no positive number has no weights.
std::vector<float> fp8_scales(const std::string& folder, const HfTensor& tensor,
                              const StoredTensor& stored) {
  std::vector<float> scales(stored.scales.size() / size_of(stored.scale_dtype));
  convert_elements(stored.scale_dtype, stored.scales.data(), DType::f32, scales.data(),
                   std::ssize(scales));
  const auto bad = std::find_if(scales.begin(), scales.end(),
                                [](float scale) { return !(scale > 0) || !std::isfinite(scale); });
  if (bad != scales.end()) {
    throw_failed(fmt::format(
        "{}: the tensor {}{} is {} at element {} of {}; scales are positive and finite. The "
        "weights are damaged. Fetch them again.",
        folder, tensor.name, kFp8Scales, *bad, bad - scales.begin(), scales.size()));
  }
  return scales;
}

// Copies what the rank holds of the tensor.
void load_tensor(const std::string& folder, const HfTensor& tensor, const StoredTensor& stored,
                 Target& target, const StateStorage& storage) {
  constexpr int64_t kPiece = int64_t{1} << 20;  // elements that are decoded at once
  std::vector<float> buffer;
  std::vector<float> scales;
  StoredTensor decodable = stored;
  for (const HfPiece& piece : tensor.pieces()) {
    const int64_t end = piece.offset + piece.elements;
    auto run = std::lower_bound(
        target.runs.begin(), target.runs.end(), piece.offset,
        [](const SliceRun& other, int64_t first) { return other.whole + other.elements <= first; });
    for (; run != target.runs.end() && run->whole < end; ++run) {
      const int64_t last = std::min(run->whole + run->elements, end);
      if (stored.quantization == HfQuantization::fp8_block && scales.empty()) {
        scales = fp8_scales(folder, tensor, stored);
        decodable.scales = std::as_bytes(std::span(scales));
        decodable.scale_dtype = FileDType::f32;
      }
      for (int64_t begin = std::max(run->whole, piece.offset); begin < last; begin += kPiece) {
        const int64_t elements = std::min(kPiece, last - begin);
        load_piece(folder, tensor, decodable, begin - piece.offset + piece.first, elements,
                   run->own + begin - run->whole, *target.parameter, storage, buffer);
        target.written += elements;
      }
    }
  }
}

void load_bias(const std::string& folder, const HfTensor& tensor, const StoredTensor& stored,
               const ModelState& state, const StateStorage& storage) {
  const TensorView view = storage.view(state.expert_biases[static_cast<size_t>(tensor.layer)]);
  auto* data = static_cast<std::byte*>(view.data);
  convert_elements(stored.dtype, stored.bytes.data(), view.dtype, data, tensor.shape.elements());
  require_finite(folder, tensor, view.dtype, data, 0, tensor.shape.elements());
}

}  // namespace

HfPredictionLayers find_hf_prediction_layers(const std::string& folder) {
  const std::string path = join_path(folder, "config.json");
  const int32_t layers = hf_prediction_layers(path);
  const ModelConfig without = read_hf_config(path);
  HfPredictionLayers found = {.announced = hf_announced_prediction_layers(path),
                              .are_read = hf_mtp_names_of(without) != HfMtpNames::none};
  if (layers == 0) return found;
  const SafetensorsFolder open = SafetensorsFolder::open(folder);
  const auto is_theirs = [&](const auto& tensor) {
    return is_of_left_out_layer(tensor.name, without, layers);
  };
  const bool has_any =
      std::any_of(open.files().begin(), open.files().end(), [&](const SafetensorsFile& file) {
        return std::any_of(file.entries().begin(), file.entries().end(), is_theirs);
      });
  if (!has_any) return found;
  found.held = layers;
  if (!found.are_read) return found;
  ModelConfig with = without;
  with.mtp_num_layers = layers;
  with.validate();
  for (const HfTensor& tensor : hf_tensors(with, &open)) {
    if (tensor.is_copy() || !is_theirs(tensor)) continue;
    if (open.find(tensor.name).entry != nullptr) continue;
    found.missing = tensor.name;
    break;
  }
  return found;
}

HfQuantization hf_folder_quantization(const std::string& folder) {
  const std::string path = join_path(folder, "config.json");
  return parse_hf_quantization(read_file(path, kMaxHfConfigBytes), path);
}

DType hf_folder_dtype(const std::string& folder) {
  const SafetensorsFolder open = SafetensorsFolder::open(folder);
  DType widest = DType::bf16;
  for (const SafetensorsFile& file : open.files()) {
    for (const TensorEntry& entry : file.entries()) {
      if (is_hf_router_bias(entry.name) || entry.name.ends_with(kFp8Scales)) continue;
      if (entry.dtype == FileDType::f64) return DType::f64;
      if (entry.dtype == FileDType::f32 || entry.dtype == FileDType::f16) widest = DType::f32;
    }
  }
  return widest;
}

FileDType hf_folder_main_dtype(const std::string& folder) {
  const SafetensorsFolder open = SafetensorsFolder::open(folder);
  std::unordered_map<FileDType, int64_t> elements;
  for (const SafetensorsFile& file : open.files()) {
    for (const TensorEntry& entry : file.entries()) {
      if (entry.name.ends_with(kFp8Scales) || !can_convert(entry.dtype, FileDType::f32)) continue;
      elements[entry.dtype] += elements_of(entry);
    }
  }
  FileDType most = to_file_dtype(hf_folder_dtype(folder));
  for (const FileDType dtype : kFileDTypes) {
    if (elements[dtype] > elements[most]) most = dtype;
  }
  return most;
}

struct HfWeights::Source {
  SafetensorsFolder folder;
  std::vector<FoundTensor> tensors;
  std::unordered_map<int32_t, std::vector<size_t>> of_parameter;  // numbers of tensors
  std::unordered_map<int32_t, size_t> of_bias;                    // by layer

  Source(SafetensorsFolder open, const ModelConfig& config, int32_t prediction_layers,
         HfQuantization quantization)
      : folder(std::move(open)),
        tensors(find_tensors(folder, config, FolderContents::weights, prediction_layers,
                             quantization)) {
    for (size_t i = 0; i < tensors.size(); ++i) {
      const HfTensor& tensor = tensors[i].tensor;
      if (tensor.parameter.valid()) {
        of_parameter[tensor.parameter.index].push_back(i);
      } else {
        of_bias[tensor.layer] = i;
      }
    }
  }

  // Adds the numbers of the tensors that have elements of these stretches of a parameter.
  void add_tensors_of(const Parameter& parameter, const std::vector<SliceRun>& runs,
                      std::vector<size_t>& numbers) const {
    const auto found = of_parameter.find(parameter.id.index);
    if (found == of_parameter.end() || runs.empty()) return;
    for (const size_t number : found->second) {
      const IndexRange range = range_of(tensors[number].tensor);
      if (range.begin < runs.back().whole + runs.back().elements &&
          runs.front().whole < range.end) {
        numbers.push_back(number);
      }
    }
  }
};

HfWeights::HfWeights(const std::string& folder, const ModelConfig& config) {
  ModelConfig named = config;
  const std::string config_path = join_path(folder, "config.json");
  const ModelConfig of_folder = read_hf_config(config_path);
  named.hf_architecture = of_folder.hf_architecture;
  // A model that gets its first expert biases here begins with zeros.
  named.moe_router_enable_expert_bias =
      config.moe_router_enable_expert_bias && of_folder.moe_router_enable_expert_bias;
  const int32_t prediction_layers = hf_prediction_layers(config_path);
  if (config.own_mtp_layers() > 0 && hf_mtp_names_of(named) == HfMtpNames::none) {
    throw_bad_request(fmt::format(
        "{}: layers of multi-token prediction of {} are not read, so the model can have "
        "none.",
        folder, named.hf_architecture));
  }
  if (config.own_mtp_layers() > prediction_layers) {
    throw_bad_request(
        fmt::format("{}: the folder has {} layers of multi-token prediction, the model {}.", folder,
                    prediction_layers, config.own_mtp_layers()));
  }
  const HfQuantization quantization = hf_folder_quantization(folder);
  source_ = std::make_unique<const Source>(SafetensorsFolder::open(folder), named,
                                           prediction_layers, quantization);
}

HfWeights::HfWeights(HfWeights&&) noexcept = default;
HfWeights::~HfWeights() = default;

void HfWeights::load(const ModelState& state, const StateStorage& storage,
                     const WorkReport& report) const {
  std::unordered_map<int32_t, Target> targets;
  std::vector<size_t> numbers;
  for (const Parameter& parameter : state.parameters) {
    Target& target = targets[parameter.id.index];
    target = {&parameter,
              runs_within(runs_of(parameter.slice, parameter.whole_shape), parameter.held)};
    source_->add_tensors_of(parameter, target.runs, numbers);
  }
  for (const auto& [layer, number] : source_->of_bias) {
    const auto place = static_cast<size_t>(layer);
    if (place < state.expert_biases.size() && state.expert_biases[place].valid()) {
      numbers.push_back(number);
    }
  }
  std::sort(numbers.begin(), numbers.end());
  const auto bytes_of = [&](size_t number) {
    const FoundTensor& found = source_->tensors[number];
    return found.stored.bytes().size() +
           (found.scales.entry == nullptr ? 0 : found.scales.bytes().size());
  };
  uint64_t done = 0;
  uint64_t total = 0;
  for (const size_t number : numbers) total += bytes_of(number);
  const std::string& folder = source_->folder.path();
  for (const size_t number : numbers) {
    visit_tensor(source_->tensors[number], [&](const HfTensor& tensor, const StoredTensor& stored) {
      if (!tensor.parameter.valid()) return load_bias(folder, tensor, stored, state, storage);
      load_tensor(folder, tensor, stored, targets.at(tensor.parameter.index), storage);
    });
    done += bytes_of(number);
    if (report) report(done, total);
  }
  for (const auto& [number, target] : targets) {
    const IndexRange& held = target.parameter->held;
    TROUPE_CHECK(target.written == held.end - held.begin,
                 "a parameter was not filled exactly once");
  }
}

void load_hf_weights(const std::string& folder, const ModelConfig& config, const ModelState& state,
                     const StateStorage& storage, const WorkReport& report) {
  HfWeights(folder, config).load(state, storage, report);
}

void read_hf_gradients(
    const std::string& path, const ModelConfig& config,
    const std::function<void(const HfTensor&, const std::vector<double>&)>& take) {
  const SafetensorsFolder folder = SafetensorsFolder::open(path);
  std::vector<double> data;
  for (const FoundTensor& found : find_tensors(folder, config, FolderContents::gradients,
                                               /*prediction_layers=*/0, HfQuantization::none)) {
    visit_tensor(found, [&](const HfTensor& tensor, const StoredTensor& stored) {
      data.resize(static_cast<size_t>(tensor.shape.elements()));
      convert_elements(stored.dtype, stored.bytes.data(), DType::f64, data.data(),
                       tensor.shape.elements());
      take(tensor, data);
    });
  }
}

namespace {

// Room for a tensor that is not written as it lies in memory.
struct WriteBuffers {
  std::vector<std::byte> gathered;
  std::vector<std::byte> rounded;
};

// A tensor of the state that a tensor of the files is some of.
struct Origin {
  StateId id;
  DType dtype = DType::f32;
  const ElementReader& read;
};

// The elements of a tensor in its order and in the dtype of memory.
const std::byte* elements_of(const HfTensor& tensor, const Origin& origin,
                             std::vector<std::byte>& gathered) {
  const IndexRange range = range_of(tensor);
  const std::byte* data = origin.read(origin.id, range);
  if (tensor.scattered.empty()) return data;
  const size_t size = size_of(origin.dtype);
  gathered.resize(static_cast<size_t>(tensor.shape.elements()) * size);
  for (const HfPiece& piece : tensor.scattered) {
    std::memcpy(gathered.data() + static_cast<size_t>(piece.first) * size,
                data + static_cast<size_t>(piece.offset - range.begin) * size,
                static_cast<size_t>(piece.elements) * size);
  }
  return gathered.data();
}

// The bytes of a tensor in the file's dtype.
std::span<const std::byte> bytes_as(FileDType dtype, const HfTensor& tensor, const Origin& origin,
                                    WriteBuffers& buffers) {
  const std::byte* data = elements_of(tensor, origin, buffers.gathered);
  const int64_t elements = tensor.shape.elements();
  const size_t bytes = static_cast<size_t>(elements) * size_of(dtype);
  if (to_file_dtype(origin.dtype) == dtype) return {data, bytes};
  std::vector<std::byte>& rounded = buffers.rounded;
  rounded.resize(bytes);
  convert_elements(to_file_dtype(origin.dtype), data, dtype, rounded.data(), elements);
  const int64_t at = first_not_finite(dtype, rounded.data(), elements);
  if (at >= 0) {
    throw_failed(
        fmt::format("The tensor {} is not finite as {}, at element {} of {}. Write it in a "
                    "type that holds it, such as fp32.",
                    tensor.name, name_of(dtype), at, elements));
  }
  return rounded;
}

// Is it of a layer of the decoder, be it one of multi-token prediction?
bool is_of_layer(const HfTensor& tensor) {
  return tensor.name.starts_with("model.layers.") || tensor.name.starts_with("mtp.layers.");
}

// Is it quantised where no folder says? The linear layers of the decoder's layers but routers,
// gates of shared experts and what joins the inputs of multi-token prediction; in mxfp4 the
// experts.
bool is_quantised(const HfTensor& tensor, HfQuantization quantization) {
  switch (quantization) {
    case HfQuantization::none:
      return false;
    case HfQuantization::fp8_block:
      return tensor.shape.rank() == 2 && !tensor.arrangement.has_unit_dimension &&
             is_of_layer(tensor) && tensor.name.ends_with(".weight") &&
             !tensor.name.ends_with("gate.weight") && !tensor.name.ends_with("eh_proj.weight") &&
             !tensor.is_copy();
    case HfQuantization::mxfp4:
      return tensor.arrangement.transposed;
  }
  return false;
}

// What a folder of the same model has under the name and in the shape of these scales.
SafetensorsFolder::Located scales_in(const std::optional<SafetensorsFolder>& folder,
                                     const TensorSpec& scales) {
  if (!folder) return {};
  const auto located = folder->find(scales.name);
  const bool fits = located.entry != nullptr && located.entry->shape == scales.shape &&
                    can_convert(located.entry->dtype, scales.dtype);
  return fits ? located : SafetensorsFolder::Located{};
}

// quantised_specs, with scales in the type that the folder has them in. `tensor` has the name that
// it has there.
std::pair<TensorSpec, TensorSpec> specs_as_in(const std::optional<SafetensorsFolder>& folder,
                                              const HfTensor& tensor, HfQuantization quantization) {
  auto specs = quantised_specs(tensor, quantization);
  const auto located = scales_in(folder, specs.second);
  if (located.entry != nullptr) specs.second.dtype = located.entry->dtype;
  return specs;
}

// Codes and scales as the file has them.
struct QuantisedTensor {
  std::vector<uint8_t> codes;
  std::vector<std::byte> scales;
};

// Scales that are not the source's may need more bits than those.
std::vector<std::byte> scales_as(const TensorSpec& spec, const std::vector<float>& scales) {
  std::vector<std::byte> bytes(bytes_of(spec));
  convert_elements(FileDType::f32, scales.data(), spec.dtype, bytes.data(), std::ssize(scales));
  std::vector<float> again(scales.size());
  convert_elements(spec.dtype, bytes.data(), DType::f32, again.data(), std::ssize(scales));
  if (again != scales) {
    throw_failed(
        fmt::format("The scales {} are not exact as {}. Write the weights in a type that "
                    "holds them, such as fp32.",
                    spec.name, name_of(spec.dtype)));
  }
  return bytes;
}

// `tensor` has the name that it has in the folder of the scales.
QuantisedTensor quantised(const HfTensor& tensor, HfQuantization quantization,
                          std::span<const std::byte> f32_values,
                          const std::optional<SafetensorsFolder>& source) {
  const auto [codes, scales] = specs_as_in(source, tensor, quantization);
  std::vector<float> values(static_cast<size_t>(tensor.shape.elements()));
  QuantisedTensor result = {.codes = std::vector<uint8_t>(bytes_of(codes)),
                            .scales = std::vector<std::byte>(bytes_of(scales))};
  const int64_t columns = tensor.shape[tensor.shape.rank() - 1];
  const auto count = static_cast<size_t>(elements_of(scales));
  const auto located = scales_in(source, scales);
  if (quantization == HfQuantization::fp8_block) {
    std::memcpy(values.data(), f32_values.data(), f32_values.size());
    std::vector<float> hints;
    if (located.entry != nullptr) {
      hints.resize(count);
      convert_elements(located.entry->dtype, located.bytes().data(), DType::f32, hints.data(),
                       std::ssize(hints));
    }
    std::vector<float> found(count);
    quantise_fp8(values, columns, hints, result.codes, found);
    result.scales = scales_as(scales, found);
    return result;
  }
  std::vector<uint8_t> hints;
  if (located.entry != nullptr) {
    hints.resize(count);
    std::memcpy(hints.data(), located.bytes().data(), count);
  }
  const int64_t rows = tensor.shape[1];
  const size_t row_bytes = static_cast<size_t>(columns) * sizeof(float);
  for (int64_t row = 0; row < tensor.shape[0] * rows; ++row) {
    const int64_t there = row / rows * rows + file_row(tensor, row % rows);
    std::memcpy(values.data() + there * columns,
                f32_values.data() + static_cast<size_t>(row) * row_bytes, row_bytes);
  }
  quantise_mxfp4(values, hints, result.codes,
                 {reinterpret_cast<uint8_t*>(result.scales.data()), count});
  return result;
}

// The types that tensors have in a folder of the same model: those of their names, or, where the
// folder has a parameter in other tensors, of one of these.
class FolderDTypes {
 public:
  FolderDTypes(const SafetensorsFolder& folder, const ModelConfig& config) : folder_(folder) {
    for (const HfTensor& tensor : hf_tensors(config, &folder)) {
      const TensorEntry* entry = folder.find(tensor.name).entry;
      if (entry == nullptr || !tensor.parameter.valid()) continue;
      of_parameters_.emplace(tensor.parameter.index, entry->dtype);
    }
  }

  // `tensor` has the name that it has in the folder.
  FileDType of(const HfTensor& tensor, FileDType otherwise) const {
    const TensorEntry* entry = folder_.find(tensor.name).entry;
    if (entry != nullptr) return as_float(entry->dtype, otherwise);
    const auto found = of_parameters_.find(tensor.parameter.index);
    return found == of_parameters_.end() ? otherwise : as_float(found->second, otherwise);
  }

 private:
  static FileDType as_float(FileDType dtype, FileDType otherwise) {
    return can_convert(dtype, FileDType::f32) ? dtype : otherwise;
  }

  const SafetensorsFolder& folder_;
  std::unordered_map<int32_t, FileDType> of_parameters_;
};

}  // namespace

std::string hf_quantization_config(const ModelConfig& config, HfQuantization quantization) {
  if (quantization == HfQuantization::none) return "";
  const std::vector<HfTensor> tensors = hf_tensors(config);
  const bool packed = std::any_of(tensors.begin(), tensors.end(), [](const HfTensor& tensor) {
    return tensor.arrangement.transposed;
  });
  if (packed != (quantization == HfQuantization::mxfp4)) {
    throw_bad_request(fmt::format(
        "The weights of {} are not written as {}. Choose {}.", config.hf_architecture,
        packed ? "fp8-block" : "mxfp4",
        packed ? "mxfp4, the form in which they are published, or bf16" : "fp8-block or bf16"));
  }
  if (packed) {
    for (const HfTensor& tensor : tensors) {
      if (is_quantised(tensor, quantization)) quantised_specs(tensor, quantization);
    }
    return R"({"modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router",
               "model.embed_tokens", "lm_head"], "quant_method": "mxfp4"})";
  }
  nlohmann::json kept = {"lm_head"};
  for (const HfTensor& tensor : tensors) {
    constexpr std::string_view kWeight = ".weight";
    if (tensor.shape.rank() != 2 || !(is_of_layer(tensor) || tensor.name.starts_with("mtp.")) ||
        !tensor.name.ends_with(kWeight) || is_quantised(tensor, quantization)) {
      continue;
    }
    kept.push_back(tensor.name.substr(0, tensor.name.size() - kWeight.size()));
  }
  return nlohmann::ordered_json({{"activation_scheme", "dynamic"},
                                 {"fmt", "e4m3"},
                                 {"modules_to_not_convert", kept},
                                 {"quant_method", "fp8"},
                                 {"weight_block_size", {kFp8Block, kFp8Block}}})
      .dump();
}

void save_hf_model(const std::string& folder, const ModelConfig& config, const ModelState& state,
                   const ElementReader& read, uint64_t max_shard_bytes, const HfExport& what,
                   const WorkReport& report) {
  // First: it may refuse.
  const std::string config_json =
      what.config_json.empty() ? write_hf_config(config) : what.config_json;
  TROUPE_CHECK(state.part.layout().world_size() == 1, "only a whole model is written");
  const std::vector<HfTensor> tensors = hf_tensors(config);
  const FileDType dtype = what.dtype.value_or(to_file_dtype(state.dtype));
  const auto open = [](const std::string& path) {
    return path.empty() ? std::nullopt : std::optional(SafetensorsFolder::open(path));
  };
  const std::optional<SafetensorsFolder> source = open(what.scales_from);
  const auto as_in_source = [&](HfTensor tensor) {
    if (source) tensor.name = hf_name_in(*source, config, tensor.name);
    return tensor;
  };
  const std::optional<SafetensorsFolder> typed = open(what.dtypes_from);
  std::optional<FolderDTypes> dtypes;
  if (typed) dtypes.emplace(*typed, config);
  const auto dtype_in_file = [&](HfTensor tensor) {
    const FileDType otherwise = tensor.parameter.valid() ? dtype : FileDType::f32;
    if (!typed) return otherwise;
    tensor.name = hf_name_in(*typed, config, tensor.name);
    return dtypes->of(tensor, otherwise);
  };
  const auto quantization_in_file = [&](const HfTensor& tensor) {
    if (source) return quantization_of(*source, as_in_source(tensor), what.quantization);
    return is_quantised(tensor, what.quantization) ? what.quantization : HfQuantization::none;
  };
  std::vector<TensorSpec> specs;
  for (const HfTensor& tensor : tensors) {
    const HfQuantization quantization = quantization_in_file(tensor);
    if (quantization == HfQuantization::none) {
      specs.push_back({tensor.name, dtype_in_file(tensor), file_shape_of(tensor)});
    } else {
      const auto own = quantised_specs(tensor, quantization);
      TensorSpec scales = own.second;
      scales.dtype = specs_as_in(source, as_in_source(tensor), quantization).second.dtype;
      specs.insert(specs.end(), {own.first, scales});
    }
  }
  uint64_t total = 0;
  for (const TensorSpec& spec : specs) total += bytes_of(spec);
  WriteBuffers buffers;
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
  size_t next = 0;  // of the specs
  for (const HfTensor& tensor : tensors) {
    const StateId id = tensor.parameter.valid()
                           ? state.get(tensor.parameter).value
                           : state.expert_biases[static_cast<size_t>(tensor.layer)];
    const Origin origin = {id, (*state.table)[id].dtype, read};
    const HfQuantization quantization = quantization_in_file(tensor);
    if (quantization != HfQuantization::none) {
      const auto values = bytes_as(FileDType::f32, tensor, origin, buffers);
      const QuantisedTensor written = quantised(as_in_source(tensor), quantization, values, source);
      append(next++, std::as_bytes(std::span(written.codes)));
      append(next++, written.scales);
      continue;
    }
    const std::span<const std::byte> bytes = bytes_as(specs[next].dtype, tensor, origin, buffers);
    if (tensor.arrangement.is_plain()) {
      append(next++, bytes);
    } else {
      append(next++, arranged(tensor, bytes, /*to_file=*/true));
    }
  }
  for (const HfFile& file : what.files) {
    disk.write_file(join_path(folder, file.name), file.contents);
  }
  disk.write_file(join_path(folder, "config.json"), config_json);
  writer.finish();
}

}  // namespace troupe
