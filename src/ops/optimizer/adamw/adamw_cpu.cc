#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <type_traits>

#include "base/random.h"
#include "ops/cpu/vector.h"
#include "ops/optimizer/adamw/adamw.h"
#include "ops/optimizer/adamw/moment_blocks.h"
#include "ops/optimizer/parameter_dtype.h"

namespace troupe {
namespace {

// Elements per chunk.
constexpr int64_t kAdamWChunkElements = 16384;

// The scalars of one update, as they multiply in the loop.
template <class A>
struct AdamWFactors {
  A clip;
  A keep;               // 1 - learning_rate * weight_decay
  A first_weight;       // 1 - beta1
  A second_decay;       // beta2
  A second_weight;      // 1 - beta2
  A inverse_root_bias;  // 1 / sqrt(1 - beta2^step)
  A step_size;          // learning_rate / (1 - beta1^step)
  A epsilon;

  explicit AdamWFactors(const KernelArguments& args) {
    const auto& attributes = args.attributes->as<AdamWAttributes>();
    const double learning_rate = args.in<double>(5)[0];
    const double weight_decay = attributes.decay ? args.in<double>(6)[0] : 0.0;
    const auto step = static_cast<double>(args.in<int64_t>(7)[0]);
    clip = static_cast<A>(args.in<double>(8)[0]);
    keep = static_cast<A>(1 - learning_rate * weight_decay);
    first_weight = static_cast<A>(1 - attributes.beta1);
    second_decay = static_cast<A>(attributes.beta2);
    second_weight = static_cast<A>(1 - attributes.beta2);
    inverse_root_bias = static_cast<A>(1 / std::sqrt(1 - std::pow(attributes.beta2, step)));
    step_size = static_cast<A>(learning_rate / (1 - std::pow(attributes.beta1, step)));
    epsilon = static_cast<A>(attributes.epsilon);
  }
};

// By value, so that the loop need not fear that a store changes a factor.
template <class A>
void update_adamw_range(const AdamWFactors<A> f, const A* gradient, A* parameter, A* exp_avg,
                        A* exp_avg_sq, int64_t n) {
  TROUPE_INDEPENDENT
  for (int64_t i = 0; i < n; ++i) {
    const A g = gradient[i] * f.clip;
    const A m = exp_avg[i] + f.first_weight * (g - exp_avg[i]);
    const A v = f.second_decay * exp_avg_sq[i] + f.second_weight * g * g;
    exp_avg[i] = m;
    exp_avg_sq[i] = v;
    parameter[i] =
        parameter[i] * f.keep - f.step_size * m / (std::sqrt(v) * f.inverse_root_bias + f.epsilon);
  }
}

// Elements that are widened at a time, where something is narrow.
constexpr int64_t kAdamWBlockElements = 512;
static_assert(kAdamWBlockElements % kMomentBlock == 0);

// What `n` codes of a block stand for.
void load_codes(const f8e4m3* codes, uint8_t s, float* out, int64_t n) {
  const float scale = moment_scale(s);
  TROUPE_INDEPENDENT
  for (int64_t i = 0; i < n; ++i) out[i] = codes[i] * scale;
}

// One block. With `is_root` the elements are not negative, and positive ones stay positive.
uint8_t store_codes(const float* in, const uint32_t* draws, bool is_root, f8e4m3* codes,
                    int64_t n) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    largest = std::max(largest, std::bit_cast<uint32_t>(in[i]) & 0x7fffffffU);
  }
  const uint8_t s = moment_scale_of(largest);
  const float inverse = inverse_moment_scale(s);
  TROUPE_INDEPENDENT
  for (int64_t i = 0; i < n; ++i) {
    const float magnitude = std::abs(in[i]);
    const uint8_t drawn = draw_e4m3(magnitude * inverse, draws[i]);
    const uint8_t least = is_root && magnitude > 0.0F ? 1 : 0;
    const uint8_t sign = std::signbit(in[i]) ? 0x80 : 0;
    codes[i].bits = static_cast<uint8_t>((drawn < least ? least : drawn) | sign);
  }
  return s;
}

// A moment, or the gradient: tensors that are computed with in A and kept in A or in less.
template <class A>
class NarrowTensor {
 public:
  // Not f8e4m3.
  NarrowTensor(const TensorView& view, int64_t first)
      : data_(static_cast<std::byte*>(view.data) +
              static_cast<size_t>(first) * size_of(view.dtype)),
        dtype_(view.dtype) {}
  // A moment, with its scales where it has any.
  NarrowTensor(const TensorView& view, uint8_t* scales, MomentDraw draw, const uint32_t* draws)
      : data_(static_cast<std::byte*>(view.data)),
        dtype_(view.dtype),
        scales_(scales),
        columns_(view.shape.back()),
        is_root_(draw == MomentDraw::square),
        draws_(draws) {}

  bool is_wide() const { return dtype_ == dtype_of<A>; }

  // Elements [i, i + n) in A: the tensor's own memory, or `copy`. A stretch of f8e4m3 begins with a
  // block and stays within a vector.
  A* read(int64_t i, int64_t n, A* copy) const {
    if (is_wide()) return at<A>(i);
    if constexpr (std::is_same_v<A, float>) {
      if (dtype_ == DType::bf16) {
        load(at<bf16>(i), copy, n);
      } else {
        for_blocks(i, n, [&](int64_t begin, int64_t count, uint8_t& s) {
          load_codes(at<f8e4m3>(i + begin), s, copy + begin, count);
        });
        for (int64_t k = 0; is_root_ && k < n; ++k) copy[k] *= copy[k];
      }
    }
    return copy;
  }

  // Stores what read() returned.
  void write(int64_t i, int64_t n, A* copy) const {
    if constexpr (std::is_same_v<A, float>) {
      if (is_wide()) return;
      if (dtype_ == DType::bf16) {
        store(copy, at<bf16>(i), n);
        return;
      }
      for (int64_t k = 0; is_root_ && k < n; ++k) copy[k] = std::sqrt(copy[k]);
      for_blocks(i, n, [&](int64_t begin, int64_t count, uint8_t& s) {
        s = store_codes(copy + begin, draws_, is_root_, at<f8e4m3>(i + begin), count);
      });
    }
  }

 private:
  template <class T>
  T* at(int64_t i) const {
    return reinterpret_cast<T*>(data_) + i;
  }
  template <class Body>
  void for_blocks(int64_t i, int64_t n, const Body& body) const {
    uint8_t* s = scales_ + i / columns_ * moment_blocks(columns_) + i % columns_ / kMomentBlock;
    for (int64_t begin = 0; begin < n; begin += kMomentBlock) {
      body(begin, std::min(kMomentBlock, n - begin), *s++);
    }
  }

  std::byte* data_;
  DType dtype_;
  uint8_t* scales_ = nullptr;
  int64_t columns_ = 0;
  bool is_root_ = false;
  const uint32_t* draws_ = nullptr;
};

// The 20 random bits of each place in a block.
struct MomentDraws {
  std::array<uint32_t, kMomentBlock> bits;

  MomentDraws(int64_t step, MomentDraw which) {
    fill_random_words(static_cast<uint64_t>(step), RandomStream::moments,
                      static_cast<uint32_t>(which), 0, kMomentBlock / 4, bits.data());
    for (uint32_t& word : bits) word >>= 12;
  }
};

template <class T>
void run_adamw(const KernelArguments& args) {
  using A = accumulation_t<T>;
  if (args.in<int32_t>(9)[0] != 0) return;
  const AdamWFactors<A> factors(args);
  const int64_t first = args.attributes->as<AdamWAttributes>().first;
  // Without a parameter, outputs begin with the moments.
  const bool has_parameter = args.in<T>(0) != nullptr;
  T* parameter = has_parameter ? args.out<T>(0) + first : nullptr;
  const int moments = has_parameter ? 1 : 0;
  A* master;
  int next_output = moments + 2;
  if constexpr (std::is_same_v<T, A>) {
    master = parameter;
  } else {
    master = args.out<A>(next_output++);
  }
  const bool has_blocks = args.inputs.size() > 10;
  const auto scales = [&](int input) -> uint8_t* {
    if (!has_blocks || args.in<uint8_t>(input) == nullptr) return nullptr;
    return args.out<uint8_t>(next_output++);
  };
  const int64_t step = args.in<int64_t>(7)[0];
  const MomentDraws mean_draws(step, MomentDraw::mean);
  const MomentDraws square_draws(step, MomentDraw::square);
  const NarrowTensor<A> gradient(args.input(1), first);
  const NarrowTensor<A> means(args.output(moments), scales(10), MomentDraw::mean,
                              mean_draws.bits.data());
  const NarrowTensor<A> squares(args.output(moments + 1), scales(11), MomentDraw::square,
                                square_draws.bits.data());

  // Elements that lie within one vector where there are blocks.
  const auto update = [&](int64_t begin, int64_t end) {
    const bool wide = gradient.is_wide() && means.is_wide() && squares.is_wide();
    const int64_t size = wide ? kAdamWChunkElements : kAdamWBlockElements;
    A copies[3][kAdamWBlockElements];
    for (int64_t i = begin; i < end; i += size) {
      const int64_t n = std::min(size, end - i);
      A* mean = means.read(i, n, copies[0]);
      A* square = squares.read(i, n, copies[1]);
      update_adamw_range(factors, gradient.read(i, n, copies[2]), master + i, mean, square, n);
      means.write(i, n, mean);
      squares.write(i, n, square);
    }
    if constexpr (!std::is_same_v<T, A>) {
      if (has_parameter) store(master + begin, parameter + begin, end - begin);
    }
  };
  const Shape& shape = args.output(moments).shape;
  if (!has_blocks) {
    args.pool->parallel_ranges(shape.elements(), kAdamWChunkElements,
                               [&](int64_t begin, int64_t end, int) { update(begin, end); });
    return;
  }
  const int64_t columns = shape.back();
  args.pool->parallel_ranges(shape.elements() / std::max<int64_t>(1, columns), row_grain(columns),
                             [&](int64_t begin, int64_t end, int) {
                               for (int64_t row = begin; row < end; ++row) {
                                 update(row * columns, (row + 1) * columns);
                               }
                             });
}

template <class T>
struct AdamWKernel {
  static void run(const KernelArguments& args) { run_adamw<T>(args); }
};

}  // namespace

CpuKernel adamw_cpu_kernel(const OpView& op) {
  return select_float_kernel<AdamWKernel>(parameter_dtype(op, 0));
}

}  // namespace troupe
