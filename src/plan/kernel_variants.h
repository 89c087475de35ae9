// Which CUDA kernels the operations of a program get (program/kernel_choice.h), for people.
//
// Pure functions; any thread. They throw UserError where GPUs cannot do an operation at all.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/device.h"
#include "program/kernel_choice.h"
#include "program/program.h"

namespace troupe {

// The operations of one kind that get one kernel.
struct KernelVariant {
  std::string kind;
  std::string variant;
  SlowKernel slow = SlowKernel::no;
  int64_t operations = 0;
  // On which it runs, where that is not all of them (Op::multiprocessors); otherwise 0.
  int32_t multiprocessors = 0;
  // Is there no other kernel of this kind?
  bool is_only() const { return variant == kind && multiprocessors == 0; }
  // "sm90 pair on 112 multiprocessors"
  std::string name() const;
};

// By kind and name, in the order in which they first occur.
std::vector<KernelVariant> kernel_variants(const Program& program, const DeviceTraits& gpu);

// Adds those of another program.
void add_variants(std::vector<KernelVariant>& variants, std::span<const KernelVariant> others);

// Their names, by operation.
std::vector<std::string> variants_of_operations(const Program& program, const DeviceTraits& gpu);

// A line for each kind that has several kernels: "  linear     cublaslt 48, plain tiles 2\n".
std::string text_of(std::span<const KernelVariant> variants);

}  // namespace troupe
