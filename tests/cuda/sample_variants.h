// Which kernels the samples for the GPU get: what a sample claims to cover, it must.
#pragma once

#include <memory>
#include <set>
#include <string>

#include "base/device.h"
#include "cuda/large_samples.h"
#include "program/op_spec.h"

namespace troupe::testing {

// "grouped_linear: sm90 pair" for every operation of the large samples in these dtypes, without
// their derivatives, on a GPU of these traits.
inline std::set<std::string> variants_of_large_samples(const DeviceTraits& gpu) {
  std::set<std::string> variants;
  for (const LargeSample& large : large_samples()) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      Program program(std::make_shared<const StateTable>());
      Builder builder(program);
      SampleBuilder sample(builder, dtype);
      large.sample.build(sample);
      for (int32_t index = 0; index < program.op_count(); ++index) {
        const Op& op = program.op(index);
        const KernelChoice choice = op.spec->cuda(OpView{program, op}, gpu);
        variants.insert(std::string(op.spec->name) + ": " + choice.variant);
      }
    }
  }
  return variants;
}

// Those that they are for, on Hopper.
inline const std::set<std::string>& claimed_variants() {
  static const std::set<std::string> claimed = {
      "attention: cudnn",
      "attention: plain tiles",
      "attention: sm90",
      "context_attention: cudnn",
      "context_attention: plain tiles",
      "context_attention: sm90",
      "cross_entropy: elements",
      "cross_entropy: packs",
      "grouped_linear: plain tiles",
      "grouped_linear: sm90",
      "grouped_linear: sm90 pair",
      "linear: cublaslt",
      "linear: plain tiles",
      "newton_schulz: cublaslt",
      "qk_norm_rope: elements",
      "qk_norm_rope: packs",
      "qk_norm_rope: rounds",
      "qk_norm_rope: rounds if in place",
      "quantize: elements",
      "quantize: packs",
      "quantize: tiles",
      "quantized_grouped_linear: sm90 code blocks",
      "quantized_grouped_linear: sm90 code blocks pair",
      "quantized_grouped_linear: sm90 codes",
      "quantized_grouped_linear: sm90 codes pair",
      "quantized_grouped_linear: widened",
      "quantized_grouped_linear_weight_gradient: sm90 code blocks",
      "quantized_grouped_linear_weight_gradient: sm90 code blocks pair",
      "quantized_grouped_linear_weight_gradient: sm90 codes",
      "quantized_grouped_linear_weight_gradient: sm90 codes pair",
      "quantized_linear: sm90 code blocks",
      "quantized_linear: sm90 code blocks pair",
      "quantized_linear: sm90 codes",
      "quantized_linear: sm90 codes pair",
      "quantized_linear: widened",
      "quantized_linear_data_gradient: sm90 codes pair",
      "quantized_linear_weight_gradient: sm90 code blocks",
      "quantized_linear_weight_gradient: sm90 code blocks pair",
      "quantized_linear_weight_gradient: sm90 codes",
      "quantized_linear_weight_gradient: sm90 codes pair",
      "rms_norm: elements",
      "rms_norm: packs",
      "sparse_attention: plain",
      "sparse_attention: tiles",
  };
  return claimed;
}

// Of these, what no sample gets.
inline std::set<std::string> missing_variants(const DeviceTraits& gpu) {
  const std::set<std::string> found = variants_of_large_samples(gpu);
  std::set<std::string> missing;
  for (const std::string& claimed : claimed_variants()) {
    if (!found.contains(claimed)) missing.insert(claimed);
  }
  return missing;
}

}  // namespace troupe::testing
