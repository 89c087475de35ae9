// Which CUDA kernels operations get on GPUs of given traits, without a GPU: their names, why they
// are slow, and what they need.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <memory>
#include <string>

#include "cuda/sample_variants.h"
#include "ops/attention/attention/attention_cuda.h"
#include "ops/attention/context_attention/context_attention.h"
#include "ops/attention/gated_delta_rule/gated_delta_rule.h"
#include "ops/attention/gated_delta_rule/gated_delta_state.h"
#include "ops/attention/rope/rope.h"
#include "ops/precision/quantize_activation/quantize_activation.h"
#include "ops/registry.h"
#include "support/errors.h"

namespace troupe::testing {
namespace {

constexpr DeviceTraits kHopper{.compute_capability = 90, .multiprocessors = 132};
constexpr DeviceTraits kAmpere{.compute_capability = 80, .multiprocessors = 108};
constexpr DeviceTraits kBlackwell{.compute_capability = 100, .multiprocessors = 148};

// A program with one operation, of these multiprocessors; emit(builder) gives it.
template <class Emit>
KernelChoice choose(const DeviceTraits& gpu, const Emit& emit,
                    const Multiprocessors& multiprocessors = {}) {
  Program program(std::make_shared<const StateTable>());
  Builder builder(program);
  emit(builder);
  program.set_multiprocessors(program.op_count() - 1, multiprocessors);
  const Op& op = program.op(program.op_count() - 1);
  return op.spec->cuda(OpView{program, op}, gpu);
}

struct Groups {
  DType dtype = DType::bf16;
  int64_t inputs = 128;
  int64_t outputs = 128;
  int64_t bound = 8 * 512;
  int64_t expected = 0;  // rows; 0: as many as `bound`
};

KernelChoice choose_grouped(const DeviceTraits& gpu, const Groups& groups,
                            const Multiprocessors& multiprocessors = {}) {
  return choose(
      gpu,
      [&](Builder& builder) {
        const ValueId offsets = builder.input("offsets", DType::i32, {9});
        const ValueId weight =
            builder.input("weight", groups.dtype, {8, groups.outputs, groups.inputs});
        const ValueId rows = builder.program().add_value({.name = "rows",
                                                          .dtype = groups.dtype,
                                                          .shape = {groups.bound, groups.inputs},
                                                          .role = Role::input,
                                                          .rows = {offsets, 8, groups.expected}});
        grouped_linear(builder, rows, weight, offsets, "y");
      },
      multiprocessors);
}

// With a state before a sequence, and for what it makes of any state, as without.
TEST(KernelChoice, OfGatedDeltaRules) {
  const auto of = [](DType dtype, int32_t head, bool is_state) {
    return choose(kHopper, [&](Builder& builder) {
      const GatedDeltaRuleAttributes a{
          .sequence = 64, .key_heads = 1, .value_heads = 2, .key_dim = head, .value_dim = head};
      const DType wide = accumulation_dtype(dtype);
      const ValueId qkv = builder.input("qkv", dtype, {64, a.row_size()});
      const ValueId gates = builder.input("gates", wide, {64, 4});
      if (is_state) {
        gated_delta_state(builder, qkv, gates, {}, a, "ends");
      } else {
        const ValueId initial = builder.input("initial", wide, {1, 2, head, head});
        gated_delta_rule(builder, qkv, gates, {.initial = initial}, a, "o");
      }
    });
  };
  for (const bool is_state : {false, true}) {
    const KernelChoice fast = of(DType::bf16, 128, is_state);
    EXPECT_EQ(std::string(fast.variant), "chunks");
    EXPECT_EQ(fast.slow, SlowKernel::no);
    EXPECT_EQ(of(DType::bf16, 64, is_state).slow, SlowKernel::head_size);
    EXPECT_EQ(of(DType::f32, 128, is_state).slow, SlowKernel::dtype);
    EXPECT_EQ(std::string(of(DType::f32, 128, is_state).variant), "heads");
  }
}

// Its rows decide, not the table, whose type is another.
TEST(KernelChoice, OfRotaryEmbedding) {
  const auto variant = [](int32_t rotary_dim) -> std::string {
    return choose(
               kHopper,
               [&](Builder& builder) {
                 const ValueId qkv = builder.input("qkv", DType::bf16, {4, 4 * 16});
                 const ValueId table = builder.input("table", DType::f32, {4, rotary_dim / 2, 2});
                 rope(builder, qkv, table,
                      {.heads = 2,
                       .groups = 1,
                       .head_dim = 16,
                       .rotary_dim = rotary_dim,
                       .sequence = 4},
                      "rotated");
               })
        .variant;
  };
  EXPECT_EQ(variant(16), "packs");
  EXPECT_EQ(variant(8), "elements");
}

TEST(KernelChoice, OfProductsOfExperts) {
  struct Case {
    DeviceTraits gpu;
    Groups groups;
    std::string variant;
    SlowKernel slow;
  };
  const Case cases[] = {
      {kHopper, {.bound = 8 * 255}, "sm90", SlowKernel::no},
      {kHopper, {.bound = 8 * 256}, "sm90 pair", SlowKernel::no},
      {kHopper, {.bound = 8 * 4096, .expected = 8 * 128}, "sm90", SlowKernel::no},
      {kHopper, {.bound = 8 * 4096, .expected = 8 * 2048}, "sm90 pair", SlowKernel::no},
      {kHopper, {.inputs = 132}, "plain tiles", SlowKernel::row_bytes},
      {kHopper, {.outputs = 75}, "plain tiles", SlowKernel::row_bytes},
      {kHopper, {.dtype = DType::f32}, "plain tiles", SlowKernel::dtype},
      {kHopper, {.dtype = DType::f16, .bound = 8 * 256}, "sm90 pair", SlowKernel::no},
      {kAmpere, {}, "plain tiles", SlowKernel::compute_capability},
      {kBlackwell, {}, "plain tiles", SlowKernel::compute_capability},
      {kAmpere, {.dtype = DType::f64}, "plain tiles", SlowKernel::dtype},
  };
  for (const Case& each : cases) {
    const KernelChoice choice = choose_grouped(each.gpu, each.groups);
    SCOPED_TRACE(fmt::format("{} {}x{}", each.gpu.compute_capability, each.groups.inputs,
                             each.groups.outputs));
    EXPECT_EQ(choice.variant, each.variant);
    EXPECT_EQ(choice.slow, each.slow);
    EXPECT_EQ(choice.multiprocessors, each.gpu.multiprocessors);
    EXPECT_EQ(choice.needs.scratch, 0U);
  }
}

TEST(KernelChoice, KeepsToMultiprocessorsWherePersistent) {
  const Multiprocessors leaves{.count = 20, .spares = true};
  EXPECT_EQ(choose_grouped(kHopper, {}, leaves).multiprocessors, 112);
  EXPECT_EQ(choose_grouped(kHopper, {.bound = 8 * 128}, leaves).multiprocessors, 112);
  EXPECT_EQ(choose_grouped(kHopper, {.dtype = DType::f32}, leaves).multiprocessors, 132);
  EXPECT_EQ(choose_grouped(kAmpere, {}, leaves).multiprocessors, 108);
  const Multiprocessors leaves_most{.count = 100, .spares = true};
  EXPECT_EQ(choose_grouped(kHopper, {}, leaves_most).multiprocessors, 66) << "at most half";
}

KernelChoice choose_attention_of(AttentionAttributes attributes, DType dtype, bool documents,
                                 const DeviceTraits& gpu = kHopper) {
  return choose(gpu, [&](Builder& builder) {
    const int64_t rows = int64_t{attributes.batch} * attributes.sequence;
    const int64_t width = attributes.query_row() + attributes.key_value_row();
    const ValueId qkv = builder.input("qkv", dtype, {rows, width});
    const bool drops = attributes.probability > 0;
    const ValueId step = drops ? builder.input("step", DType::i64, {1}) : ValueId{};
    const ValueId starts = documents ? builder.input("starts", DType::i32, {rows}) : ValueId{};
    attention(builder, {qkv, qkv}, {.step = step, .starts = starts}, attributes, "out");
  });
}

TEST(KernelChoice, OfAttention) {
  AttentionAttributes a{
      .batch = 2, .sequence = 64, .heads = 4, .groups = 2, .head_dim = 64, .scale = 0.1};
  const auto expect = [&](const char* variant, SlowKernel slow, DType dtype = DType::bf16,
                          bool documents = false) {
    const KernelChoice choice = choose_attention_of(a, dtype, documents);
    EXPECT_STREQ(choice.variant, variant) << a.head_dim;
    EXPECT_EQ(choice.slow, slow) << a.head_dim;
    EXPECT_EQ(choice.needs.scratch > 0, choice.variant == std::string_view("cudnn")) << "forward";
  };
  expect("cudnn", SlowKernel::no);
  expect("plain tiles", SlowKernel::dtype, DType::f32);
  expect("cudnn", SlowKernel::no, DType::f16);
  expect("sm90", SlowKernel::no, DType::bf16, true);
  expect("plain tiles", SlowKernel::dtype, DType::f16, true);
  EXPECT_EQ(choose_attention_of(a, DType::bf16, true, {.compute_capability = 80}).slow,
            SlowKernel::compute_capability);
  a.window = 16;
  expect("cudnn", SlowKernel::no);
  for (const int32_t even : {128, 136, 256}) {
    a.head_dim = even;
    expect("cudnn", SlowKernel::no);
    a.value_dim = 64;
    expect("cudnn", SlowKernel::no);
    if (even <= 192) {
      expect("sm90", SlowKernel::no, DType::bf16, true);
    } else {
      expect("plain tiles", SlowKernel::documents, DType::bf16, true);
    }
    a.value_dim = 0;
  }
  a.head_dim = 136;
  expect("plain tiles", SlowKernel::documents, DType::bf16, true);  // values are as large
  a.head_dim = 20;
  expect("plain tiles", SlowKernel::head_size);
  a.head_dim = 64;
  a.probability = 0.1;
  expect("plain tiles", SlowKernel::dropout);
  a.probability = 0;
  a.sequence = 1;
  expect("sm90", SlowKernel::no);
  a.head_dim = 136;
  expect("plain tiles", SlowKernel::one_query);
  a.sequence = 64;
  a.head_dim = 264;
  EXPECT_THROW(choose_attention_of(a, DType::bf16, false), UserError);
}

// Of a rank's chunks of the sequences, and of their gradient: cuDNN knows no documents.
TEST(KernelChoice, OfContextAttention) {
  ContextAttentionAttributes a{
      .attention = {.batch = 1, .sequence = 64, .heads = 4, .groups = 2, .head_dim = 64},
      .chunks = {.ranks = 2, .rank = 1}};
  const auto variant = [&](bool ring, bool gradient, bool documents) {
    return std::string(choose(kHopper, [&](Builder& builder) {
                         const DType dtype = DType::bf16;
                         const ValueId q = builder.input("q", dtype, {64, 4 * 64});
                         const ValueId kv = builder.input("kv", dtype, {ring ? 64 : 128, 2 * 128});
                         const bool drops = a.attention.probability > 0;
                         const ValueId step =
                             drops ? builder.input("step", DType::i64, {1}) : ValueId{};
                         const ValueId starts =
                             documents ? builder.input("starts", DType::i32, {64}) : ValueId{};
                         if (!gradient) {
                           (ring ? ring_attention : context_attention)(
                               builder, {q, kv}, {.step = step, .starts = starts}, a, "out");
                           return;
                         }
                         const ValueId out = builder.input("out", dtype, {64, 4 * 64});
                         const ValueId lse = builder.input("lse", DType::f32, {64, 4});
                         builder.emit(ring ? kRingAttentionGradient : kContextAttentionGradient,
                                      Attributes(a), {out, q, kv, out, lse, step, starts}, "d");
                       }).variant);
  };
  for (const bool ring : {false, true}) {
    for (const bool gradient : {false, true}) {
      SCOPED_TRACE(fmt::format("ring {} gradient {}", ring, gradient));
      a.attention.probability = 0;
      EXPECT_EQ(variant(ring, gradient, false), "cudnn");
      EXPECT_EQ(variant(ring, gradient, true), "sm90");
      a.attention.probability = 0.1;
      EXPECT_EQ(variant(ring, gradient, false), "plain tiles");
    }
  }
}

// cuDNN's gradients of scores take memory that grows with the square of the sequence.
TEST(KernelChoice, OfAttentionsGradient) {
  const auto gradient_choice = [](DType dtype, int32_t sequence) {
    const AttentionAttributes a{
        .batch = 1, .sequence = sequence, .heads = 2, .groups = 2, .head_dim = 64};
    const AttentionShape shape{.attributes = a, .dtype = dtype};
    const AttentionVariant variant = gradient_attention_variant(shape, kHopper);
    return std::pair(variant, attention_gradient_call_scratch_bytes(shape, variant));
  };
  const auto [own, own_bytes] = gradient_choice(DType::bf16, 96);
  EXPECT_EQ(own, AttentionVariant::sm90);
  const uint64_t rows = 2 * 128;
  EXPECT_EQ(own_bytes, rows * (2 + 64) * sizeof(float) + 256)
      << "two numbers and the gradient's sums of each padded query, and turns";
  const auto [cudnn, cudnn_bytes] = gradient_choice(DType::f16, 96);
  EXPECT_EQ(cudnn, AttentionVariant::cudnn);
  EXPECT_GT(gradient_choice(DType::f16, 960).second, 20 * cudnn_bytes);
  EXPECT_LT(gradient_choice(DType::bf16, 960).second, 11 * own_bytes);
}

TEST(KernelChoice, OfLongAttentionsGradient) {
  const auto gradient = [](int32_t sequence, int32_t groups, int32_t value_dim,
                           SequenceChunks chunks = {}) {
    const AttentionAttributes a{.sequence = sequence,
                                .heads = 8,
                                .groups = groups,
                                .head_dim = 192,
                                .value_dim = value_dim};
    return AttentionShape{.attributes = a, .chunks = chunks, .dtype = DType::bf16};
  };
  const auto variant = [](const AttentionShape& shape) {
    return gradient_attention_variant(shape, kHopper);
  };
  EXPECT_EQ(variant(gradient(8200, 8, 128)), AttentionVariant::sm90);
  EXPECT_EQ(variant(gradient(8200, 8, 136)), AttentionVariant::cudnn) << "values are too large";
  AttentionShape shared = gradient(8200, 8, 128, {.ranks = 2, .rank = 0});
  EXPECT_EQ(variant(shared), AttentionVariant::cudnn);
  shared.attributes.window = 2 * 8200 / 3 + 1;
  EXPECT_EQ(variant(shared), AttentionVariant::cudnn);
  shared.attributes.window = 2 * 8200 / 3;
  EXPECT_EQ(variant(shared), AttentionVariant::sm90);
  // With several heads to a group, their gradients of keys and values are summed apart, unless
  // blocks are short and there are enough of them.
  const AttentionShape few = gradient(8200, 2, 128);
  EXPECT_EQ(sm90_heads_each(few), 1);
  AttentionShape window = few;
  window.attributes.window = 100;
  EXPECT_EQ(sm90_heads_each(window), 1) << "520 blocks";
  window.attributes.batch = 3;
  EXPECT_EQ(sm90_heads_each(window), 2) << "780 blocks, not 390";
  window.attributes.batch = 4;
  EXPECT_EQ(sm90_heads_each(window), 4);
  EXPECT_FALSE(sm90_sums_parts(window));
  window.documents = true;
  EXPECT_EQ(sm90_heads_each(window), 2);
  EXPECT_TRUE(sm90_sums_parts(window));
  const auto bytes = [](const AttentionShape& shape) {
    return attention_gradient_call_scratch_bytes(shape, AttentionVariant::sm90);
  };
  EXPECT_EQ(bytes(gradient(8200, 2, 128)) - bytes(gradient(8200, 8, 128)),
            8200U * 8 * (192 + 128) * sizeof(bf16));
}

KernelChoice choose_linear_of(DType dtype, LinearOutput output, bool bias) {
  return choose(kHopper, [&](Builder& builder) {
    const ValueId x = builder.input("x", dtype, {32, 64});
    const ValueId weight = builder.input("weight", dtype, {16, 64});
    const ValueId b = bias ? builder.input("bias", dtype, {16}) : ValueId{};
    linear(builder, x, weight, {.bias = b, .output = output}, "y");
  });
}

TEST(KernelChoice, OfDenseProducts) {
  const auto expect = [](DType dtype, LinearOutput output, bool bias, const char* variant,
                         SlowKernel slow) {
    const KernelChoice choice = choose_linear_of(dtype, output, bias);
    EXPECT_STREQ(choice.variant, variant) << name_of(dtype);
    EXPECT_EQ(choice.slow, slow) << name_of(dtype);
    EXPECT_EQ(choice.needs.scratch, uint64_t{32} << 20);
  };
  for (const DType dtype : {DType::bf16, DType::f16, DType::f32, DType::f64}) {
    expect(dtype, LinearOutput::compute, false, "cublaslt", SlowKernel::no);
    expect(dtype, LinearOutput::accumulation, false, "cublaslt", SlowKernel::no);
  }
  expect(DType::bf16, LinearOutput::compute, true, "cublaslt", SlowKernel::no);
  expect(DType::bf16, LinearOutput::accumulation, true, "plain tiles", SlowKernel::bias_dtype);
  expect(DType::f64, LinearOutput::compute, true, "plain tiles", SlowKernel::bias_dtype);
  expect(DType::bf16, LinearOutput::f64, false, "plain tiles", SlowKernel::mixed_dtypes);
}

TEST(KernelChoice, OfGradientsOfRouterLogits) {
  const auto choose_with = [](DType weights) {
    return choose(kHopper, [&](Builder& builder) {
      const ValueId dy = builder.input("dy", DType::f32, {32, 16});
      const ValueId weight = builder.input("weight", weights, {16, 64});
      builder.emit(kLinearDataGradient, Attributes(NoAttributes()), {dy, weight}, "dx");
    });
  };
  EXPECT_STREQ(choose_with(DType::f16).variant, "plain tiles");
  EXPECT_EQ(choose_with(DType::f16).slow, SlowKernel::dtype);
  const KernelChoice choice = choose_with(DType::bf16);
  EXPECT_STREQ(choice.variant, "cublaslt in three parts");
  EXPECT_EQ(choice.slow, SlowKernel::no);
  EXPECT_EQ(choice.needs.scratch, (uint64_t{32} << 20) + 3 * 32 * 16 * 2 + 3 * 16 * 64 * 4);
}

// y [rows, n] = x [rows, k] W^T of codes, with one scale each or scales of blocks.
KernelChoice choose_codes(const DeviceTraits& device, DType compute, int64_t rows, int64_t n,
                          int64_t k, BlockShape of_x, BlockShape of_weight,
                          DType weight_format = DType::f8e4m3) {
  return choose(device, [&](Builder& builder) {
    const auto scales = [&](const char* name, const Shape& shape, BlockShape block) {
      return builder.input(name, DType::f32, scales_shape(shape, block, 0));
    };
    const Shape x{rows, k};
    const Shape weight{n, k};
    const std::vector<ValueId> inputs = {
        builder.input("x", DType::f8e4m3, x), builder.input("weight", weight_format, weight),
        scales("x_scales", x, of_x), scales("weight_scales", weight, of_weight), ValueId{}};
    const QuantizedProductAttributes attributes{.compute = compute,
                                                .operands = {{{of_x}, {of_weight}}}};
    builder.emit(kQuantizedLinear, Attributes(attributes), inputs, "y");
  });
}

TEST(KernelChoice, OfCodes) {
  const BlockShape all;
  const auto expect = [&](const KernelChoice& choice, const char* variant, SlowKernel slow) {
    EXPECT_STREQ(choice.variant, variant);
    EXPECT_EQ(choice.slow, slow) << variant;
  };
  const DType bf16 = DType::bf16;
  expect(choose_codes(kHopper, bf16, 255, 64, 32, all, all), "sm90 codes", SlowKernel::no);
  expect(choose_codes(kHopper, bf16, 256, 64, 32, all, all), "sm90 codes pair", SlowKernel::no);
  expect(choose_codes(kHopper, bf16, 256, 64, 40, all, all), "widened", SlowKernel::row_codes);
  expect(choose_codes(kHopper, DType::f32, 256, 64, 32, all, all), "widened", SlowKernel::dtype);
  expect(choose_codes(kHopper, bf16, 255, 64, 32, {1, 128}, {128, 128}), "sm90 code blocks",
         SlowKernel::no);
  expect(choose_codes(kHopper, bf16, 256, 64, 32, {1, 128}, {128, 128}), "sm90 code blocks pair",
         SlowKernel::no);
  expect(choose_codes(kHopper, bf16, 256, 64, 32, {1, 32}, {32, 32}), "widened",
         SlowKernel::block_scales);
  expect(choose_codes(kHopper, bf16, 256, 64, 32, {1, 16}, {16, 16}), "widened",
         SlowKernel::four_bits);
  expect(choose_codes(kAmpere, bf16, 256, 64, 32, all, all), "widened",
         SlowKernel::compute_capability);
  EXPECT_STREQ(choose_codes(kHopper, bf16, 256, 64, 32, all, all, DType::f8e5m2).variant, "widened")
      << "tensor cores' kernels take f8e5m2 on the left alone";
  // Both operands in f32, a bias, and what cuBLASLt needs.
  EXPECT_EQ(choose_codes(kHopper, DType::f32, 256, 64, 32, all, all).needs.scratch,
            (uint64_t{32} << 20) + 4 * (256 * 32 + 64 * 32) + 256);
}

// In tiles by scales that are known, or in blocks that lie within a half of a row.
TEST(KernelChoice, OfQuantizedActivations) {
  const QuantizeAttributes whole{.order = CodesOrder::both};
  const QuantizeAttributes lines{.rule = ScaleRule::power_of_two,
                                 .block = {1, 128},
                                 .order = CodesOrder::both,
                                 .transposed_block = {128, 1}};
  const auto of = [](DType dtype, int64_t f, const QuantizeAttributes& codes, bool is_gradient,
                     bool gated = true) {
    const KernelChoice choice = choose(kHopper, [&](Builder& builder) {
      const ValueId x = builder.input("x", dtype, {256, gated ? 2 * f : f});
      const ValueId dy = builder.input("dy", dtype, {256, f});
      const ValueId amax =
          codes.block == BlockShape{} ? builder.input("amax", DType::f32, {1, 1}) : ValueId{};
      const ValueId weights = builder.input("weights", accumulation_dtype(dtype), {256, 1});
      const ValueId slots = builder.input("slots", DType::i32, {256});
      std::vector<ValueId> inputs = {x, {}, amax};
      if (is_gradient) inputs.push_back(dy);
      inputs.insert(inputs.end(), {weights, slots});
      builder.emit(is_gradient ? kQuantizeActivationGradient : kQuantizeActivation,
                   Attributes(QuantizeActivationAttributes{codes, {.gated = gated}}), inputs, "q");
    });
    return fmt::format("{}, {}", choice.variant, choice.needs.scratch);
  };
  // Scales of the tensor; of gradients a part of each row's sum for each tile, too.
  EXPECT_EQ(of(DType::bf16, 264, whole, false), "tiles, 4");
  EXPECT_EQ(of(DType::bf16, 264, whole, true), "tiles, 3076");
  EXPECT_EQ(of(DType::bf16, 264, lines, false), fmt::format("tiles, {}", (256 * 3 + 2 * 264) * 4));
  EXPECT_TRUE(of(DType::bf16, 384, lines, true).starts_with("tiles, "));
  EXPECT_TRUE(of(DType::bf16, 264, lines, true, /*gated=*/false).starts_with("tiles, "));
  // Otherwise what is made, before it is quantised.
  EXPECT_EQ(of(DType::bf16, 264, lines, true),
            fmt::format("steps, {}", 256 * 528 * 2 + (256 * 5 + 2 * 528) * 4));
  EXPECT_EQ(of(DType::bf16, 12, whole, false), fmt::format("steps, {}", 256 * 12 * 2 + 4));
  EXPECT_EQ(of(DType::f32, 264, whole, true), fmt::format("steps, {}", 256 * 528 * 4 + 4));
  QuantizeAttributes of_gradients = whole;
  of_gradients.format = DType::f8e5m2;
  EXPECT_TRUE(of(DType::bf16, 264, of_gradients, true).starts_with("tiles, "));
}

TEST(KernelChoice, IsThereForEveryKind) {
  for (const OpSpec* spec : all_operations()) {
    EXPECT_NE(spec->cuda, nullptr) << spec->name;
  }
}

TEST(KernelChoice, SamplesForGpusCoverWhatTheyClaim) {
  EXPECT_EQ(missing_variants(kHopper), std::set<std::string>());
}

}  // namespace
}  // namespace troupe::testing
