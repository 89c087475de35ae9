// What kinds of operations write their OpSpec::cuda with (kernel_choice.h).
//
// Pure functions; any thread. Selecting a kernel throws UserError where GPUs cannot do the
// operation at all.
#pragma once

#include <cstdint>

#include "base/device.h"
#include "program/kernel_choice.h"
#include "program/op_spec.h"

namespace troupe {

// Members of the group of a collective if that is staged, otherwise 0.
int32_t staged_ranks(const OpView& op);

// The functions that a kind gives: its kernel for the dtypes of an operation, and the rules of its
// private memory. `ranks`: members of the staged group.
using SelectCudaKernel = CudaKernel (*)(const OpView&);
using ScratchRule = uint64_t (*)(const OpView&);
using StagingRule = uint64_t (*)(const OpView&, int32_t ranks);

// Op::multiprocessors on a GPU: at most half of them are left, or taken.
int32_t multiprocessors_of(const OpView& op, const DeviceTraits& device);

// A choice without slow kernels, with all multiprocessors or, of a collective, with those above. A
// `select` of nullptr: the build has no CUDA; rules of nullptr: nothing is needed.
KernelChoice make_choice(const OpView& op, const DeviceTraits& device, const char* variant,
                         SelectCudaKernel select, ScratchRule scratch = nullptr,
                         StagingRule staging = nullptr);

// OpSpec::cuda of a kind with one kernel.
template <SelectCudaKernel kSelect, ScratchRule kScratch = nullptr, StagingRule kStaging = nullptr>
KernelChoice only_kernel(const OpView& op, const DeviceTraits& device) {
  return make_choice(op, device, nullptr, kSelect, kScratch, kStaging);
}

// OpSpec::cuda of a kind whose kernel goes through rows of kRowElements(op) elements of the dtype
// of input 0 in packs where they are made of these, and element by element elsewhere.
template <SelectCudaKernel kSelect, int64_t (*kRowElements)(const OpView&),
          ScratchRule kScratch = nullptr, StagingRule kStaging = nullptr>
KernelChoice packs_kernel(const OpView& op, const DeviceTraits& device) {
  const bool packs = is_made_of_packs(kRowElements(op), op.input(0).dtype);
  return make_choice(op, device, packs ? "packs" : "elements", kSelect, kScratch, kStaging);
}

// The last extent of input 0: what kRowElements usually is.
int64_t row_elements_of_input(const OpView& op);

}  // namespace troupe
