// `troupe convert`: a trained model as a Hugging Face folder, with the files that came with it. A
// Hugging Face folder as the source is written again, each tensor in its own dtype, bit for bit,
// unless --dtype says another; so is a quantised one. In memory is never more than one tensor of
// the files that are written.
#include <cstdio>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/units.h"
#include "cli/command.h"
#include "data/json_text.h"
#include "io/file.h"
#include "io/hf_config.h"
#include "io/hf_weights.h"
#include "train/interrupt.h"
#include "train/loaded_model.h"
#include "train/model_source.h"
#include "train/terminal.h"
#include "train/work_progress.h"

namespace troupe {
namespace {

// The dtype to read weights in, from which they are rounded at most once.
DType dtype_to_load(DType stored, const HfExport& written) {
  const bool quantised = written.quantization != HfQuantization::none;
  if (!quantised && to_file_dtype(stored) == *written.dtype) return stored;
  // A narrower run has master weights in f32; f64 is rounded when it is written.
  return stored == DType::f64 ? DType::f64 : DType::f32;
}

}  // namespace

ExitStatus run_convert(const Options& options) {
  install_interrupt_handlers();
  const bool from_hf = path_exists(join_path(options.load, "config.json"));
  SavedModel model = find_model(options.load, from_hf ? hf_folder_dtype(options.load) : DType::f32,
                                options.ckpt_step);
  if (!model.passed_over.empty()) {
    throw_failed(fmt::format("{} --ckpt-step {} converts that one.", model.passed_over,
                             model.position.step));
  }
  HfPredictionLayers prediction;
  if (from_hf) {
    prediction = find_hf_prediction_layers(options.load);
    if (!options.mtp_num_layers) require_whole(prediction, options.load);
    model.config.mtp_num_layers = options.mtp_num_layers.value_or(prediction.readable());
    model.config.validate();
  } else if (options.mtp_num_layers.value_or(model.config.mtp_num_layers) !=
             model.config.mtp_num_layers) {
    throw_bad_request(
        fmt::format("--mtp-num-layers {}: the checkpoint has {}, which are kept. Leave "
                    "the flag out.",
                    *options.mtp_num_layers, model.config.mtp_num_layers));
  }
  const HfExport what = export_of(model, options.dtype);  // first: it may refuse
  const ModelState state = declare_model_state(
      model.config, dtype_to_load(model.compute_dtype, what), /*trained=*/false);
  WorkProgress progress(options.quiet, "converting", /*unit=*/{},
                        fmt::format("Interrupted. Nothing was written to {}.", options.save));
  constexpr uint64_t kMegabyte = 1'000'000;
  save_hf_model(options.save, model.config, state, element_reader(model, state),
                static_cast<uint64_t>(options.max_shard_megabytes) * kMegabyte, what,
                progress.report());
  progress.clear();
  if (prediction.held > model.config.own_mtp_layers()) {
    print_note(fmt::format(
        "{}: layers of multi-token prediction are left out{}.", options.load,
        prediction.are_read ? "" : ": those of " + model.config.hf_architecture + " are not read"));
  } else if (prediction.announced > 0 && prediction.held == 0) {
    print_note(fmt::format(
        "{}: config.json announces layers of multi-token prediction, and the folder has no tensor "
        "of theirs. They are left out.",
        options.load));
  }
  if (from_hf && hf_also_sees(join_path(options.load, "config.json"))) {
    print_note(options.load + ": the part of the model that takes images is left out.");
  }
  const auto parameters = static_cast<uint64_t>(state.model->parameter_count());
  if (options.json) {
    const nlohmann::ordered_json document = {
        {"save", options.save},
        {"architecture", model.config.hf_architecture},
        {"parameters", parameters},
        {"dtype", what.quantization == HfQuantization::fp8_block ? "fp8-block"
                  : what.quantization == HfQuantization::mxfp4   ? "mxfp4"
                                                                 : name_of(*what.dtype)}};
    fmt::print("{}", printed_json(document));
  } else if (!options.quiet) {
    const std::string form = what.quantization == HfQuantization::fp8_block
                                 ? "quantised as fp8-block"
                             : what.quantization == HfQuantization::mxfp4
                                 ? "with experts in mxfp4"
                                 : fmt::format("in {}, {}", name_of(*what.dtype),
                                               format_bytes(parameters * size_of(*what.dtype)));
    const std::string text =
        fmt::format("{}: {} with {} parameters {}", options.save, model.config.hf_architecture,
                    format_count(static_cast<double>(parameters)), form);
    fmt::print(stderr, "{}\n", wrap_text(text, kDefaultColumns, 2));
  }
  return ExitStatus::done;
}

}  // namespace troupe
