// Attention in bf16 on a GPU, at the shapes of models, also of a rank that has some of each
// sequence's queries, with the keys of all ranks at hand (context_attention), and of sequences of
// several documents: how far it is from fp32, whether a second run and a CUDA graph give the same
// bits, and how fast it is. Causal attention counts half of the scores, as the operation's cost
// does, and documents count as one: flops that are not there are counted, too. Exits with 1 if
// results are wrong.
// Usage: cuda_attention_bench [PART]   only shapes with PART in their names
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "cuda/device_run.h"
#include "ops/attention/attention/document_starts.h"
#include "ops/attention/context_attention/context_attention.h"

namespace troupe {
namespace {

struct NamedShape {
  const char* name;
  AttentionAttributes attributes;
  SequenceChunks chunks = {};
  int32_t documents = 0;  // of the same length, in each sequence; 0: none are told apart
};

// Errors in bf16 come from roundings of probabilities and results: 2^-9 each, relative.
constexpr double kTolerance = 1e-2;

struct Values {
  ValueId out;
  ValueId lse;
  std::vector<ValueId> gradients;
  ValueId starts = {};

  std::vector<ValueId> all() const {
    std::vector<ValueId> ids = {out, lse};
    ids.insert(ids.end(), gradients.begin(), gradients.end());
    return ids;
  }
};

Values emit(Builder& builder, const NamedShape& shape, DType dtype) {
  const AttentionAttributes& a = shape.attributes;
  const int64_t rows = int64_t{a.batch} * a.sequence;
  const ValueId d_out = builder.input("d_out", dtype, {rows, a.out_row()});
  const ValueId none;
  ValueId starts;
  if (shape.documents > 0) starts = builder.input("starts", DType::i32, {rows});
  if (shape.chunks.ranks == 1) {
    const AttentionAttributes fused = a.fused();
    const ValueId qkv = builder.input("qkv", dtype, {rows, fused.query_stride()});
    const auto forward =
        builder.emit(kAttention, Attributes(fused), {qkv, qkv, none, starts, none}, "out");
    return {forward[0], forward[1],
            builder.emit(kAttentionGradient, Attributes(fused),
                         {d_out, qkv, qkv, forward[0], forward[1], none, starts}, "d_qkv"),
            starts};
  }
  const Attributes attributes(ContextAttentionAttributes{a, shape.chunks});
  const ValueId q = builder.input("q", dtype, {rows, a.query_row()});
  const ValueId kv = builder.input("kv", dtype, {rows * shape.chunks.ranks, a.key_value_row()});
  const auto forward =
      builder.emit(kContextAttention, attributes, {q, kv, none, starts, none}, "out");
  return {forward[0], forward[1],
          builder.emit(kContextAttentionGradient, attributes,
                       {d_out, q, kv, forward[0], forward[1], none, starts}, "d_q"),
          starts};
}

void write_documents(DeviceRun& run, const NamedShape& shape, ValueId starts) {
  if (shape.documents == 0) return;
  const AttentionAttributes& a = shape.attributes;
  const int64_t positions = int64_t{a.sequence} * shape.chunks.ranks;
  std::vector<int64_t> begins;
  for (int64_t i = 0; i < int64_t{a.batch} * shape.documents; ++i) {
    begins.push_back(i * positions / shape.documents);
  }
  run.write(starts, document_starts(a.batch, a.sequence, shape.chunks, begins));
}

double distance(const std::vector<double>& actual, const std::vector<double>& reference) {
  double difference = 0;
  double norm = 0;
  for (size_t i = 0; i < reference.size(); ++i) {
    difference += (actual[i] - reference[i]) * (actual[i] - reference[i]);
    norm += reference[i] * reference[i];
  }
  return std::sqrt(difference / norm);
}

std::vector<std::byte> bits(const DeviceRun& run, const Values& values) {
  std::vector<std::byte> all;
  for (const ValueId id : values.all()) {
    const auto more = run.bytes(id);
    all.insert(all.end(), more.begin(), more.end());
  }
  return all;
}

void poison(DeviceRun& run, const Values& values) {
  for (const ValueId id : values.all()) run.poison(id);
}

bool graph_gives(DeviceRun& run, const Values& values, const std::vector<std::byte>& expected) {
  poison(run, values);
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  check_cuda(cudaStreamBeginCapture(run.stream(), cudaStreamCaptureModeThreadLocal), "capturing");
  run.launch(0);
  run.launch(1);
  check_cuda(cudaStreamEndCapture(run.stream(), &graph), "capturing");
  check_cuda(cudaGraphInstantiate(&executable, graph, 0), "making a graph");
  check_cuda(cudaGraphLaunch(executable, run.stream()), "launching a graph");
  run.wait();
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
  return bits(run, values) == expected;
}

bool measure(const NamedShape& shape) {
  Values values;
  DeviceRun run([&](Builder& builder) { values = emit(builder, shape, DType::bf16); }, 1);
  write_documents(run, shape, values.starts);
  run.run();
  const auto first = bits(run, values);
  poison(run, values);
  run.run();
  const bool same = bits(run, values) == first;
  const bool same_in_graph = graph_gives(run, values, first);

  Values exact;
  DeviceRun reference([&](Builder& builder) { exact = emit(builder, shape, DType::f32); }, 1);
  write_documents(reference, shape, exact.starts);
  reference.run();
  const double out = distance(run.numbers(values.out), reference.numbers(exact.out));
  const double lse = distance(run.numbers(values.lse), reference.numbers(exact.lse));
  double gradient = 0;  // the worst
  for (size_t i = 0; i < values.gradients.size(); ++i) {
    gradient = std::max(gradient, distance(run.numbers(values.gradients[i]),
                                           reference.numbers(exact.gradients[i])));
  }

  const double forward = run.seconds(0);
  const double backward = run.seconds(1);
  const bool good =
      same && same_in_graph && out < kTolerance && lse < kTolerance && gradient < kTolerance;
  std::printf("%-24s %8.3f %6.0f %8.3f %6.0f %7.0f   %.1e %.1e %.1e  %s\n", shape.name,
              forward * 1e3, run.cost(0).flops / forward * 1e-12, backward * 1e3,
              run.cost(1).flops / backward * 1e-12,
              static_cast<double>(run.scratch_bytes()) / (1 << 20), out, lse, gradient,
              !same            ? "OTHER BITS"
              : !same_in_graph ? "OTHER BITS IN A GRAPH"
              : good           ? "good"
                               : "WRONG");
  return good;
}

int measure_all(const std::string& part) {
  const auto shape = [](int32_t batch, int32_t sequence, int32_t heads, int32_t groups,
                        int32_t head_dim, int32_t window = 0) {
    return AttentionAttributes{.batch = batch,
                               .sequence = sequence,
                               .heads = heads,
                               .groups = groups,
                               .head_dim = head_dim,
                               .scale = 1 / std::sqrt(static_cast<double>(head_dim)),
                               .window = window};
  };
  // Of DeepSeek-V2-Lite and V3, whose values are smaller than their keys.
  const auto latent = [&](int32_t batch, int32_t heads, int32_t sequence = 4096) {
    AttentionAttributes attributes = shape(batch, sequence, heads, heads, 192);
    attributes.value_dim = 128;
    return attributes;
  };
  const NamedShape shapes[] = {
      {"OLMoE 2x4096", shape(2, 4096, 16, 16, 128)},
      {"Qwen3-30B 2x4096", shape(2, 4096, 32, 4, 128)},
      {"Mixtral-8x7B 2x4096", shape(2, 4096, 32, 8, 128)},
      {"Mixtral-8x22B 2x4096", shape(2, 4096, 48, 8, 128)},
      {"heads of 64, 2x4096", shape(2, 4096, 32, 8, 64)},
      {"heads of 256, 2x4096", shape(2, 4096, 16, 2, 256)},
      {"window 1024, 2x4096", shape(2, 4096, 32, 8, 128, 1024)},
      {"32/4, 1x8192", shape(1, 8192, 32, 4, 128)},
      {"8/1, 1x16384", shape(1, 16384, 8, 1, 128)},
      {"same, window 3000", shape(1, 16384, 8, 1, 128, 3000)},
      {"32/4, 8192 of 32k, 1st", shape(1, 8192, 32, 4, 128), {.ranks = 4, .rank = 0}},
      {"same, last rank", shape(1, 8192, 32, 4, 128), {.ranks = 4, .rank = 3}},
      {"same, window 3000", shape(1, 8192, 32, 4, 128, 3000), {.ranks = 4, .rank = 3}},
      {"8/1, 16k of 64k: blocks", shape(1, 16384, 8, 1, 128), {.ranks = 4, .rank = 1}},
      {"MLA of 16 heads, 1x4096", latent(1, 16)},
      {"MLA of 128 heads, 1x4096", latent(1, 128)},
      {"MLA, 8 documents", latent(1, 128), {}, 8},
      {"MLA of 16, 1x32768", latent(1, 16, 32768)},
      {"32/4, 1x32768", shape(1, 32768, 32, 4, 128)},
      {"Qwen3-30B, 1 document", shape(2, 4096, 32, 4, 128), {}, 1},
      {"Qwen3-30B, 8 documents", shape(2, 4096, 32, 4, 128), {}, 8},
      {"window 1024, 1 document", shape(2, 4096, 32, 8, 128, 1024), {}, 1},
      {"window 128, 2x4096", shape(2, 4096, 64, 8, 64, 128)},
      {"window 128, 1 document", shape(2, 4096, 64, 8, 64, 128), {}, 1},
      {"Qwen3-30B, 64 documents", shape(2, 4096, 32, 4, 128), {}, 64},
      {"Mixtral, 1 document", shape(2, 4096, 32, 8, 128), {}, 1},
      {"Mixtral, 8 documents", shape(2, 4096, 32, 8, 128), {}, 8},
      {"heads of 64, 1 document", shape(2, 4096, 32, 8, 64), {}, 1},
      {"8192 of 32k, 8 documents", shape(1, 8192, 32, 4, 128), {.ranks = 4, .rank = 3}, 8},
  };
  std::printf("%-24s %8s %6s %8s %6s %7s   %s\n", "", "fwd ms", "TFLOP", "bwd ms", "TFLOP", "MiB",
              "off from fp32: out, lse, gradients");
  bool good = true;
  for (const NamedShape& named : shapes) {
    if (std::string(named.name).find(part) != std::string::npos) good = measure(named) && good;
  }
  return good ? EXIT_SUCCESS : EXIT_FAILURE;
}

}  // namespace
}  // namespace troupe

int main(int argc, char** argv) {
  try {
    return troupe::measure_all(argc > 1 ? argv[1] : "");
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return EXIT_FAILURE;
  }
}
