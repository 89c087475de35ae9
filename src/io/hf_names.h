// What the parameters of a model are called in Hugging Face's folders, and how they lie there:
// which tensor is which part of which parameter.
//
// A model whose parameters have no such names is a bad request. Plain values; any thread.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/shape.h"
#include "io/hf_families.h"
#include "io/safetensors.h"
#include "model/model_config.h"
#include "model/parameter_spec.h"

namespace troupe {

// How a tensor lies in a file whose last two dimensions are not those of the parameter.
struct HfArrangement {
  bool transposed = false;  // the last two dimensions are swapped
  bool interleaved =
      false;  // rows of the first half of the parameter's and of the second alternate

  bool has_unit_dimension = false;  // the file has a dimension of 1 before the last one

  bool is_plain() const { return !transposed && !interleaved; }
};

// Consecutive elements of a tensor that are consecutive elements of the parameter.
struct HfPiece {
  int64_t first = 0;  // of the tensor
  int64_t elements = 0;
  int64_t offset = 0;  // of the whole parameter: where they begin there
};

// One Hugging Face tensor: `shape` elements of a parameter, beginning at element `offset` of the
// whole parameter, however it is sliced; or the bias of a router; or a second copy of a parameter.
struct HfTensor {
  std::string name;
  Shape shape;  // of the parameter
  HfArrangement arrangement = {};
  ParameterId parameter;  // invalid: it is the bias of the router of
  int32_t layer = -1;     // this layer
  int64_t offset = 0;
  // Where its elements do not follow each other in the parameter: all of them, in the tensor's
  // order, and `offset` has no meaning.
  std::vector<HfPiece> scattered = {};
  // As layers of multi-token prediction have of embedding and head, which they share. May be
  // missing; what is there must be the same bytes.
  std::string copy_of = {};

  bool is_copy() const { return !copy_of.empty(); }
  std::vector<HfPiece> pieces() const {
    return scattered.empty() ? std::vector<HfPiece>{{0, shape.elements(), offset}} : scattered;
  }
};

// All tensors of the whole model, sorted by name. Without copies they tile all parameters and
// biases. Architectures whose folders differ are named as `folder` does, or else as Troupe writes
// them.
std::vector<HfTensor> hf_tensors(const ModelConfig& config,
                                 const SafetensorsFolder* folder = nullptr);

// Those of one parameter.
std::vector<HfTensor> hf_tensors_of(const ParameterSpec& parameter, const ModelConfig& config,
                                    const SafetensorsFolder* folder = nullptr);

// What the folder calls the tensor that Troupe writes under this name: there the text model may be
// part of one that also sees.
std::string hf_name_in(const SafetensorsFolder& folder, const ModelConfig& config,
                       const std::string& name);
// Is it a tensor of what sees there?
bool is_of_hf_vision(const SafetensorsFolder& folder, const ModelConfig& config,
                     std::string_view name);

// How the configuration's architecture names layers of multi-token prediction.
HfMtpNames hf_mtp_names_of(const ModelConfig& config);

// The head, and the embedding of an architecture.
inline constexpr const char* kHfHead = "lm_head.weight";
const char* hf_embedding_of(std::string_view architecture);

// Is it the name of a router's bias? Whatever the weights are, that is f32: it is compared with
// scores that are close to each other.
bool is_hf_router_bias(std::string_view tensor);

}  // namespace troupe
