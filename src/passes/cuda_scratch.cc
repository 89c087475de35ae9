#include "passes/cuda_scratch.h"

#include "passes/memory_layout.h"
#include "program/op_spec.h"

namespace troupe {

CudaScratch cuda_scratch_of(const OpView& view) {
  const OpSpec& spec = *view.op.spec;
  CudaScratch scratch;
  if (spec.cuda_scratch_bytes != nullptr) {
    scratch.own = MemoryPlan::aligned(spec.cuda_scratch_bytes(view));
  }
  if (spec.group == nullptr || spec.cuda_staging_bytes == nullptr) return scratch;
  const auto group = static_cast<size_t>(spec.group(view.op.attributes));
  const int32_t ranks = view.program.staged_groups()[group];
  if (ranks > 0) scratch.staging = MemoryPlan::aligned(spec.cuda_staging_bytes(view, ranks));
  return scratch;
}

}  // namespace troupe
