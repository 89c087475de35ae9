#include <algorithm>

#include "ops/attention/mla_rows/mla_rows.h"
#include "ops/attention/rope/turn_pairs.h"
#include "ops/cpu/vector.h"
#include "program/kernel.h"

namespace troupe {
namespace {

PairLayout mla_pair_layout(const MlaRowsAttributes& attributes) {
  return {.dim = attributes.rotary_dim, .interleaved = attributes.interleaved};
}

template <class T>
struct MlaRowsKernel {
  static void run(const KernelArguments& args) {
    using A = accumulation_t<T>;
    const auto attributes = args.attributes->as<MlaRowsAttributes>();
    const T* queries = args.in<T>(0);
    const T* key_values = args.in<T>(1);
    const T* shared_keys = args.in<T>(2);
    const A* table = args.in<A>(3);
    T* rows = args.out<T>(0);
    const int64_t plain = attributes.plain_dim;
    const int64_t rotary = attributes.rotary_dim;
    const int64_t values = attributes.value_dim;
    const PairLayout layout = mla_pair_layout(attributes);
    const auto make_rows = [=](int64_t begin, int64_t end, int) {
      for (int64_t row = begin; row < end; ++row) {
        const A* angles = table + row % attributes.sequence * rotary;
        const T* q = queries + row * attributes.query_size();
        const T* kv = key_values + row * attributes.key_value_size();
        const T* shared = shared_keys + row * rotary;
        T* query = rows + row * attributes.row_size();
        T* key = query + attributes.query_size();
        T* value = key + attributes.query_size();
        for (int64_t head = 0; head < attributes.heads; ++head) {
          std::copy_n(q, plain, query);
          turn_pairs(q + plain, angles, A(1), layout, query + plain);
          std::copy_n(kv, plain, key);
          turn_pairs(shared, angles, A(1), layout, key + plain);
          std::copy_n(kv + plain, values, value);
          q += plain + rotary;
          kv += plain + values;
          query += plain + rotary;
          key += plain + rotary;
          value += values;
        }
      }
    };
    args.pool->parallel_ranges(args.input(0).shape[0], row_grain(attributes.row_size()), make_rows);
  }
};

template <class T>
struct MlaRowsGradientKernel {
  static void run(const KernelArguments& args) {
    using A = accumulation_t<T>;
    const auto attributes = args.attributes->as<MlaRowsAttributes>();
    const T* d_rows = args.in<T>(0);
    const A* table = args.in<A>(1);
    T* d_queries = args.out<T>(0);
    T* d_key_values = args.out<T>(1);
    T* d_shared_keys = args.out<T>(2);
    const int64_t plain = attributes.plain_dim;
    const int64_t rotary = attributes.rotary_dim;
    const int64_t values = attributes.value_dim;
    const PairLayout layout = mla_pair_layout(attributes);
    const auto split_rows = [=](int64_t begin, int64_t end, int) {
      for (int64_t row = begin; row < end; ++row) {
        const A* angles = table + row % attributes.sequence * rotary;
        const T* d_query = d_rows + row * attributes.row_size();
        const T* d_keys = d_query + attributes.query_size();
        const T* d_value = d_keys + attributes.query_size();
        T* d_q = d_queries + row * attributes.query_size();
        T* d_kv = d_key_values + row * attributes.key_value_size();
        for (int64_t head = 0; head < attributes.heads; ++head) {
          std::copy_n(d_query, plain, d_q);
          turn_pairs(d_query + plain, angles, A(-1), layout, d_q + plain);
          std::copy_n(d_keys + head * (plain + rotary), plain, d_kv);
          std::copy_n(d_value, values, d_kv + plain);
          d_query += plain + rotary;
          d_q += plain + rotary;
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
                            const MlaRowsAttributes& attributes, T* d_shared) {
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

CpuKernel mla_rows_cpu_kernel(const OpView& op) {
  return select_float_kernel<MlaRowsKernel>(op.output(0).dtype);
}

CpuKernel mla_rows_gradient_cpu_kernel(const OpView& op) {
  return select_float_kernel<MlaRowsGradientKernel>(op.output(0).dtype);
}

}  // namespace troupe
