#include "ops/optimizer/newton_schulz/newton_schulz_cpu.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "ops/cpu/gemm.h"
#include "ops/optimizer/newton_schulz/newton_schulz.h"

namespace troupe {
namespace {

// Elements that one piece of the work has, of the norm and of copies.
constexpr int64_t kPieceElements = 32768;

// The workspace of one matrix: X and its successor, A and b A + c A A, and the sums of squares of
// its pieces. Each begins with a cache line. With no memory only `bytes` is found.
template <class A>
struct NewtonSchulzMemory {
  A* x = nullptr;
  A* next = nullptr;
  A* gram = nullptr;
  A* polynomial = nullptr;
  double* squares = nullptr;
  uint64_t bytes = 0;

  NewtonSchulzMemory(std::byte* memory, const SectionMatrix& section) {
    const auto take = [&]<class T>(T*& part, int64_t elements) {
      if (memory != nullptr) part = reinterpret_cast<T*>(memory + bytes);
      bytes += (static_cast<uint64_t>(elements) * sizeof(T) + 63) / 64 * 64;
    };
    take(x, section.elements());
    take(next, section.elements());
    take(gram, section.side() * section.side());
    take(polynomial, section.side() * section.side());
    take(squares, (section.elements() + kPieceElements - 1) / kPieceElements);
  }
};

double norm_of(ThreadPool& pool, const auto* x, int64_t elements, double* squares) {
  pool.parallel_ranges(elements, kPieceElements, [=](int64_t begin, int64_t end, int) {
    squares[begin / kPieceElements] = lane_sum<double>(end - begin, [=](int64_t i) {
      const auto value = static_cast<double>(x[begin + i]);
      return value * value;
    });
  });
  double sum = 0;
  for (int64_t begin = 0; begin < elements; begin += kPieceElements) {
    sum += squares[begin / kPieceElements];
  }
  return std::sqrt(sum);
}

template <class A>
void round_to_bf16(A* values, int64_t n) {
  TROUPE_INDEPENDENT
  for (int64_t i = 0; i < n; ++i) values[i] = widen(bf16(static_cast<float>(values[i])));
}

// out [m, n] = alpha left [m, k] right [k, n] + beta addend.
template <class A>
struct ScaledProduct {
  int64_t m, n, k;
  double alpha;
  GemmOperand<A> left, right;
  double beta;
  const A* addend;  // nullptr: none
  A* out;
};

// Tiles depend on the sizes of one matrix alone.
template <class A>
void multiply(ThreadPool& pool, const ScaledProduct<A>& p, bool rounded) {
  const GemmTiles tiles = gemm_tiles(p.m, p.n, p.k);
  pool.parallel_for(tiles.tiles(), [&](int64_t tile, int) {
    const int64_t i = tile / tiles.grid_n * tiles.tile_m;
    const int64_t j = tile % tiles.grid_n * tiles.tile_n;
    const int64_t rows = std::min(tiles.tile_m, p.m - i);
    const int64_t columns = std::min(tiles.tile_n, p.n - j);
    A* out = p.out + i * p.n + j;
    for (int64_t row = 0; p.addend != nullptr && row < rows; ++row) {
      std::copy_n(p.addend + (i + row) * p.n + j, columns, out + row * p.n);
    }
    const GemmOperand<A> left = p.left.block(i, 0);
    const GemmOperand<A> right = p.right.block(0, j);
    gemm_tile<A>(left.transposed, right.transposed, rows, columns, p.k, static_cast<A>(p.alpha),
                 left.data, left.stride, right.data, right.stride, static_cast<A>(p.beta), out,
                 p.n);
    for (int64_t row = 0; rounded && row < rows; ++row) round_to_bf16(out + row * p.n, columns);
  });
}

// x: the section in its matrix. Leaves the result, without its scale, in memory.x.
template <class A>
void orthogonalise(const KernelArguments& args, const SectionMatrix& section, const A* x,
                   NewtonSchulzMemory<A>& memory) {
  const auto& attributes = args.attributes->as<NewtonSchulzAttributes>();
  const bool rounded = attributes.arithmetic == NewtonSchulzArithmetic::bf16;
  const auto norm = static_cast<A>(
      std::max(norm_of(*args.pool, x, section.elements(), memory.squares), kNewtonSchulzLeastNorm));
  args.pool->parallel_ranges(section.elements(), kPieceElements,
                             [=](int64_t begin, int64_t end, int) {
                               TROUPE_INDEPENDENT
                               for (int64_t i = begin; i < end; ++i) memory.x[i] = x[i] / norm;
                               if (rounded) round_to_bf16(memory.x + begin, end - begin);
                             });
  const auto [rows, columns] = std::pair(section.rows, section.columns);
  const int64_t side = section.side();
  const bool tall = section.is_tall();
  for (int32_t step = 0; step < attributes.steps; ++step) {
    const auto [a, b, c] = newton_schulz_step(attributes, step);
    const GemmOperand<A> gram{memory.gram, side, false};
    const GemmOperand<A> polynomial{memory.polynomial, side, false};
    const GemmOperand<A> matrix{memory.x, columns, false};
    const GemmOperand<A> transpose{memory.x, columns, true};
    multiply<A>(*args.pool,
                {side, side, tall ? rows : columns, 1, tall ? transpose : matrix,
                 tall ? matrix : transpose, 0, nullptr, memory.gram},
                rounded);
    multiply<A>(*args.pool, {side, side, side, c, gram, gram, b, memory.gram, memory.polynomial},
                rounded);
    multiply<A>(*args.pool,
                {rows, columns, side, 1, tall ? matrix : polynomial, tall ? polynomial : matrix, a,
                 memory.x, memory.next},
                rounded);
    std::swap(memory.x, memory.next);
  }
}

template <class A>
void run_newton_schulz(const KernelArguments& args) {
  const auto& attributes = args.attributes->as<NewtonSchulzAttributes>();
  const MatrixBatch batch(args.input(0).shape);
  for (int64_t i = 0; i < batch.count; ++i) {
    for_sections(attributes, batch, [&](const SectionMatrix& section) {
      NewtonSchulzMemory<A> memory(args.workspace, section);
      const int64_t first = i * batch.rows * batch.columns + section.first;
      orthogonalise(args, section, args.in<A>(0) + first, memory);
      A* y = args.out<A>(0) + first;
      args.pool->parallel_ranges(section.elements(), kPieceElements,
                                 [=](int64_t begin, int64_t end, int) {
                                   const auto scale = static_cast<A>(section.scale);
                                   TROUPE_INDEPENDENT
                                   for (int64_t j = begin; j < end; ++j) y[j] = scale * memory.x[j];
                                 });
    });
  }
}

}  // namespace

CpuKernel newton_schulz_cpu_kernel(const OpView& op) {
  return op.input(0).dtype == DType::f64 ? &run_newton_schulz<double> : &run_newton_schulz<float>;
}

// One matrix after the other has it.
uint64_t newton_schulz_workspace_bytes(const OpView& op) {
  uint64_t bytes = 0;
  for_sections(op.attributes<NewtonSchulzAttributes>(), MatrixBatch(op.input(0).shape),
               [&](const SectionMatrix& section) {
                 const bool is_double = op.input(0).dtype == DType::f64;
                 bytes =
                     std::max(bytes, is_double ? NewtonSchulzMemory<double>(nullptr, section).bytes
                                               : NewtonSchulzMemory<float>(nullptr, section).bytes);
               });
  return bytes;
}

}  // namespace troupe
