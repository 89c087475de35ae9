#include "ops/attention/cuda/attention_cudnn.h"

#include <cmath>
#include <map>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "base/error.h"
#include "ops/cuda/context.h"

// The frontend is some 60,000 lines; only this file includes it, without its JSON library.
#define CUDNN_FRONTEND_SKIP_JSON_LIB
#include <cudnn_frontend.h>

namespace troupe {
namespace {

namespace fe = cudnn_frontend;

constexpr uint64_t kScratchAlignment = 256;  // the arena promises less

// Names of a call's tensors.
enum Tensor : int64_t { kQ = 1, kK, kV, kOut, kLse, kDOut, kDQ, kDK, kDV };

// What one call works on: whole heads of whole groups, of some sequences.
struct Piece {
  int32_t batch;
  int32_t groups;
};

int64_t heads_per_group(const AttentionAttributes& a) {
  return a.heads / a.groups;
}

// cuDNN's workspace for the backward pass of a piece, measured with 9.19 on an H100 and rounded up:
// the gradients of scores in bf16, for tiles of 128 queries and 128 keys; D in fp32; and the
// gradients of keys and values of each query head.
uint64_t workspace_bytes(const AttentionAttributes& a, const Piece& piece) {
  const auto rows = static_cast<uint64_t>((int64_t{a.sequence} + 127) / 128 * 128);
  const auto heads = static_cast<uint64_t>(piece.batch * piece.groups * heads_per_group(a));
  const auto head_dim = static_cast<uint64_t>(a.head_dim);
  return heads * rows * (2 * rows + 4 * head_dim + 16) + (uint64_t{1} << 20);
}

// The largest divisor of `count` for which `fits` holds, at least 1.
template <class Fits>
int32_t largest_divisor(int32_t count, const Fits& fits) {
  for (int32_t part = count; part > 1; --part) {
    if (count % part == 0 && fits(part)) return part;
  }
  return 1;
}

Piece gradient_piece(const AttentionAttributes& a) {
  const auto fits = [&](const Piece& piece) {
    return workspace_bytes(a, piece) <= kAttentionPieceBytes;
  };
  const int32_t groups = largest_divisor(a.groups, [&](int32_t part) { return fits({1, part}); });
  if (groups < a.groups) return {1, groups};
  return {largest_divisor(a.batch, [&](int32_t part) { return fits({part, groups}); }), groups};
}

void check(const fe::error_t& status, const std::string& what) {
  if (status.is_good()) return;
  fe::error_t error = status;
  throw_failed("cuDNN " + std::to_string(cudnnGetVersion()) + ": " + what +
               " failed: " + error.get_message() + ".");
}

void check(cudnnStatus_t status, const std::string& what) {
  if (status == CUDNN_STATUS_SUCCESS) return;
  throw_failed("cuDNN: " + what + " failed: " + cudnnGetErrorString(status) + ".");
}

struct Plan {
  fe::graph::Graph graph;
  std::unordered_map<int64_t, void*> operands;
};

// Everything that a plan depends on.
using PlanKey =
    std::tuple<bool, int32_t, int32_t, int32_t, int32_t, int32_t, int32_t, double, int32_t>;

// cuDNN's handle and the plans of one context.
class Attention {
 public:
  Attention() { check(cudnnCreate(&handle_), "starting"); }
  ~Attention() { cudnnDestroy(handle_); }
  Attention(const Attention&) = delete;
  Attention& operator=(const Attention&) = delete;

  Plan& plan(const AttentionAttributes& a, const Piece& piece, bool gradient,
             uint64_t scratch_bytes) {
    Plan& plan = plans_[{gradient, piece.batch, piece.groups, a.sequence, a.heads, a.groups,
                         a.head_dim, a.scale, a.window}];
    if (plan.operands.empty()) build(a, piece, gradient, scratch_bytes, plan);
    return plan;
  }

  void run(Plan& plan, const CudaKernelArguments& args) {
    check(cudnnSetStream(handle_, args.stream), "choosing a stream");
    const auto address = reinterpret_cast<uintptr_t>(args.scratch);
    const auto up = (kScratchAlignment - address % kScratchAlignment) % kScratchAlignment;
    check(plan.graph.execute(handle_, plan.operands, args.scratch + up), "attention");
  }

 private:
  void build(const AttentionAttributes& a, const Piece& piece, bool gradient,
             uint64_t scratch_bytes, Plan& plan);

  cudnnHandle_t handle_ = nullptr;
  std::map<PlanKey, Plan> plans_;
};

void Attention::build(const AttentionAttributes& a, const Piece& piece, bool gradient,
                      uint64_t scratch_bytes, Plan& plan) {
  using Numbers = std::vector<int64_t>;
  fe::graph::Graph& graph = plan.graph;
  graph.set_io_data_type(fe::DataType_t::BFLOAT16)
      .set_intermediate_data_type(fe::DataType_t::FLOAT)
      .set_compute_data_type(fe::DataType_t::FLOAT);

  // [sequence in the batch, head, token, element] of rows of `width` elements, one for each token.
  const int64_t heads = piece.groups * heads_per_group(a);
  const int64_t qkv_width = int64_t{a.heads + 2 * a.groups} * a.head_dim;
  const int64_t out_width = int64_t{a.heads} * a.head_dim;
  const auto shape = [&](int64_t count, int64_t elements) {
    return Numbers{piece.batch, count, a.sequence, elements};
  };
  const auto strides = [&](int64_t width, int64_t elements) {
    return Numbers{a.sequence * width, elements, width, 1};
  };
  const auto input = [&](Tensor id, int64_t count, int64_t width, int64_t elements) {
    return graph.tensor(fe::graph::Tensor_attributes()
                            .set_uid(id)
                            .set_dim(shape(count, elements))
                            .set_stride(strides(width, elements)));
  };
  const auto output = [&](const auto& tensor, Tensor id, int64_t count, int64_t width,
                          int64_t elements) {
    tensor->set_output(true)
        .set_uid(id)
        .set_dim(shape(count, elements))
        .set_stride(strides(width, elements));
  };
  const auto visibility = [&](auto& attributes) {
    attributes.set_attn_scale(static_cast<float>(a.scale))
        .set_diagonal_alignment(fe::DiagonalAlignment_t::TOP_LEFT)
        .set_diagonal_band_right_bound(0);
    if (a.window > 0 && a.window < a.sequence) attributes.set_diagonal_band_left_bound(a.window);
  };

  const auto q = input(kQ, heads, qkv_width, a.head_dim);
  const auto k = input(kK, piece.groups, qkv_width, a.head_dim);
  const auto v = input(kV, piece.groups, qkv_width, a.head_dim);
  if (gradient) {
    const auto out = input(kOut, heads, out_width, a.head_dim);
    const auto d_out = input(kDOut, heads, out_width, a.head_dim);
    const auto lse = input(kLse, heads, a.heads, 1);
    lse->set_data_type(fe::DataType_t::FLOAT);
    fe::graph::SDPA_backward_attributes attributes;
    attributes.set_deterministic_algorithm(true);
    visibility(attributes);
    const auto [dq, dk, dv] = graph.sdpa_backward(q, k, v, out, d_out, lse, attributes);
    output(dq, kDQ, heads, qkv_width, a.head_dim);
    output(dk, kDK, piece.groups, qkv_width, a.head_dim);
    output(dv, kDV, piece.groups, qkv_width, a.head_dim);
  } else {
    fe::graph::SDPA_attributes attributes;
    attributes.set_generate_stats(true);
    visibility(attributes);
    const auto [out, lse] = graph.sdpa(q, k, v, attributes);
    output(out, kOut, heads, out_width, a.head_dim);
    output(lse, kLse, heads, a.heads, 1);
    lse->set_data_type(fe::DataType_t::FLOAT);
  }

  const std::string what = std::string(gradient ? "the gradient of attention" : "attention") +
                           " with " + std::to_string(heads) + " heads of " +
                           std::to_string(a.head_dim) + " elements in " +
                           std::to_string(piece.groups) + " groups, " + std::to_string(a.sequence) +
                           " tokens, window " + std::to_string(a.window);
  const auto limit = static_cast<int64_t>(scratch_bytes - kScratchAlignment);
  check(graph.validate(), what);
  check(graph.build_operation_graph(handle_), what);
  check(graph.create_execution_plans({fe::HeurMode_t::A}), what);
  graph.deselect_workspace_greater_than(limit);
  check(graph.check_support(handle_), what);
  check(graph.build_plans(handle_), what);
  int64_t workspace = 0;
  check(graph.get_workspace_size(workspace), what);
  if (workspace > limit) {
    throw_failed("cuDNN " + std::to_string(cudnnGetVersion()) + ": " + what + " wants " +
                 std::to_string(workspace) + " bytes of scratch memory; " + std::to_string(limit) +
                 " are planned for it.");
  }
  for (const int64_t id : {kQ, kK, kV, kOut, kLse}) plan.operands[id] = nullptr;
  if (gradient) {
    for (const int64_t id : {kDOut, kDQ, kDK, kDV}) plan.operands[id] = nullptr;
  }
}

// Addresses of query heads, keys and values of a piece that begins at sequence `b` of the batch and
// group `group`, in a tensor like qkv.
struct QkvAddresses {
  QkvAddresses(const AttentionAttributes& a, bf16* data, int64_t b, int64_t group) {
    const int64_t width = int64_t{a.heads + 2 * a.groups} * a.head_dim;
    bf16* const rows = data + b * a.sequence * width;
    q = rows + group * heads_per_group(a) * a.head_dim;
    k = rows + (a.heads + group) * a.head_dim;
    v = k + int64_t{a.groups} * a.head_dim;
  }
  bf16* q;
  bf16* k;
  bf16* v;
};

}  // namespace

bool cudnn_takes_attention(const AttentionAttributes& a, DType dtype) {
  constexpr uint64_t kLargestPiece = uint64_t{4} << 30;
  return dtype == DType::bf16 && a.probability == 0 && a.head_dim % 8 == 0 && a.head_dim <= 256 &&
         a.sequence > 1 && workspace_bytes(a, {1, 1}) <= kLargestPiece;
}

uint64_t cudnn_attention_scratch_bytes(const AttentionAttributes&) {
  return kScratchAlignment + (uint64_t{1} << 20);
}

uint64_t cudnn_attention_gradient_scratch_bytes(const AttentionAttributes& a) {
  return kScratchAlignment + workspace_bytes(a, gradient_piece(a));
}

void cudnn_attention(const CudaKernelArguments& args) {
  const auto& a = args.attributes->as<AttentionAttributes>();
  auto& attention = args.context->kept<Attention>();
  Plan& plan =
      attention.plan(a, {a.batch, a.groups}, /*gradient=*/false, cudnn_attention_scratch_bytes(a));
  const QkvAddresses qkv(a, const_cast<bf16*>(args.in<bf16>(0)), 0, 0);
  plan.operands[kQ] = qkv.q;
  plan.operands[kK] = qkv.k;
  plan.operands[kV] = qkv.v;
  plan.operands[kOut] = args.out<bf16>(0);
  plan.operands[kLse] = args.out<float>(1);
  attention.run(plan, args);
}

void cudnn_attention_gradient(const CudaKernelArguments& args) {
  const auto& a = args.attributes->as<AttentionAttributes>();
  auto& attention = args.context->kept<Attention>();
  const Piece piece = gradient_piece(a);
  Plan& plan =
      attention.plan(a, piece, /*gradient=*/true, cudnn_attention_gradient_scratch_bytes(a));
  auto* const d_out = const_cast<bf16*>(args.in<bf16>(0));
  auto* const out = const_cast<bf16*>(args.in<bf16>(2));
  auto* const lse = const_cast<float*>(args.in<float>(3));
  for (int64_t b = 0; b < a.batch; b += piece.batch) {
    for (int64_t group = 0; group < a.groups; group += piece.groups) {
      const QkvAddresses qkv(a, const_cast<bf16*>(args.in<bf16>(1)), b, group);
      const QkvAddresses d_qkv(a, args.out<bf16>(0), b, group);
      const int64_t head = b * a.sequence * a.heads + group * heads_per_group(a);
      plan.operands[kQ] = qkv.q;
      plan.operands[kK] = qkv.k;
      plan.operands[kV] = qkv.v;
      plan.operands[kOut] = out + head * a.head_dim;
      plan.operands[kLse] = lse + head;
      plan.operands[kDOut] = d_out + head * a.head_dim;
      plan.operands[kDQ] = d_qkv.q;
      plan.operands[kDK] = d_qkv.k;
      plan.operands[kDV] = d_qkv.v;
      attention.run(plan, args);
    }
  }
}

}  // namespace troupe
