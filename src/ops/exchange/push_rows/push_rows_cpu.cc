#include <algorithm>

#include "ops/cpu/partial_rows.h"
#include "ops/exchange/push_rows/push_rows.h"

namespace troupe {
namespace {

// Bytes that one piece of work copies, at least.
constexpr int64_t kPushGrain = int64_t{1} << 16;

int64_t row_bytes_of(const TensorView& tensor) {
  return tensor.shape[1] * static_cast<int64_t>(size_of(tensor.dtype));
}

int64_t bytes_of(const TensorView& tensor) {
  return tensor.shape.elements() * static_cast<int64_t>(size_of(tensor.dtype));
}

Block bytes_at(void* data, int64_t offset, int64_t bytes) {
  return {.data = static_cast<std::byte*>(data) + offset, .bytes = bytes};
}

template <class T>
void sum_windows(const KernelArguments& args, const Block& window, const TensorView& x) {
  const int64_t tokens = x.shape[0];
  const int64_t width = x.shape[1];
  const auto* rows = static_cast<const T*>(window.data);
  sum_partial_rows(
      *args.pool, args.in<int32_t>(0), tokens, static_cast<int32_t>(args.input(0).shape[1]), width,
      x.as<T>(), [=](int32_t rank, int32_t slot) { return rows + (rank * tokens + slot) * width; });
}

}  // namespace

// Every rank begins with itself and goes on with the one after it, so that no two write to the same
// rank at first.
void push_rows_cpu(const KernelArguments& args) {
  Communicator& communicator = *args.communicator;
  const auto* slots = args.in<int32_t>(0);
  const TensorView& counts = args.input(1);
  const int64_t tokens = args.input(0).shape[0];
  const int64_t ranks = args.input(0).shape[1];
  const int64_t here = communicator.rank();
  auto* windows = reinterpret_cast<Block*>(args.workspace);
  for (size_t i = 0; i < args.outputs.size(); ++i) {
    windows[i] = {.data = args.outputs[i].data, .bytes = bytes_of(args.outputs[i])};
  }
  communicator.open({.op = args.op, .index = args.op_index}, {windows, args.outputs.size()});
  for (int64_t rank = 0; rank < ranks; ++rank) {
    constexpr int64_t kCount = sizeof(int32_t);
    communicator.put(static_cast<int>(rank), 0, 0, bytes_at(counts.data, rank * kCount, kCount));
  }
  for (size_t j = 0; j + 2 < args.inputs.size(); ++j) {
    const TensorView& x = args.inputs[j + 2];
    const int64_t row_bytes = row_bytes_of(x);
    const int64_t grain = std::max<int64_t>(1, kPushGrain / row_bytes);
    args.pool->parallel_ranges(tokens, grain, [&](int64_t begin, int64_t end, int) {
      for (int64_t step = 0; step < ranks; ++step) {
        const int64_t rank = (here + step) % ranks;
        for (int64_t token = begin; token < end; ++token) {
          const int32_t slot = slots[token * ranks + rank];
          if (slot < 0) continue;
          communicator.put(static_cast<int>(rank), j + 1, slot * row_bytes,
                           bytes_at(x.data, token * row_bytes, row_bytes));
        }
      }
    });
  }
  communicator.close();
}

void push_rows_back_cpu(const KernelArguments& args) {
  Communicator& communicator = *args.communicator;
  const auto* received = args.in<int32_t>(2);
  const int64_t tokens = args.input(0).shape[0];
  const int64_t ranks = args.input(0).shape[1];
  const int64_t here = communicator.rank();
  const size_t tensors = args.outputs.size();
  auto* windows = reinterpret_cast<Block*>(args.workspace);
  std::byte* memory = args.workspace + tensors * sizeof(Block);
  for (size_t j = 0; j < tensors; ++j) {
    windows[j] = {.data = memory, .bytes = bytes_of(args.inputs[j + 3])};
    memory += windows[j].bytes;
  }
  communicator.open({.op = args.op, .index = args.op_index}, {windows, tensors});
  for (size_t j = 0; j < tensors; ++j) {
    const TensorView& y = args.inputs[j + 3];
    const int64_t row_bytes = row_bytes_of(y);
    for (int64_t step = 0; step < ranks; ++step) {
      const int64_t rank = (here + step) % ranks;
      args.pool->parallel_ranges(
          received[rank] * row_bytes, kPushGrain, [&](int64_t begin, int64_t end, int) {
            communicator.put(static_cast<int>(rank), j, begin,
                             bytes_at(y.data, rank * tokens * row_bytes + begin, end - begin));
          });
    }
  }
  communicator.close();
  for (size_t j = 0; j < tensors; ++j) {
    const TensorView& x = args.outputs[j];
    switch (x.dtype) {
      case DType::f64:
        sum_windows<double>(args, windows[j], x);
        break;
      case DType::f32:
        sum_windows<float>(args, windows[j], x);
        break;
      case DType::f16:
        sum_windows<f16>(args, windows[j], x);
        break;
      default:
        sum_windows<bf16>(args, windows[j], x);
        break;
    }
  }
}

}  // namespace troupe
