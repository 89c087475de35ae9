#include "ops/attention/cuda/attention_cudnn.h"

#include <algorithm>
#include <fmt/format.h>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <unordered_map>

#include "base/error.h"
#include "ops/attention/cuda/key_gradients.h"
#include "ops/cuda/context.h"

// The frontend is some 60,000 lines; only this file includes it, without its JSON library.
#define CUDNN_FRONTEND_SKIP_JSON_LIB
#include <cudnn_frontend.h>

namespace troupe {
namespace {

namespace fe = cudnn_frontend;

constexpr uint64_t kScratchAlignment = 256;  // the arena promises less
constexpr int64_t kTile = 128;
constexpr uint64_t kForwardWorkspaceBytes = uint64_t{64} << 10;  // cuDNN 9.19 wants 256

// Names of a call's tensors.
enum Tensor : int64_t { kQ = 1, kK, kV, kOut, kLse, kDOut, kDQ, kDK, kDV };

// What one call works on: whole groups of heads, of some sequences; and so many queries, with the
// last `keys` keys that they see.
struct Piece {
  int32_t batch = 1;
  int32_t groups = 1;
  int32_t queries = 1;
  int32_t keys = 1;
};

int64_t heads_per_group(const AttentionAttributes& a) {
  return a.heads / a.groups;
}

int64_t qkv_width(const AttentionAttributes& a) {
  return int64_t{a.heads + 2 * a.groups} * a.head_dim;
}

uint64_t align(uint64_t bytes) {
  return (bytes + kScratchAlignment - 1) / kScratchAlignment * kScratchAlignment;
}

int64_t whole_tiles(int64_t rows) {
  return (rows + kTile - 1) / kTile * kTile;
}

// cuDNN 9.19's workspace for the backward pass of a piece, rounded up a little: the gradients of
// scores in bf16, in whole tiles; D in fp32; with several heads to a group, the gradients of keys
// and values of each head in bf16.
uint64_t workspace_bytes(const AttentionAttributes& a, const Piece& piece) {
  const int64_t heads = piece.batch * piece.groups * heads_per_group(a);
  const int64_t queries = whole_tiles(piece.queries);
  const int64_t keys = whole_tiles(piece.keys);
  return static_cast<uint64_t>(heads * (2 * queries * keys + 4 * queries + 4 * keys * a.head_dim) +
                               (int64_t{64} << 10));
}

// The largest piece of the backward pass that keeps to the limit, or the smallest there is. Its
// keys are those that the last queries see.
Piece gradient_piece(const AttentionAttributes& a) {
  const auto fits = [&](const Piece& piece) {
    return workspace_bytes(a, piece) <= kAttentionPieceBytes;
  };
  Piece piece{a.batch, a.groups, a.sequence, a.sequence};
  for (piece.batch = a.batch; piece.batch > 0; --piece.batch) {
    if (a.batch % piece.batch == 0 && fits(piece)) return piece;
  }
  piece.batch = 1;
  for (piece.groups = a.groups; piece.groups > 0; --piece.groups) {
    if (a.groups % piece.groups == 0 && fits(piece)) return piece;
  }
  piece.groups = 1;
  piece.queries = static_cast<int32_t>(whole_tiles(a.sequence) - kTile);
  while (piece.queries > kTile && !fits(piece)) piece.queries -= kTile;
  return piece;
}

// Of the gradients of keys and values, summed over blocks of queries.
uint64_t key_gradient_elements(const AttentionAttributes& a, const Piece& piece) {
  return piece.queries == a.sequence
             ? 0
             : static_cast<uint64_t>(a.sequence) * 2 * static_cast<uint64_t>(piece.groups) *
                   static_cast<uint64_t>(a.head_dim);
}

void check(const fe::error_t& status, const std::string& what) {
  if (status.is_good()) return;
  fe::error_t error = status;
  throw_failed(
      fmt::format("cuDNN {}: {} failed: {}.", cudnnGetVersion(), what, error.get_message()));
}

void check(cudnnStatus_t status, const std::string& what) {
  if (status == CUDNN_STATUS_SUCCESS) return;
  throw_failed("cuDNN: " + what + " failed: " + cudnnGetErrorString(status) + ".");
}

struct Plan {
  fe::graph::Graph graph;
  std::unordered_map<int64_t, void*> operands;
};

// Where the heads of a piece begin in a tensor like qkv.
struct QkvAddresses {
  bf16* q = nullptr;
  bf16* k = nullptr;
  bf16* v = nullptr;
};

QkvAddresses addresses(const AttentionAttributes& a, bf16* data, int64_t b, int64_t group,
                       int64_t first_query, int64_t first_key) {
  bf16* const rows = data + b * a.sequence * qkv_width(a);
  bf16* const key_rows = rows + first_key * qkv_width(a);
  return {rows + first_query * qkv_width(a) + group * heads_per_group(a) * a.head_dim,
          key_rows + (a.heads + group) * a.head_dim,
          key_rows + (a.heads + a.groups + group) * a.head_dim};
}

// cuDNN's handle, and the plans of one context.
class Attention {
 public:
  Attention() { check(cudnnCreate(&handle_), "starting"); }
  ~Attention() { cudnnDestroy(handle_); }
  Attention(const Attention&) = delete;
  Attention& operator=(const Attention&) = delete;

  // `workspace` bytes are there for it.
  Plan& plan(const AttentionAttributes& a, const Piece& piece, bool gradient, uint64_t workspace) {
    Plan& plan = plans_[{gradient, piece.batch, piece.groups, piece.queries, piece.keys, a.sequence,
                         a.heads, a.groups, a.head_dim, a.scale, a.window}];
    if (plan.operands.empty()) build(a, piece, gradient, static_cast<int64_t>(workspace), plan);
    return plan;
  }

  void run(Plan& plan, CUstream_st* stream, std::byte* workspace) {
    check(cudnnSetStream(handle_, stream), "choosing a stream");
    check(plan.graph.execute(handle_, plan.operands, workspace), "attention");
  }

 private:
  // Everything that a plan depends on.
  using Key = std::tuple<bool, int32_t, int32_t, int32_t, int32_t, int32_t, int32_t, int32_t,
                         int32_t, double, int32_t>;

  void build(const AttentionAttributes& a, const Piece& piece, bool gradient, int64_t limit,
             Plan& plan);

  cudnnHandle_t handle_ = nullptr;
  std::map<Key, Plan> plans_;
};

void Attention::build(const AttentionAttributes& a, const Piece& piece, bool gradient,
                      int64_t limit, Plan& plan) {
  fe::graph::Graph& graph = plan.graph;
  graph.set_io_data_type(fe::DataType_t::BFLOAT16)
      .set_intermediate_data_type(fe::DataType_t::FLOAT)
      .set_compute_data_type(fe::DataType_t::FLOAT);

  // [sequence of the batch, head, token, element]; a token's row has `width` elements.
  const auto describe = [&](const std::shared_ptr<fe::graph::Tensor_attributes>& tensor, Tensor id,
                            int64_t heads, int64_t tokens, int64_t elements, int64_t width) {
    tensor->set_uid(id)
        .set_dim({piece.batch, heads, tokens, elements})
        .set_stride({a.sequence * width, elements, width, 1});
  };
  const auto input = [&](auto... description) {
    auto tensor = graph.tensor(fe::graph::Tensor_attributes());
    describe(tensor, description...);
    return tensor;
  };
  const auto output = [&](const auto& tensor, auto... description) {
    tensor->set_output(true);
    describe(tensor, description...);
  };
  const auto visibility = [&](auto& attributes) {
    attributes.set_attn_scale(static_cast<float>(a.scale))
        .set_diagonal_alignment(piece.queries == piece.keys ? fe::DiagonalAlignment_t::TOP_LEFT
                                                            : fe::DiagonalAlignment_t::BOTTOM_RIGHT)
        .set_diagonal_band_right_bound(0);
    if (a.window > 0 && a.window < piece.keys) attributes.set_diagonal_band_left_bound(a.window);
  };

  const int64_t heads = piece.groups * heads_per_group(a);
  const int64_t d = a.head_dim;
  const int64_t out_width = a.heads * d;
  const auto q = input(kQ, heads, piece.queries, d, qkv_width(a));
  const auto k = input(kK, piece.groups, piece.keys, d, qkv_width(a));
  const auto v = input(kV, piece.groups, piece.keys, d, qkv_width(a));
  if (gradient) {
    const auto out = input(kOut, heads, piece.queries, d, out_width);
    const auto d_out = input(kDOut, heads, piece.queries, d, out_width);
    const auto lse = input(kLse, heads, piece.queries, int64_t{1}, int64_t{a.heads});
    lse->set_data_type(fe::DataType_t::FLOAT);
    fe::graph::SDPA_backward_attributes attributes;
    attributes.set_deterministic_algorithm(true);
    visibility(attributes);
    const auto [dq, dk, dv] = graph.sdpa_backward(q, k, v, out, d_out, lse, attributes);
    const int64_t key_width = piece.queries == a.sequence ? qkv_width(a) : 2 * piece.groups * d;
    output(dq, kDQ, heads, piece.queries, d, qkv_width(a));
    output(dk, kDK, piece.groups, piece.keys, d, key_width);
    output(dv, kDV, piece.groups, piece.keys, d, key_width);
  } else {
    fe::graph::SDPA_attributes attributes;
    attributes.set_generate_stats(true);
    visibility(attributes);
    const auto [out, lse] = graph.sdpa(q, k, v, attributes);
    output(out, kOut, heads, piece.queries, d, out_width);
    output(lse, kLse, heads, piece.queries, int64_t{1}, int64_t{a.heads});
    lse->set_data_type(fe::DataType_t::FLOAT);
  }

  const std::string what =
      fmt::format("{} with {} heads of {} elements in {} groups, {} queries, {} keys, window {}",
                  gradient ? "the gradient of attention" : "attention", heads, d, piece.groups,
                  piece.queries, piece.keys, a.window);
  check(graph.validate(), what);
  check(graph.build_operation_graph(handle_), what);
  check(graph.create_execution_plans({fe::HeurMode_t::A}), what);
  graph.deselect_workspace_greater_than(limit);
  check(graph.check_support(handle_), what);
  check(graph.build_plans(handle_), what);
  int64_t workspace = 0;
  check(graph.get_workspace_size(workspace), what);
  if (workspace > limit) {
    throw_failed(fmt::format("cuDNN {}: {} wants {} bytes of scratch memory; {} are planned.",
                             cudnnGetVersion(), what, workspace, limit));
  }
  for (const int64_t id : {kQ, kK, kV, kOut, kLse}) plan.operands[id] = nullptr;
  if (gradient) {
    for (const int64_t id : {kDOut, kDQ, kDK, kDV}) plan.operands[id] = nullptr;
  }
}

// One call of the backward pass. The gradients of queries go to d_qkv, and so do those of keys and
// values unless they have a place of their own.
struct GradientCall {
  int64_t b, group, first_query, first_key;
  bf16* d_keys;
  bf16* d_values;
};

void set_operands(const CudaKernelArguments& args, const GradientCall& call, Plan& plan) {
  const auto& a = args.attributes->as<AttentionAttributes>();
  const auto in = [&](int i) { return const_cast<bf16*>(args.in<bf16>(i)); };
  const QkvAddresses qkv =
      addresses(a, in(1), call.b, call.group, call.first_query, call.first_key);
  const QkvAddresses d_qkv =
      addresses(a, args.out<bf16>(0), call.b, call.group, call.first_query, call.first_key);
  const int64_t head =
      (call.b * a.sequence + call.first_query) * a.heads + call.group * heads_per_group(a);
  plan.operands[kQ] = qkv.q;
  plan.operands[kK] = qkv.k;
  plan.operands[kV] = qkv.v;
  plan.operands[kOut] = in(2) + head * a.head_dim;
  plan.operands[kLse] = const_cast<float*>(args.in<float>(3)) + head;
  plan.operands[kDOut] = in(0) + head * a.head_dim;
  plan.operands[kDQ] = d_qkv.q;
  plan.operands[kDK] = call.d_keys != nullptr ? call.d_keys : d_qkv.k;
  plan.operands[kDV] = call.d_values != nullptr ? call.d_values : d_qkv.v;
}

std::byte* aligned(std::byte* scratch) {
  const auto address = reinterpret_cast<uintptr_t>(scratch);
  return scratch + (align(address) - address);
}

}  // namespace

bool cudnn_takes_attention(const AttentionAttributes& a, DType dtype) {
  return dtype == DType::bf16 && a.probability == 0 && (a.head_dim == 64 || a.head_dim == 128) &&
         a.sequence > 1;
}

uint64_t cudnn_attention_scratch_bytes() {
  return kScratchAlignment + kForwardWorkspaceBytes;
}

uint64_t cudnn_attention_gradient_scratch_bytes(const AttentionAttributes& a) {
  const Piece piece = gradient_piece(a);
  return kScratchAlignment + align(workspace_bytes(a, piece)) +
         key_gradient_elements(a, piece) * (sizeof(float) + sizeof(bf16));
}

void cudnn_attention(const CudaKernelArguments& args) {
  const auto& a = args.attributes->as<AttentionAttributes>();
  auto& attention = args.context->kept<Attention>();
  Plan& plan = attention.plan(a, {a.batch, a.groups, a.sequence, a.sequence}, /*gradient=*/false,
                              kForwardWorkspaceBytes);
  const QkvAddresses qkv = addresses(a, const_cast<bf16*>(args.in<bf16>(0)), 0, 0, 0, 0);
  plan.operands[kQ] = qkv.q;
  plan.operands[kK] = qkv.k;
  plan.operands[kV] = qkv.v;
  plan.operands[kOut] = args.out<bf16>(0);
  plan.operands[kLse] = args.out<float>(1);
  attention.run(plan, args.stream, aligned(args.scratch));
}

void cudnn_attention_gradient(const CudaKernelArguments& args) {
  const auto& a = args.attributes->as<AttentionAttributes>();
  auto& attention = args.context->kept<Attention>();
  const Piece largest = gradient_piece(a);
  const uint64_t workspace_size = align(workspace_bytes(a, largest));
  std::byte* const workspace = aligned(args.scratch);
  const bool whole = largest.queries == a.sequence;
  KeyGradientSum sums;
  if (!whole) {
    sums.key_elements = int64_t{largest.groups} * a.head_dim;
    sums.sum = reinterpret_cast<float*>(workspace + workspace_size);
    sums.part = reinterpret_cast<bf16*>(sums.sum + key_gradient_elements(a, largest));
  }
  for (int64_t b = 0; b < a.batch; b += largest.batch) {
    for (int64_t group = 0; group < a.groups; group += largest.groups) {
      int64_t summed = 0;  // keys
      for (int64_t begin = 0; begin < a.sequence; begin += largest.queries) {
        const int64_t end = std::min<int64_t>(begin + largest.queries, a.sequence);
        const int64_t first_key = a.window > 0 && begin >= a.window ? begin - a.window + 1 : 0;
        Piece piece = largest;
        piece.queries = static_cast<int32_t>(end - begin);
        piece.keys = static_cast<int32_t>(end - first_key);
        GradientCall call{b, group, begin, first_key, nullptr, nullptr};
        if (!whole) {
          call.d_keys = sums.part;
          call.d_values = sums.part + sums.key_elements;
        }
        Plan& plan = attention.plan(a, piece, /*gradient=*/true, workspace_size);
        set_operands(args, call, plan);
        attention.run(plan, args.stream, workspace);
        if (!whole) add_key_gradients(args, sums, first_key, end, summed);
        summed = end;
      }
      if (!whole) {
        const QkvAddresses d_qkv = addresses(a, args.out<bf16>(0), b, group, 0, 0);
        round_key_gradients(args, sums, a.sequence, d_qkv.k, d_qkv.v, qkv_width(a));
      }
    }
  }
}

}  // namespace troupe
