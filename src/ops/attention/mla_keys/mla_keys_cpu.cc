#include <algorithm>

#include "ops/attention/mla_keys/mla_keys.h"
#include "ops/attention/rope/turn_pairs.h"
#include "ops/cpu/vector.h"
#include "program/kernel.h"

namespace troupe {
namespace {

PairLayout mla_pair_layout(const MlaKeysAttributes& attributes) {
  return {.dim = attributes.rotary_dim, .interleaved = attributes.interleaved};
}

template <class T>
struct MlaKeysKernel {
  static void run(const KernelArguments& args) {
    using A = accumulation_t<T>;
    const auto attributes = args.attributes->as<MlaKeysAttributes>();
    const T* key_values = args.in<T>(0);
    const T* shared_keys = args.in<T>(1);
    const A* table = args.in<A>(2);
    T* rows = args.out<T>(0);
    const int64_t plain = attributes.plain_dim;
    const int64_t rotary = attributes.rotary_dim;
    const int64_t values = attributes.value_dim;
    const PairLayout layout = mla_pair_layout(attributes);
    const auto make_rows = [=](int64_t begin, int64_t end, int) {
      for (int64_t row = begin; row < end; ++row) {
        const A* angles = table + row % attributes.sequence * rotary;
        const T* kv = key_values + row * attributes.projected_size();
        const T* shared = shared_keys + row * rotary;
        T* key = rows + row * attributes.row_size();
        T* value = key + attributes.key_size();
        for (int64_t head = 0; head < attributes.heads; ++head) {
          std::copy_n(kv, plain, key);
          turn_pairs(shared, angles, A(1), layout, key + plain);
          std::copy_n(kv + plain, values, value);
          kv += plain + values;
          key += plain + rotary;
          value += values;
        }
      }
    };
    args.pool->parallel_ranges(args.input(0).shape[0], row_grain(attributes.row_size()), make_rows);
  }
};

template <class T>
struct MlaKeysGradientKernel {
  static void run(const KernelArguments& args) {
    using A = accumulation_t<T>;
    const auto attributes = args.attributes->as<MlaKeysAttributes>();
    const T* d_rows = args.in<T>(0);
    const A* table = args.in<A>(1);
    T* d_key_values = args.out<T>(0);
    T* d_shared_keys = args.out<T>(1);
    const int64_t plain = attributes.plain_dim;
    const int64_t rotary = attributes.rotary_dim;
    const int64_t values = attributes.value_dim;
    const auto split_rows = [=](int64_t begin, int64_t end, int) {
      for (int64_t row = begin; row < end; ++row) {
        const A* angles = table + row % attributes.sequence * rotary;
        const T* d_keys = d_rows + row * attributes.row_size();
        const T* d_value = d_keys + attributes.key_size();
        T* d_kv = d_key_values + row * attributes.projected_size();
        for (int64_t head = 0; head < attributes.heads; ++head) {
          std::copy_n(d_keys + head * (plain + rotary), plain, d_kv);
          std::copy_n(d_value, values, d_kv + plain);
          d_value += values;
          d_kv += plain + values;
        }
        turn_sum_back(d_keys + plain, angles, attributes, d_shared_keys + row * rotary);
      }
    };
    args.pool->parallel_ranges(args.input(0).shape[0], row_grain(attributes.row_size()),
                               split_rows);
  }

 private:
  // Of the turned parts of all heads' keys, the first at `d_keys`: the sum, turned back.
  static void turn_sum_back(const T* d_keys, const accumulation_t<T>* angles,
                            const MlaKeysAttributes& attributes, T* d_shared) {
    using A = accumulation_t<T>;
    const PairLayout layout = mla_pair_layout(attributes);
    const int64_t step = layout.step();
    const int64_t partner = layout.partner();
    for (int64_t i = 0; i < layout.pairs(); ++i) {
      A first = 0;
      A second = 0;
      for (int64_t head = 0; head < attributes.heads; ++head) {
        const T* d_key = d_keys + head * attributes.key_dim() + i * step;
        first += widen(d_key[0]);
        second += widen(d_key[partner]);
      }
      const A cosine = angles[2 * i];
      const A sine = angles[2 * i + 1];
      d_shared[i * step] = T(first * cosine + second * sine);
      d_shared[i * step + partner] = T(second * cosine - first * sine);
    }
  }
};

}  // namespace

CpuKernel mla_keys_cpu_kernel(const OpView& op) {
  return select_float_kernel<MlaKeysKernel>(op.output(0).dtype);
}

CpuKernel mla_keys_gradient_cpu_kernel(const OpView& op) {
  return select_float_kernel<MlaKeysGradientKernel>(op.output(0).dtype);
}

}  // namespace troupe
