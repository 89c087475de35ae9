#include "ops/attention/attention/attention_cuda.h"

#include <algorithm>

#include "base/error.h"

namespace troupe {
namespace {

constexpr int64_t kCudnnTile = 128;

int64_t whole_cudnn_tiles(int64_t rows) {
  return (rows + kCudnnTile - 1) / kCudnnTile * kCudnnTile;
}

// Of a key and its value, of one head.
int64_t head_elements(const AttentionShape& shape) {
  return shape.attributes.head_dim + shape.attributes.value_size();
}

// Of sums that are not the caller's: of one sequence.
uint64_t key_sum_elements(const AttentionShape& shape, const AttentionPiece& piece) {
  return static_cast<uint64_t>(shape.positions() * piece.groups * head_elements(shape));
}

uint64_t cudnn_gradient_scratch_bytes(const AttentionShape& shape) {
  const AttentionPiece piece = gradient_piece(shape);
  uint64_t bytes = kCudnnAlignment + align_for_cudnn(cudnn_gradient_workspace(shape, piece));
  if (!shape.wide_key_gradients && sees_keys_alone(shape, piece)) return bytes;
  bytes += key_part_elements(shape, piece) * sizeof(bf16);
  if (!shape.wide_key_gradients) bytes += key_sum_elements(shape, piece) * sizeof(float);
  return bytes;
}

void check_heads(const AttentionShape& shape) {
  if (std::max(shape.attributes.head_dim, shape.attributes.value_size()) <= 256) return;
  throw_bad_request(
      "Attention heads of more than 256 elements are not supported on GPUs yet. Compute on the "
      "CPU.");
}

bool cudnn_takes(const AttentionShape& shape) {
  const AttentionAttributes& a = shape.attributes;
  return is_half(shape.dtype) && a.probability == 0 && !shape.documents && a.head_dim % 8 == 0 &&
         a.value_size() % 8 == 0 && shape.chunk() > 1;
}

bool sm90_takes(const AttentionShape& shape, const DeviceTraits& device) {
  const AttentionAttributes& a = shape.attributes;
  return shape.dtype == DType::bf16 && a.probability == 0 && device.major() == 9 &&
         a.head_dim % 8 == 0 && a.head_dim <= 192 && a.value_size() % 8 == 0 &&
         a.value_size() <= 128;
}

// Of a shape that no fast kernel takes.
SlowKernel slow_attention(const AttentionShape& shape, const DeviceTraits& device) {
  const AttentionAttributes& a = shape.attributes;
  if (shape.dtype != DType::bf16) return SlowKernel::dtype;
  if (a.probability != 0) return SlowKernel::dropout;
  if (a.head_dim % 8 != 0 || a.value_size() % 8 != 0) return SlowKernel::head_size;
  if (device.major() != 9) return SlowKernel::compute_capability;
  return shape.documents ? SlowKernel::documents : SlowKernel::one_query;
}

const char* name_of_attention(AttentionVariant variant) {
  switch (variant) {
    case AttentionVariant::cudnn:
      return "cudnn";
    case AttentionVariant::sm90:
      return "sm90";
    case AttentionVariant::tiles:
      return "plain tiles";
  }
  return nullptr;
}

}  // namespace

AttentionVariant forward_attention_variant(const AttentionShape& shape,
                                           const DeviceTraits& device) {
  check_heads(shape);
  if (cudnn_takes(shape)) return AttentionVariant::cudnn;
  return sm90_takes(shape, device) ? AttentionVariant::sm90 : AttentionVariant::tiles;
}

AttentionVariant gradient_attention_variant(const AttentionShape& shape,
                                            const DeviceTraits& device) {
  // Ours is faster than cuDNN's deterministic one, which also stores the gradients of all scores
  // and takes as long with a window as without; but not for the first of the ranks that share a
  // sequence, of whose queries the last see most keys (docs/benchmarks/cuda.md).
  const int64_t window = shape.attributes.window;
  const bool hides_much = window > 0 && 3 * window <= shape.positions();
  const bool ours = shape.chunks.ranks == 1 || hides_much;
  if (ours && sm90_takes(shape, device)) return AttentionVariant::sm90;
  return forward_attention_variant(shape, device);
}

uint64_t attention_call_scratch_bytes(const AttentionShape&, AttentionVariant variant) {
  return variant == AttentionVariant::cudnn ? kCudnnAlignment + kCudnnForwardBytes : 0;
}

uint64_t attention_gradient_call_scratch_bytes(const AttentionShape& shape,
                                               AttentionVariant variant) {
  if (variant == AttentionVariant::cudnn) return cudnn_gradient_scratch_bytes(shape);
  if (variant == AttentionVariant::sm90) {
    return sm90_gradient_scratch(shape).end;
  }
  const AttentionAttributes& a = shape.attributes;
  return static_cast<uint64_t>(a.batch * shape.rows() * a.heads) *
         size_of(accumulation_dtype(shape.dtype));
}

int32_t sm90_heads_each(const AttentionShape& shape) {
  const AttentionAttributes& a = shape.attributes;
  // A GPU of 132 multiprocessors runs as many blocks at once. Documents may be long.
  const int64_t enough = shape.documents ? 1024 : 512;
  const int64_t blocks = (shape.positions() + kSm90BlockRows - 1) / kSm90BlockRows * a.batch;
  const bool hides = shape.documents || a.window > 0;
  for (int32_t each = hides ? a.heads / a.groups : 1; each > 1; --each) {
    if (a.heads / a.groups % each == 0 && blocks * (a.heads / each) >= enough) return each;
  }
  return 1;
}

Sm90Scratch sm90_gradient_scratch(const AttentionShape& shape) {
  const AttentionAttributes& a = shape.attributes;
  const auto rows = static_cast<uint64_t>(sm90_prepared_rows(shape));
  const auto columns = static_cast<uint64_t>(sm90_key_columns(a));
  Sm90Scratch parts;
  parts.dots = parts.lse + rows * sizeof(float);
  parts.d_q = parts.dots + rows * sizeof(float);
  parts.turns = parts.d_q + rows * columns * sizeof(float);
  // Of 64 rows and columns each, and one for all; rounded up to 256 bytes.
  const uint64_t turns = rows / kSm90TileRows * (columns / 64) + 1;
  parts.head_gradients = parts.turns + align_for_cudnn(turns * sizeof(int32_t));
  parts.end = parts.head_gradients;
  if (sm90_sums_parts(shape)) {
    parts.end +=
        static_cast<uint64_t>(a.batch * shape.positions() * a.heads / sm90_heads_each(shape)) *
        static_cast<uint64_t>(head_elements(shape)) * sizeof(bf16);
  }
  return parts;
}

KernelChoice choose_attention(const OpView& op, const DeviceTraits& device,
                              const AttentionShape& shape, AttentionVariant variant,
                              SelectAttention select, uint64_t scratch) {
  KernelChoice choice = make_choice(op, device, name_of_attention(variant), nullptr);
  if (select != nullptr) choice.function = select(op, variant);
  if (variant == AttentionVariant::tiles) choice.slow = slow_attention(shape, device);
  choice.needs.scratch = scratch;
  return choice;
}

uint64_t cudnn_gradient_workspace(const AttentionShape& shape, const AttentionPiece& piece) {
  const AttentionAttributes& a = shape.attributes;
  const int64_t heads = piece.batch * piece.groups * (a.heads / a.groups);
  const int64_t queries = whole_cudnn_tiles(piece.queries);
  const int64_t keys = whole_cudnn_tiles(piece.keys);
  return static_cast<uint64_t>(
      heads * (2 * queries * keys + 4 * queries + 2 * keys * head_elements(shape)) +
      (int64_t{64} << 10));
}

AttentionPiece gradient_piece(const AttentionShape& shape) {
  const AttentionAttributes& a = shape.attributes;
  const auto fits = [&](const AttentionPiece& piece) {
    return cudnn_gradient_workspace(shape, piece) <= kAttentionPieceBytes;
  };
  AttentionPiece piece{a.batch, a.groups, shape.chunk(), shape.positions()};
  if (a.window > 0) piece.keys = std::min(piece.keys, shape.chunk() + a.window - 1);
  for (piece.batch = a.batch; piece.batch > 0; --piece.batch) {
    if (a.batch % piece.batch == 0 && fits(piece)) return piece;
  }
  piece.batch = 1;
  for (piece.groups = a.groups; piece.groups > 0; --piece.groups) {
    if (a.groups % piece.groups == 0 && fits(piece)) return piece;
  }
  piece.groups = 1;
  while (piece.queries > kCudnnTile && !fits(piece)) {
    piece.queries = whole_cudnn_tiles(piece.queries) - kCudnnTile;
  }
  return piece;
}

bool sees_keys_alone(const AttentionShape& shape, const AttentionPiece& piece) {
  return piece.queries == shape.positions();
}

uint64_t key_part_elements(const AttentionShape& shape, const AttentionPiece& piece) {
  return static_cast<uint64_t>(piece.batch * piece.keys * piece.groups * head_elements(shape));
}

}  // namespace troupe
