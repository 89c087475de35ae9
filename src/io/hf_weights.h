// Weights in Hugging Face's names and shapes: which tensor of a model folder is which part of which
// parameter, and the copying in both directions.
//
// Biases of routers, which the optimizer does not move, are weights there, too.
//
// Loading is total: every element of every parameter, or of every slice that a rank holds of one,
// and of every bias is written exactly once, and every tensor of the folder has a place in the
// whole model (or is a copy of a tied head, or of a layer of multi-token prediction that the
// configuration leaves out), or the load is refused with the names. Values are converted with one
// correct rounding; writing back what was read in the same dtype is bit-exact. Weights in 8 and 4
// bits (hf_quantization.h) are first decoded to f32; beyond the state a load needs memory for one
// tensor, and so does writing. Errors are UserErrors. One thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/work_report.h"
#include "io/file_dtype.h"
#include "io/hf_files.h"
#include "io/hf_names.h"
#include "io/hf_quantization.h"
#include "model/parameters.h"
#include "runtime/state_storage.h"

namespace troupe {

// Layers of multi-token prediction of a folder.
struct HfPredictionLayers {
  int32_t announced = 0;  // by its config.json
  // As many as it announces (one, where Qwen's says nothing), or none where the folder has no
  // tensor of theirs.
  int32_t held = 0;
  bool are_read = true;  // false: of an architecture whose layers are left out
  // The first of their tensors that the folder lacks, where it has others. Copies may be missing.
  std::string missing = {};

  int32_t readable() const { return are_read ? held : 0; }
};
HfPredictionLayers find_hf_prediction_layers(const std::string& folder);

// The form of the folder's quantised weights, as its config.json has it.
HfQuantization hf_folder_quantization(const std::string& folder);

// The widest floating-point type among the folder's tensors: weights read in it lose nothing.
// Codes and scales do not count; fp8 weights are exact in f32, mxfp4 ones in bf16.
DType hf_folder_dtype(const std::string& folder);

// The type that most of its elements have, without codes and scales.
FileDType hf_folder_main_dtype(const std::string& folder);

// An open folder of weights. The names are those of the folder's own architecture (config.json),
// whatever the configuration's is.
class HfWeights {
 public:
  // Checks that every tensor of the model is there, and what else there is, but no values.
  HfWeights(const std::string& folder, const ModelConfig& config);
  HfWeights(HfWeights&& other) noexcept;
  ~HfWeights();

  // Reads the parameters (and fp32 master weights, where there are any) that the state declares, or
  // what it holds of them: other tensors are not read. Expert biases that the folder's model does
  // not have stay as they are. Values that are not finite there are refused (exit status 1) with
  // the tensor's name. `report` is in bytes of the tensors that are read.
  void load(const ModelState& state, const StateStorage& storage,
            const WorkReport& report = {}) const;

 private:
  struct Source;
  std::unique_ptr<const Source> source_;
};

// Opens a folder and loads from it.
void load_hf_weights(const std::string& folder, const ModelConfig& config, const ModelState& state,
                     const StateStorage& storage, const WorkReport& report = {});

// As above, but the tensors of the parameters are handed to `take(tensor, data)`, converted to
// double: for comparing a folder of gradients.
void read_hf_gradients(
    const std::string& folder, const ModelConfig& config,
    const std::function<void(const HfTensor&, const std::vector<double>&)>& take);

// The "quantization_config" of a model that is quantised here, as JSON text; empty for none. A bad
// request where the architecture has no such form, or a shape does not fit.
std::string hf_quantization_config(const ModelConfig& config, HfQuantization quantization);

// What is written beside the weights, and how they are.
struct HfExport {
  std::string config_json = {};         // empty: write_hf_config of the model
  std::optional<FileDType> dtype = {};  // of tensors that are not quantised; unset: the model's
  // A folder of the same model: tensors that are not quantised have the types that they have there,
  // and `dtype` where it has them not. Empty: all have `dtype`, and biases of routers are f32.
  std::string dtypes_from = {};
  HfQuantization quantization = HfQuantization::none;
  // A folder of the same model and quantization: the same tensors are quantised, with its scales
  // where they reproduce the weights. Empty: the linear layers of the decoder, or the experts.
  std::string scales_from = {};
  std::vector<HfFile> files = {};
};

// Gives elements of a tensor of the state, in its dtype, until it is called again.
using ElementReader = std::function<const std::byte*(StateId tensor, const IndexRange& elements)>;

// Writes config.json, the files and the parameters of a state that is the whole model, of which
// `read` gives the elements, of one tensor of the files after the other. Values of another dtype
// than the file's are rounded once, to nearest and ties to even: the weights of norms, which a bf16
// model keeps in f32, and all of them where the export asks for another dtype. Nothing is written
// when the architecture cannot express the model; a finite value that is too large for the dtype is
// refused (exit status 1) with the tensor's name. A file holds at most `max_shard_bytes` of
// tensors, or a single one that is larger. `report` is in bytes of the files; when it throws, the
// folder holds nothing new.
void save_hf_model(const std::string& folder, const ModelConfig& config, const ModelState& state,
                   const ElementReader& read, uint64_t max_shard_bytes, const HfExport& what = {},
                   const WorkReport& report = {});

}  // namespace troupe
