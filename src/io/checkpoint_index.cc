#include "io/checkpoint_index.h"

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <set>
#include <unordered_set>

#include "base/error.h"
#include "base/text.h"
#include "io/hash.h"
#include "io/json.h"

namespace troupe {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

constexpr const char* kFormat = "troupe-checkpoint";
constexpr uint64_t kVersion = 1;
constexpr int kMaxDepth = 64;

constexpr CheckpointRole kRoles[] = {CheckpointRole::parameter, CheckpointRole::optimizer,
                                     CheckpointRole::state};
constexpr DType kDTypes[] = {DType::f64,    DType::f32, DType::bf16, DType::f16,
                             DType::f8e4m3, DType::i64, DType::i32,  DType::u8};

// Reads fields of one JSON object, with messages that say where.
class IndexFields {
 public:
  IndexFields(const json& object, std::string where) : object_(object), where_(std::move(where)) {
    if (!object.is_object()) fail("is not an object");
  }

  // Further messages name the tensor.
  void set_where(std::string where) { where_ = std::move(where); }

  [[noreturn]] void fail(const std::string& what) const { throw_failed(where_ + " " + what); }

  const json& field(const char* name) const {
    const auto found = object_.find(name);
    if (found == object_.end()) fail(std::string("has no \"") + name + "\"");
    return *found;
  }

  std::string text(const char* name) const {
    const json& value = field(name);
    if (!value.is_string()) fail(std::string("has a \"") + name + "\" that is no text");
    return value.get<std::string>();
  }

  // A whole number from 0 to the largest int64.
  int64_t number(const char* name) const { return number(field(name), name); }

  uint64_t hash(const char* name) const {
    const std::optional<uint64_t> hash = hash_from_hex(text(name));
    if (!hash) fail(std::string("has a \"") + name + "\" that is no hash of 16 digits");
    return *hash;
  }

  const json& array(const char* name) const {
    const json& value = field(name);
    if (!value.is_array()) fail(std::string("has a \"") + name + "\" that is no array");
    return value;
  }

  std::vector<int64_t> numbers(const char* name) const {
    std::vector<int64_t> values;
    for (const json& value : array(name)) values.push_back(number(value, name));
    if (values.size() > Shape::kMaxRank) {
      fail(std::string("has more than four numbers in \"") + name + "\"");
    }
    return values;
  }

  template <class T, size_t kCount>
  T choice(const char* name, const T (&choices)[kCount]) const {
    const std::string value = text(name);
    for (const T choice : choices) {
      if (name_of(choice) == value) return choice;
    }
    fail(std::string("has the ") + name + " " + quote_name(value) +
         ", which this version of Troupe does not know");
  }

  // Names of shards: plain, so that an index never reaches outside its folder.
  std::string file_name(const char* name) const {
    std::string value = text(name);
    if (value.empty() || value[0] == '.' || value.find('/') != std::string::npos ||
        value.find('\0') != std::string::npos) {
      fail("names the file " + quote_name(value) + ", which is not a plain file name");
    }
    return value;
  }

 private:
  int64_t number(const json& value, const char* name) const {
    if (!value.is_number_unsigned() ||
        value.get<uint64_t>() > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
      fail(std::string("has a value in \"") + name + "\" that is no integer from 0 to 2^63 - 1");
    }
    return static_cast<int64_t>(value.get<uint64_t>());
  }

  const json& object_;
  std::string where_;
};

bool size_overflows(const Shape& shape, DType dtype) {
  auto product = static_cast<int64_t>(size_of(dtype));
  for (int i = 0; i < shape.rank(); ++i) {
    if (shape[i] != 0 && __builtin_mul_overflow(product, shape[i], &product)) return true;
  }
  return false;
}

StoredTensor parse_tensor(const json& value, const std::string& path,
                          const std::unordered_set<std::string>& files, bool whole) {
  IndexFields fields(value, path + ": an entry of \"tensors\"");
  StoredTensor tensor;
  tensor.name = fields.text("name");
  const std::string where = path + ": tensor " + quote_name(tensor.name);
  fields.set_where(where);
  tensor.role = fields.choice("role", kRoles);
  tensor.dtype = fields.choice("dtype", kDTypes);
  tensor.shape = Shape(fields.numbers("shape"));
  if (size_overflows(tensor.shape, tensor.dtype)) fields.fail("has a shape too large to address");
  std::vector<Box> boxes;
  for (const json& slice_value : fields.array("slices")) {
    const IndexFields slice_fields(slice_value, where + ": a slice");
    StoredSlice slice;
    slice.file = slice_fields.file_name("file");
    if (!files.contains(slice.file)) {
      slice_fields.fail("lies in " + quote_name(slice.file) + ", which is not among \"shards\"");
    }
    slice.tensor = slice_fields.text("tensor");
    const std::vector<int64_t> offset = slice_fields.numbers("offset");
    slice.box.shape = Shape(slice_fields.numbers("shape"));
    if (static_cast<int>(offset.size()) != slice.box.shape.rank()) {
      slice_fields.fail("has an offset and a shape of different length");
    }
    std::copy(offset.begin(), offset.end(), slice.box.offset.begin());
    slice.hash = slice_fields.hash("xxh3");
    boxes.push_back(slice.box);
    tensor.slices.push_back(std::move(slice));
  }
  if (whole) {
    const std::string fault = tiling_fault(tensor.shape, boxes);
    if (!fault.empty()) fields.fail(fault);
  }
  return tensor;
}

template <class Values>
std::string lines(const Values& values) {
  std::string text = "[";
  for (const ordered_json& value : values) {
    text += (text.size() == 1 ? "\n" : ",\n") + value.dump();
  }
  return text + "\n]";
}

std::vector<int64_t> extents_of(const Shape& shape) {
  std::vector<int64_t> extents;
  for (int i = 0; i < shape.rank(); ++i) extents.push_back(shape[i]);
  return extents;
}

bool is_empty(const Box& box) {
  return box.shape.elements() == 0;
}

}  // namespace

std::string_view name_of(CheckpointRole role) {
  switch (role) {
    case CheckpointRole::parameter:
      return "parameter";
    case CheckpointRole::optimizer:
      return "optimizer";
    case CheckpointRole::state:
      return "state";
  }
  return "?";
}

Box intersection(const Box& a, const Box& b) {
  std::array<int64_t, Shape::kMaxRank> extents{};
  Box result;
  const int rank = a.shape.rank();
  for (int i = 0; i < rank; ++i) {
    const auto d = static_cast<size_t>(i);
    const int64_t begin = std::max(a.offset[d], b.offset[d]);
    const int64_t end = std::min(a.offset[d] + a.shape[i], b.offset[d] + b.shape[i]);
    result.offset[d] = begin;
    extents[d] = std::max<int64_t>(0, end - begin);
  }
  result.shape = Shape(std::span(extents).first(static_cast<size_t>(rank)));
  return result;
}

std::string tiling_fault(const Shape& shape, std::span<const Box> boxes) {
  const int64_t elements = shape.elements();
  int64_t covered = 0;
  for (const Box& box : boxes) {
    if (box.shape.rank() != shape.rank()) {
      return "has a slice with another number of dimensions than its own " +
             std::to_string(shape.rank());
    }
    for (int i = 0; i < shape.rank(); ++i) {
      const int64_t offset = box.offset[static_cast<size_t>(i)];
      if (offset < 0 || box.shape[i] > shape[i] || offset > shape[i] - box.shape[i]) {
        return "has a slice " + box.shape.to_string() + " that reaches out of its shape " +
               shape.to_string();
      }
    }
    if (is_empty(box)) return "has an empty slice";
    if (box.shape.elements() > elements - covered) return "has slices that overlap";
    covered += box.shape.elements();
  }
  if (covered != elements) {
    return "has slices for only " + std::to_string(covered) + " of its " +
           std::to_string(elements) + " elements";
  }

  // With as many elements in the slices as in the tensor, they cover it unless two overlap. The
  // search sweeps along the dimension that separates the slices best, so that the usual cutting
  // along one dimension costs no more than a sort.
  int sweep = 0;
  size_t most_offsets = 0;
  for (int i = 0; i < shape.rank(); ++i) {
    std::set<int64_t> offsets;
    for (const Box& box : boxes) offsets.insert(box.offset[static_cast<size_t>(i)]);
    if (offsets.size() > most_offsets) {
      most_offsets = offsets.size();
      sweep = i;
    }
  }
  const auto begin_of = [&](size_t i) { return boxes[i].offset[static_cast<size_t>(sweep)]; };
  std::vector<size_t> order(boxes.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(),
            [&](size_t a, size_t b) { return begin_of(a) < begin_of(b); });
  for (size_t i = 0; i < order.size(); ++i) {
    // A scalar has no dimension to sweep along; two slices of it have been refused above.
    const int64_t end = shape.rank() == 0 ? 0 : begin_of(order[i]) + boxes[order[i]].shape[sweep];
    for (size_t j = i + 1; j < order.size() && begin_of(order[j]) < end; ++j) {
      if (!is_empty(intersection(boxes[order[i]], boxes[order[j]]))) {
        return "has slices that overlap";
      }
    }
  }
  return "";
}

std::string to_json(const CheckpointIndex& index) {
  std::vector<ordered_json> shards;
  for (const StoredShard& shard : index.shards) {
    shards.push_back({{"file", shard.file},
                      {"bytes", shard.bytes},
                      {"header_xxh3", hash_to_hex(shard.header_hash)}});
  }
  std::vector<ordered_json> tensors;
  for (const StoredTensor& tensor : index.tensors) {
    ordered_json slices = ordered_json::array();
    for (const StoredSlice& slice : tensor.slices) {
      const auto rank = static_cast<std::ptrdiff_t>(slice.box.shape.rank());
      slices.push_back({{"file", slice.file},
                        {"tensor", slice.tensor},
                        {"offset", std::vector<int64_t>(slice.box.offset.begin(),
                                                        slice.box.offset.begin() + rank)},
                        {"shape", extents_of(slice.box.shape)},
                        {"xxh3", hash_to_hex(slice.hash)}});
    }
    tensors.push_back({{"name", tensor.name},
                       {"role", name_of(tensor.role)},
                       {"dtype", name_of(tensor.dtype)},
                       {"shape", extents_of(tensor.shape)},
                       {"slices", std::move(slices)}});
  }
  // Parsing makes sure that the index can be read back: the nesting limit, names given once.
  const json training = parse_json(index.training, "training state", kMaxDepth - 1);
  TROUPE_CHECK(training.is_object(), "the training state is not a JSON object");
  // One line per shard and per tensor, so that people can read it and tools can compare it.
  return "{\n\"format\": \"" + std::string(kFormat) +
         "\",\n\"version\": " + std::to_string(kVersion) +
         ",\n\"troupe\": " + json(index.troupe_version).dump() +
         ",\n\"step\": " + std::to_string(index.step) + ",\n\"training\": " + training.dump() +
         ",\n\"shards\": " + lines(shards) + ",\n\"tensors\": " + lines(tensors) + "\n}\n";
}

namespace {

// `whole`: the slices of a tensor cover it.
CheckpointIndex parse(std::string_view text, const std::string& path, bool whole) {
  const json document = parse_json(text, path, kMaxDepth);
  const IndexFields fields(document, path + ": the index");
  if (fields.text("format") != kFormat) fields.fail("is not that of a Troupe checkpoint");
  const int64_t version = fields.number("version");
  if (version != static_cast<int64_t>(kVersion)) {
    fields.fail("has format version " + std::to_string(version) +
                ", but this version of Troupe reads version " + std::to_string(kVersion) +
                "; use the version that wrote it: " + quote_name(fields.text("troupe")));
  }
  CheckpointIndex index;
  index.troupe_version = fields.text("troupe");
  index.step = fields.number("step");
  if (!fields.field("training").is_object()) fields.fail("has a \"training\" that is no object");
  index.training = fields.field("training").dump();

  std::unordered_set<std::string> files;
  for (const json& value : fields.array("shards")) {
    const IndexFields shard_fields(value, path + ": an entry of \"shards\"");
    StoredShard shard;
    shard.file = shard_fields.file_name("file");
    shard.bytes = static_cast<uint64_t>(shard_fields.number("bytes"));
    shard.header_hash = shard_fields.hash("header_xxh3");
    if (!files.insert(shard.file).second) {
      shard_fields.fail("repeats the file " + quote_name(shard.file));
    }
    index.shards.push_back(std::move(shard));
  }
  std::unordered_set<std::string> names;
  for (const json& value : fields.array("tensors")) {
    StoredTensor tensor = parse_tensor(value, path, files, whole);
    if (!names.insert(tensor.name).second) {
      fields.fail("holds tensor " + quote_name(tensor.name) + " twice");
    }
    index.tensors.push_back(std::move(tensor));
  }
  return index;
}

}  // namespace

CheckpointIndex parse_checkpoint_index(std::string_view text, const std::string& path) {
  return parse(text, path, /*whole=*/true);
}

CheckpointIndex parse_checkpoint_part(std::string_view text, const std::string& path) {
  return parse(text, path, /*whole=*/false);
}

}  // namespace troupe
