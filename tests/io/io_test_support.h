// What the tests of the io room share: folders in memory that clean up after themselves, whole
// files, the message of an expected error, and states of which no two elements are alike.
#pragma once

#include <filesystem>
#include <unistd.h>

#include "io/hf_weights.h"
#include "model/parameters.h"
#include "runtime/state_storage.h"
#include "support/errors.h"
#include "support/files.h"

namespace troupe::io_test {

using testing::expect_phrase;
using testing::get_file;
using testing::message_of;
using testing::put_file;

// A new folder, in memory where the system offers that: these tests make thousands of files
// durable, and losing power is part of the tests, not left to the disk.
class TempFolder : public testing::TempFolder {
 public:
  TempFolder() : testing::TempFolder(parent()) {}

 private:
  static std::filesystem::path parent() {
    const std::filesystem::path memory = "/dev/shm";
    return ::access(memory.c_str(), W_OK) == 0 ? memory : std::filesystem::temp_directory_path();
  }
};

// Gives every element of a state in f32 its own number, counted from 1.
inline void number_elements(const ModelState& state, const StateStorage& storage) {
  float value = 1;
  for (int32_t id = 0; id < state.table->size(); ++id) {
    const TensorView view = storage.view(StateId{id});
    for (int64_t i = 0; i < view.shape.elements(); ++i) view.as<float>()[i] = value++;
  }
}

// Gives the elements of a state that is in memory.
inline ElementReader elements_in(const StateStorage& storage) {
  return [&storage](StateId id, const IndexRange& range) {
    const TensorView view = storage.view(id);
    return static_cast<const std::byte*>(view.data) +
           static_cast<size_t>(range.begin) * size_of(view.dtype);
  };
}

}  // namespace troupe::io_test
