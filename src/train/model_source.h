// Where a model comes from, as far as readers of Hugging Face folders care: the config.json that it
// began with and the files beside it. A checkpoint keeps it, and `troupe convert` writes it again.
//
// Reads files; callable from any thread. Errors are UserErrors that name the file.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "io/hf_files.h"
#include "io/hf_weights.h"
#include "options/run_spec.h"
#include "train/run_identity.h"

namespace troupe {

struct SavedModel;

// The source of a saved run with the tokenizer's own file among the files.
ModelSource whole_source(const RunIdentity& identity);

// Of a new run: from the weights' folder or checkpoint (--pretrained-checkpoint,
// or the one at `finetuned`, of --load --finetune), else from --model. A tokenizer of another file
// takes the place of theirs, with the files beside it.
ModelSource source_of_run(const RunSpec& spec, const std::optional<std::string>& finetuned);

// What `troupe convert` writes, with the weights as `type` (unset: as the model has them, in a
// folder also quantised). A bad request when the model has no Hugging Face form.
HfExport export_of(const SavedModel& model, const std::optional<HfWeightType>& type);

// Refuses (bad request) layers of multi-token prediction of which the folder lacks a tensor, where
// no flag says how many are read: they would be lost unnoticed.
void require_whole(const HfPredictionLayers& layers, const std::string& folder);

// Refuses (bad request) to train from random weights where --model names a folder that holds some
// and no flag says whether they are meant. A file config.json names the shape alone.
void require_clear_weights(const RunSpec& spec);

}  // namespace troupe
