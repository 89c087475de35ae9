// Weights in Hugging Face's names and shapes: which tensor of a model folder is which part of which
// parameter, and the copying in both directions.
//
// Loading is total: every element of every parameter is written exactly once, and every tensor of
// the folder is used (a copy of a tied head excepted), or the load is refused with the names.
// Values are converted with one correct rounding; writing back what was read in the same dtype is
// bit-exact. Errors are UserErrors. One thread.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/shape.h"
#include "model/parameters.h"
#include "runtime/state_storage.h"

namespace troupe {

// One Hugging Face tensor: `shape` elements of a parameter, beginning at element `offset`.
struct HfTensor {
  std::string name;
  Shape shape;
  size_t parameter = 0;  // index in ModelState::parameters
  int64_t offset = 0;
};

// All tensors of the model, sorted by name. They tile all parameters.
std::vector<HfTensor> hf_tensors(const ModelConfig& config, const ModelState& state);

// The widest floating-point type among the folder's tensors: weights read in it lose nothing.
DType hf_folder_dtype(const std::string& folder);

// Reads a folder into the parameters (and fp32 master weights, where there are any). The names are
// those of the folder's own architecture (config.json), whatever the configuration's is. Values
// that are not finite there are refused (exit status 1) with the tensor's name.
void load_hf_weights(const std::string& folder, const ModelConfig& config, const ModelState& state,
                     const StateStorage& storage);

// As above, but the tensors are handed to `take(tensor, data)`, converted to double: for comparing
// a folder of gradients.
void read_hf_tensors(const std::string& folder, const ModelConfig& config, const ModelState& state,
                     const std::function<void(const HfTensor&, const std::vector<double>&)>& take);

// Writes config.json and the parameters, in the dtype of the model: the weights of norms, which a
// bf16 model keeps in f32, are rounded to it.
// Nothing is written when the architecture cannot express the model. A file holds at most
// `max_shard_bytes` of tensors, or a single one that is larger.
void save_hf_model(const std::string& folder, const ModelConfig& config, const ModelState& state,
                   const StateStorage& storage, uint64_t max_shard_bytes);

}  // namespace troupe
