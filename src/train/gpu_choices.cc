#include "train/gpu_choices.h"

#include "train/expert_room_choice.h"
#include "train/fp8_module_choice.h"

namespace troupe {

Options with_gpu_choices(const Options& options, const ModelConfig& config, uint64_t usable) {
  return with_expert_room(with_fp8_modules(options, config, figures_of_gpu(options)), config,
                          usable);
}

std::vector<std::string> notes_on_gpu_choices(const Options& asked, const Options& chosen) {
  std::vector<std::string> notes = {note_on_fp8_modules(asked, chosen),
                                    note_on_stash(asked, chosen)};
  std::erase(notes, "");
  return notes;
}

}  // namespace troupe
