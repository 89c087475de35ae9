// Text generation: samples tokens one after the other from a model's distribution.
//
// Every new token runs the whole context through the model again. That is exact and needs nothing
// beyond the training operations; it is meant for looking at what a model has learned.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "passes/inference_programs.h"
#include "train/rank_session.h"

namespace troupe {

struct GenerationOptions {
  int32_t context = 0;  // tokens that the model sees; older ones are forgotten
  int64_t new_tokens = 0;
  double temperature = 1.0;  // 0: always the most likely token
  int32_t top_k = 0;         // only the k most likely tokens; 0: all
  double top_p = 0.0;  // only the most likely tokens that together have this probability; 0: all
  uint64_t seed = 0;
  int32_t vocabulary = 0;  // ids of the tokenizer: the model's padding ids are never drawn
  int32_t eod = -1;        // ends the text early; -1: never
};

// The tokens that a model of `sequence` positions sees at a time: no more than a text of `text`
// tokens will have, and a multiple of `tp`, among whose ranks they are shared.
int32_t context_of_text(int64_t text, int32_t sequence, int32_t tp);

// What generation runs, before anything is allocated for it.
struct GenerationPlan {
  InferenceStep step;
  MemoryPlan memory;
};

// `context`: see GenerationOptions.
GenerationPlan plan_generation(const ModelConfig& config, const RankSession& session,
                               int32_t context);

// Continues `prompt` (not empty) and returns the new tokens. `emit` is called with each as it comes
// and may return false to stop.
//
// Of several ranks all call it at once, with the same arguments, each with its own part of the
// model: TP, EP and PP. Every replica of the dense part works on the same
// text. Rank 0 chooses the tokens and calls `emit`; all return them.
std::vector<int32_t> generate(GenerationPlan plan, RankSession& session,
                              const std::vector<int32_t>& prompt, const GenerationOptions& options,
                              const std::function<bool(int32_t)>& emit);

// Refuses (bad request) layouts in which ranks could do no more than repeat others' work, or whose
// ranks have parts of a sequence that grows.
void check_generation_layout(const ModelConfig& config, const Layout& layout);

// Draws one token id from logits by the rules above; `draw` is uniform in [0, 1). Exposed for
// tests.
int32_t sample_token(const std::vector<double>& logits, const GenerationOptions& options,
                     double draw);

}  // namespace troupe
