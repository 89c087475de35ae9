// A small model whose values say where they belong, for the checkpoint tests: saved under one
// slicing, loaded under another, and compared element by element.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "io/checkpoint.h"
#include "io/io_test_support.h"

namespace troupe::io_test {

inline const std::vector<CheckpointRole> kAllRoles = {
    CheckpointRole::parameter, CheckpointRole::optimizer, CheckpointRole::state};

// A tensor and how many pieces each of its dimensions is cut into.
struct FileCut {
  std::string name;
  CheckpointRole role = CheckpointRole::parameter;
  DType dtype = DType::f32;
  Shape shape;
  std::vector<int64_t> pieces;
};

// All boxes of a cut: piece k of n of an extent e is [k e / n, (k + 1) e / n).
inline std::vector<Box> boxes_of(const FileCut& cut) {
  const auto rank = static_cast<size_t>(cut.shape.rank());
  std::vector<int64_t> piece(rank, 0);
  std::vector<Box> boxes;
  while (true) {
    Box box;
    std::vector<int64_t> extents;
    for (size_t d = 0; d < rank; ++d) {
      const int64_t extent = cut.shape[static_cast<int>(d)];
      box.offset[d] = piece[d] * extent / cut.pieces[d];
      extents.push_back((piece[d] + 1) * extent / cut.pieces[d] - box.offset[d]);
    }
    box.shape = Shape(extents);
    boxes.push_back(box);
    size_t d = rank;
    while (d > 0 && ++piece[d - 1] == cut.pieces[d - 1]) piece[--d] = 0;
    if (d == 0) return boxes;
  }
}

// The bytes that a box of a tensor should hold: each element's bytes are a hash of the tensor's
// name, the `variant` of the whole checkpoint and the element's index in the logical tensor.
inline std::vector<uint8_t> expected_bytes(const FileCut& cut, const Box& box, uint64_t variant) {
  const size_t element_bytes = size_of(cut.dtype);
  std::vector<uint8_t> bytes(static_cast<size_t>(box.shape.elements()) * element_bytes);
  for (int64_t i = 0; i < box.shape.elements(); ++i) {
    int64_t rest = i;
    int64_t linear = 0;
    int64_t stride = 1;
    for (int d = cut.shape.rank() - 1; d >= 0; --d) {
      linear += (box.offset[static_cast<size_t>(d)] + rest % box.shape[d]) * stride;
      rest /= box.shape[d];
      stride *= cut.shape[d];
    }
    uint64_t value = variant * 1000003 + static_cast<uint64_t>(linear) + 1;
    for (const char c : cut.name) value = (value ^ static_cast<uint8_t>(c)) * 0x9e3779b97f4a7c15U;
    std::memcpy(&bytes[static_cast<size_t>(i) * element_bytes], &value, element_bytes);
  }
  return bytes;
}

// Slices in memory, for saving or loading.
struct Slices {
  std::vector<SliceToSave> to_save;
  std::vector<SliceToLoad> to_load;
  std::vector<std::unique_ptr<std::vector<uint8_t>>> memory;
  std::vector<std::vector<uint8_t>> expected;
};

inline Slices slices_of(const std::vector<FileCut>& cuts, uint64_t variant, bool fill) {
  Slices slices;
  for (const FileCut& cut : cuts) {
    for (const Box& box : boxes_of(cut)) {
      slices.expected.push_back(expected_bytes(cut, box, variant));
      auto& memory = slices.memory.emplace_back(std::make_unique<std::vector<uint8_t>>(
          fill ? slices.expected.back()
               : std::vector<uint8_t>(slices.expected.back().size(), 0xee)));
      slices.to_save.push_back({cut.name, cut.role, cut.dtype, cut.shape, box, memory->data()});
      slices.to_load.push_back({cut.name, cut.role, cut.dtype, cut.shape, box, memory->data()});
    }
  }
  return slices;
}

inline CheckpointInfo save(const std::string& dir, int64_t step, const std::vector<FileCut>& cuts,
                           uint64_t variant, const CheckpointOptions& options = {}) {
  return save_checkpoint(
      dir, {step, "1.2.3", R"({"seed":7})", slices_of(cuts, variant, true).to_save}, options);
}

// Loads with these cuts and expects every byte of this variant. A UserError passes through.
inline void load_and_compare(const std::string& path, const std::vector<FileCut>& cuts,
                             uint64_t variant) {
  const Slices slices = slices_of(cuts, variant, false);
  Checkpoint::open(path).load(slices.to_load, kAllRoles);
  for (size_t i = 0; i < slices.expected.size(); ++i) {
    EXPECT_EQ(*slices.memory[i], slices.expected[i]) << slices.to_load[i].name;
  }
}

// The names of all files and folders below `path`, except `path` itself.
inline std::vector<std::string> all_below(const std::string& path) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(path)) {
    names.push_back(entry.path().string().substr(path.size() + 1));
  }
  std::sort(names.begin(), names.end());
  return names;
}

// A few tensors of every role; small, so that tests may try every byte.
inline std::vector<FileCut> small_model() {
  return {{"w", CheckpointRole::parameter, DType::bf16, {4, 6}, {2, 1}},
          {"w.m", CheckpointRole::optimizer, DType::f32, {4, 6}, {2, 3}},
          {"bias", CheckpointRole::state, DType::f64, {3}, {1}},
          {"count", CheckpointRole::state, DType::i64, {}, {}}};
}

}  // namespace troupe::io_test
