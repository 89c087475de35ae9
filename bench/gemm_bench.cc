// Our matrix products against OpenBLAS left to itself, on the shapes of a training step: the model
// of the quickstart (2,048 tokens, hidden 192) and a layer of OLMoE (1,024 tokens, hidden 2,048).
//
// Both use the same number of threads: ours are pool threads that call BLAS single-threaded on
// tiles, so that results do not depend on their number; OpenBLAS splits the product its own way.
// The two runs of a shape stand below each other; "Gflop/s" is the figure to compare.
#include <benchmark/benchmark.h>
#include <cblas.h>
#include <string>
#include <vector>

#include "base/machine.h"
#include "ops/cpu/gemm.h"

namespace troupe {
namespace {

struct Product {
  const char* name;
  bool trans_a;
  bool trans_b;
  int64_t m;
  int64_t n;
  int64_t k;
};

constexpr Product kProducts[] = {
    {"quickstart qkv", false, true, 2048, 320, 192},
    {"quickstart experts up, one of 8", false, true, 512, 768, 192},
    {"quickstart experts down, one of 8", false, true, 512, 192, 384},
    {"quickstart experts up, data gradient", false, false, 512, 192, 768},
    {"quickstart experts up, weight gradient", true, false, 768, 192, 512},
    {"quickstart head", false, true, 2048, 272, 192},
    {"olmoe qkv", false, true, 1024, 6144, 2048},
    {"olmoe experts up, one of 64", false, true, 128, 2048, 2048},
    {"olmoe experts down, one of 64", false, true, 128, 2048, 1024},
    {"olmoe qkv, weight gradient", true, false, 6144, 2048, 1024},
};

struct Operands {
  explicit Operands(const Product& p)
      : a(static_cast<size_t>(p.m * p.k)),
        b(static_cast<size_t>(p.k * p.n)),
        c(static_cast<size_t>(p.m * p.n)) {
    for (size_t i = 0; i < a.size(); ++i) a[i] = 0.5F + 0.03F * static_cast<float>(i % 17);
    for (size_t i = 0; i < b.size(); ++i) b[i] = 0.25F - 0.05F * static_cast<float>(i % 13);
  }
  std::vector<float> a;
  std::vector<float> b;
  std::vector<float> c;
};

void report(benchmark::State& state, const Product& p) {
  state.counters["Gflop/s"] = benchmark::Counter(
      2e-9 * static_cast<double>(p.m) * static_cast<double>(p.n) * static_cast<double>(p.k),
      benchmark::Counter::kIsIterationInvariantRate);
}

void ours(benchmark::State& state, const Product& p) {
  Operands x(p);
  ThreadPool pool(usable_cores());
  const GemmTiles tiles = gemm_tiles(p.m, p.n, p.k, 1, /*split_reduction=*/p.trans_a);
  constexpr size_t kLine = 64;
  const size_t scratch_bytes =
      (gemm_scratch_bytes(tiles, DType::f32, DType::f32, DType::f32) + kLine - 1) / kLine * kLine;
  std::vector<std::byte> scratch(scratch_bytes * static_cast<size_t>(pool.threads()));
  std::vector<std::byte> workspace(gemm_workspace_bytes(tiles, p.m, p.n, DType::f32));
  KernelArguments args;
  args.workspace = workspace.data();
  args.scratch = scratch.data();
  args.scratch_bytes_per_thread = scratch_bytes;
  args.pool = &pool;
  const GemmOperand<float> a{x.a.data(), p.trans_a ? p.m : p.k, p.trans_a};
  const GemmOperand<float> b{x.b.data(), p.trans_b ? p.k : p.n, p.trans_b};
  for (auto _ : state) {
    parallel_gemm<float, float, float>(args, tiles, a, b, p.m, p.n, p.k, x.c.data(), p.n,
                                       /*accumulate=*/false, nullptr);
    benchmark::ClobberMemory();
  }
  report(state, p);
}

void openblas(benchmark::State& state, const Product& p) {
  Operands x(p);
  openblas_set_num_threads(usable_cores());
  for (auto _ : state) {
    cblas_sgemm(CblasRowMajor, p.trans_a ? CblasTrans : CblasNoTrans,
                p.trans_b ? CblasTrans : CblasNoTrans, static_cast<int>(p.m), static_cast<int>(p.n),
                static_cast<int>(p.k), 1.0F, x.a.data(), static_cast<int>(p.trans_a ? p.m : p.k),
                x.b.data(), static_cast<int>(p.trans_b ? p.k : p.n), 0.0F, x.c.data(),
                static_cast<int>(p.n));
    benchmark::ClobberMemory();
  }
  report(state, p);
  openblas_set_num_threads(1);
}

const bool registered = [] {
  for (const Product& p : kProducts) {
    benchmark::RegisterBenchmark((std::string("ours: ") + p.name).c_str(),
                                 [&p](benchmark::State& state) { ours(state, p); })
        ->UseRealTime();
    benchmark::RegisterBenchmark((std::string("OpenBLAS: ") + p.name).c_str(),
                                 [&p](benchmark::State& state) { openblas(state, p); })
        ->UseRealTime();
  }
  return true;
}();

}  // namespace
}  // namespace troupe
