// `troupe convert`: a trained model as a Hugging Face folder. A Hugging Face folder as the source
// is written again in the same dtype, bit for bit.
#include <cstdio>
#include <fmt/format.h>

#include "base/units.h"
#include "cli/command.h"
#include "io/file.h"
#include "io/hf_weights.h"
#include "train/loaded_model.h"

namespace troupe {

ExitStatus run_convert(const Options& options) {
  const bool from_hf = path_exists(join_path(options.load, "config.json"));
  const SavedModel model = find_model(
      options.load, from_hf ? hf_folder_dtype(options.load) : DType::f32, options.ckpt_step);
  const ModelState state =
      declare_model_state(model.config, model.compute_dtype, /*trained=*/false);
  const StateStorage storage(state.table);
  load_saved_model(model, state, storage);
  constexpr uint64_t kMegabyte = 1'000'000;
  save_hf_model(options.save, model.config, state, storage,
                static_cast<uint64_t>(options.max_shard_megabytes) * kMegabyte);
  if (!options.quiet) {
    fmt::print(stderr, "{}: {} with {} parameters in {}, {}\n", options.save,
               model.config.hf_architecture,
               format_count(static_cast<double>(model.config.parameter_count())),
               name_of(model.compute_dtype), format_bytes(storage.bytes()));
  }
  return ExitStatus::done;
}

}  // namespace troupe
