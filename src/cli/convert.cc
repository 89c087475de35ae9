// `troupe convert`: weights from a Troupe run to a Hugging Face folder, and from one Hugging Face
// folder to another in Troupe's own writing.
#include <cstdio>
#include <fmt/format.h>

#include "base/units.h"
#include "cli/command.h"
#include "io/hf_weights.h"
#include "train/loaded_model.h"
#include "train/model_options.h"

namespace troupe {

ExitStatus run_convert(const Options& options) {
  const LoadedModel model = load_model(options.load, compute_dtype_of(options));
  save_hf_model(options.save, model.config, model.state, *model.storage);
  if (!options.quiet) {
    fmt::print(stderr, "{}: {} with {} parameters, {}\n", options.save,
               model.config.hf_architecture,
               format_count(static_cast<double>(model.config.parameter_count())),
               format_bytes(model.storage->bytes()));
  }
  return ExitStatus::done;
}

}  // namespace troupe
