#include "ops/attention/attention/cuda/attention_cudnn.h"

#include <algorithm>
#include <compare>
#include <fmt/format.h>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>

#include "base/error.h"
#include "ops/attention/attention/attention_cuda.h"
#include "ops/attention/attention/attention_mask.h"
#include "ops/attention/attention/cuda/key_gradients.h"
#include "ops/cuda/context.h"

// The frontend is some 60,000 lines; only this file includes it, without its JSON library.
#define CUDNN_FRONTEND_SKIP_JSON_LIB
#include <cudnn_frontend.h>

namespace troupe {
namespace {

namespace fe = cudnn_frontend;

// Names of a call's tensors.
enum Tensor : int64_t { kQ = 1, kK, kV, kOut, kLse, kDOut, kDQ, kDK, kDV };

// Everything that a plan depends on.
struct PlanShape {
  bool gradient = false;
  DType dtype = DType::bf16;
  int64_t batch = 1;
  int64_t heads = 1;  // of the piece
  int64_t groups = 1;
  int64_t queries = 1;
  int64_t keys = 1;
  int64_t head_dim = 1;
  int64_t value_dim = 1;
  int64_t window = 0;
  double scale = 1;
  // Elements from row to row.
  int64_t query_stride = 0;
  int64_t key_stride = 0;
  int64_t out_stride = 0;
  int64_t key_gradient_stride = 0;
  // Rows from sequence to sequence.
  int64_t query_rows = 0;
  int64_t key_rows = 0;
  int64_t key_gradient_rows = 0;

  auto operator<=>(const PlanShape&) const = default;
};

int64_t heads_per_group(const AttentionShape& shape) {
  return shape.attributes.heads / shape.attributes.groups;
}

// The first key that the query at a position sees.
int64_t first_key_of(const AttentionShape& shape, int64_t position) {
  return AttentionMask{.window = shape.attributes.window}.first_key(position);
}

// Keys that `count` queries see, whose first one is row `row` of a sequence.
int64_t keys_of(const AttentionShape& shape, int64_t row, int64_t count) {
  const int64_t position = shape.position(row);
  return position + count - first_key_of(shape, position);
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

class Handle {
 public:
  Handle() { check(cudnnCreate(&handle_), "starting"); }
  ~Handle() { cudnnDestroy(handle_); }
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;
  cudnnHandle_t get() const { return handle_; }

 private:
  cudnnHandle_t handle_ = nullptr;
};

// cuDNN's handle, and the plans of one context.
class Attention {
 public:
  // `workspace` bytes are there for it.
  Plan& plan(const PlanShape& shape, uint64_t workspace) {
    Plan& plan = plans_[shape];
    if (plan.operands.empty()) build(shape, static_cast<int64_t>(workspace), plan);
    return plan;
  }

  void run(Plan& plan, CUstream_st* stream, std::byte* workspace) {
    check(cudnnSetStream(handle_.get(), stream), "choosing a stream");
    check(plan.graph.execute(handle_.get(), plan.operands, workspace), "attention");
  }

 private:
  void build(const PlanShape& shape, int64_t limit, Plan& plan);

  Handle handle_;  // outlives the plans that were made with it
  std::map<PlanShape, Plan> plans_;
};

void Attention::build(const PlanShape& shape, int64_t limit, Plan& plan) {
  fe::graph::Graph& graph = plan.graph;
  graph
      .set_io_data_type(shape.dtype == DType::f16 ? fe::DataType_t::HALF : fe::DataType_t::BFLOAT16)
      .set_intermediate_data_type(fe::DataType_t::FLOAT)
      .set_compute_data_type(fe::DataType_t::FLOAT);

  // [sequence of the batch, head, token, element]
  struct Rows {
    int64_t heads, tokens;
    int64_t rows;    // from sequence to sequence
    int64_t stride;  // elements from row to row
    int64_t elements;
  };
  const auto describe = [&](const std::shared_ptr<fe::graph::Tensor_attributes>& tensor, Tensor id,
                            const Rows& rows) {
    tensor->set_uid(id)
        .set_dim({shape.batch, rows.heads, rows.tokens, rows.elements})
        .set_stride({rows.rows * rows.stride, rows.elements, rows.stride, 1});
  };
  const auto input = [&](Tensor id, const Rows& rows) {
    auto tensor = graph.tensor(fe::graph::Tensor_attributes());
    describe(tensor, id, rows);
    return tensor;
  };
  const auto output = [&](const auto& tensor, Tensor id, const Rows& rows) {
    tensor->set_output(true);
    describe(tensor, id, rows);
  };
  const auto visibility = [&](auto& attributes) {
    attributes.set_attn_scale(static_cast<float>(shape.scale))
        .set_diagonal_alignment(shape.queries == shape.keys ? fe::DiagonalAlignment_t::TOP_LEFT
                                                            : fe::DiagonalAlignment_t::BOTTOM_RIGHT)
        .set_diagonal_band_right_bound(0);
    if (shape.window > 0 && shape.window < shape.keys) {
      attributes.set_diagonal_band_left_bound(shape.window);
    }
  };

  const int64_t d = shape.head_dim;
  const int64_t e = shape.value_dim;
  const Rows queries{shape.heads, shape.queries, shape.query_rows, shape.query_stride, d};
  const Rows keys{shape.groups, shape.keys, shape.key_rows, shape.key_stride, d};
  const Rows values{shape.groups, shape.keys, shape.key_rows, shape.key_stride, e};
  const Rows outs{shape.heads, shape.queries, shape.query_rows, shape.out_stride, e};
  const Rows sums{shape.heads, shape.queries, shape.query_rows, shape.out_stride / e, 1};
  const auto q = input(kQ, queries);
  const auto k = input(kK, keys);
  const auto v = input(kV, values);
  if (shape.gradient) {
    const auto out = input(kOut, outs);
    const auto d_out = input(kDOut, outs);
    const auto lse = input(kLse, sums);
    lse->set_data_type(fe::DataType_t::FLOAT);
    fe::graph::SDPA_backward_attributes attributes;
    attributes.set_deterministic_algorithm(true);
    visibility(attributes);
    const auto [dq, dk, dv] = graph.sdpa_backward(q, k, v, out, d_out, lse, attributes);
    Rows key_gradients{shape.groups, shape.keys, shape.key_gradient_rows, shape.key_gradient_stride,
                       d};
    output(dq, kDQ, queries);
    output(dk, kDK, key_gradients);
    key_gradients.elements = e;
    output(dv, kDV, key_gradients);
  } else {
    fe::graph::SDPA_attributes attributes;
    attributes.set_generate_stats(true);
    visibility(attributes);
    const auto [out, lse] = graph.sdpa(q, k, v, attributes);
    output(out, kOut, outs);
    output(lse, kLse, sums);
    lse->set_data_type(fe::DataType_t::FLOAT);
  }

  const std::string what = fmt::format(
      "{} with {} heads of {} and {} elements in {} groups, {} queries, {} keys, "
      "window {}",
      shape.gradient ? "the gradient of attention" : "attention", shape.heads, d, e, shape.groups,
      shape.queries, shape.keys, shape.window);
  check(graph.validate(), what);
  check(graph.build_operation_graph(handle_.get()), what);
  check(graph.create_execution_plans({fe::HeurMode_t::A}), what);
  graph.deselect_workspace_greater_than(limit);
  check(graph.check_support(handle_.get()), what);
  check(graph.build_plans(handle_.get()), what);
  int64_t workspace = 0;
  check(graph.get_workspace_size(workspace), what);
  if (workspace > limit) {
    throw_failed(fmt::format("cuDNN {}: {} needs {} bytes of scratch memory; {} are planned.",
                             cudnnGetVersion(), what, workspace, limit));
  }
  for (const int64_t id : {kQ, kK, kV, kOut, kLse}) plan.operands[id] = nullptr;
  if (shape.gradient) {
    for (const int64_t id : {kDOut, kDQ, kDK, kDV}) plan.operands[id] = nullptr;
  }
}

// The plan's shape for a piece of a call.
PlanShape plan_shape(const AttentionCall& call, const AttentionPiece& piece, bool gradient) {
  const AttentionAttributes& a = call.shape.attributes;
  return {.gradient = gradient,
          .dtype = call.shape.dtype,
          .batch = piece.batch,
          .heads = piece.groups * heads_per_group(call.shape),
          .groups = piece.groups,
          .queries = piece.queries,
          .keys = piece.keys,
          .head_dim = a.head_dim,
          .value_dim = a.value_size(),
          .window = a.window,
          .scale = a.scale,
          .query_stride = call.query_stride,
          .key_stride = call.key_stride,
          .out_stride = a.out_row(),
          .key_gradient_stride = gradient ? call.key_stride : 0,
          .query_rows = call.shape.rows(),
          .key_rows = call.shape.positions(),
          .key_gradient_rows = gradient ? call.shape.positions() : 0};
}

// Where a piece begins.
struct Corner {
  int64_t b = 0;
  int64_t group = 0;
  int64_t row = 0;  // of the queries, in each sequence
};

// The operands of a piece; gradients of keys and values go to the call's.
void set_operands(const AttentionCall& call, const Corner& corner, bool gradient, Plan& plan) {
  const AttentionShape& shape = call.shape;
  const int64_t d = shape.attributes.head_dim;
  const int64_t e = shape.attributes.value_size();
  const int64_t heads = shape.attributes.heads;
  const int64_t row = corner.b * shape.rows() + corner.row;
  const int64_t head = corner.group * heads_per_group(shape);
  const int64_t query = row * call.query_stride + head * d;
  const int64_t out = (row * heads + head) * e;
  const int64_t first_key = first_key_of(shape, shape.position(corner.row));
  const int64_t key_row = (corner.b * shape.positions() + first_key) * call.key_stride;
  const int64_t key = key_row + corner.group * d;
  const int64_t value = key_row + corner.group * e;
  const auto at = [](void* data, int64_t element) {
    return static_cast<uint16_t*>(data) + element;
  };
  plan.operands[kQ] = at(call.q, query);
  plan.operands[kK] = at(call.k, key);
  plan.operands[kV] = at(call.v, value);
  plan.operands[kOut] = at(call.out, out);
  plan.operands[kLse] = static_cast<float*>(call.lse) + row * heads + head;
  if (!gradient) return;
  plan.operands[kDOut] = at(call.d_out, out);
  plan.operands[kDQ] = at(call.d_q, query);
  plan.operands[kDK] = at(call.d_k, key);
  plan.operands[kDV] = at(call.d_v, value);
}

std::byte* aligned(std::byte* scratch) {
  const auto address = reinterpret_cast<uintptr_t>(scratch);
  return scratch + (align_for_cudnn(address) - address);
}

// The backward pass of one call, piece by piece.
class Backward {
 public:
  Backward(const CudaKernelArguments& args, const AttentionCall& call, std::byte* scratch)
      : args_(args),
        call_(call),
        shape_(call.shape),
        largest_(gradient_piece(shape_)),
        workspace_size_(align_for_cudnn(cudnn_gradient_workspace(shape_, largest_))),
        direct_(!shape_.wide_key_gradients && sees_keys_alone(shape_, largest_)),
        workspace_(aligned(scratch)),
        part_(reinterpret_cast<uint16_t*>(workspace_ + workspace_size_)),
        sums_(reinterpret_cast<float*>(part_ + key_part_elements(shape_, largest_))) {}

  void run() {
    const AttentionAttributes& a = shape_.attributes;
    for (int64_t b = 0; b < a.batch; b += largest_.batch) {
      for (int64_t group = 0; group < a.groups; group += largest_.groups) run_group(b, group);
    }
  }

 private:
  // All queries of some groups of some sequences.
  void run_group(int64_t b, int64_t group) {
    const KeyGradientSum sum = sum_of(b, group);
    bool first = true;
    for (int64_t chunk = 0; chunk < shape_.rows(); chunk += shape_.chunk()) {
      const int64_t end = chunk + shape_.chunk();
      for (int64_t row = chunk; row < end; row += largest_.queries) {
        const int64_t queries = std::min(largest_.queries, end - row);
        const AttentionPiece piece{largest_.batch, largest_.groups, queries,
                                   keys_of(shape_, row, queries)};
        run_piece(piece, {b, group, row}, sum, first);
        first = false;
      }
    }
    if (direct_ || shape_.wide_key_gradients) return;
    const int64_t row = b * shape_.positions() * call_.key_stride;
    round_key_gradients(
        args_, sum, shape_.dtype, static_cast<uint16_t*>(call_.d_k) + row + group * head_dim(),
        static_cast<uint16_t*>(call_.d_v) + row + group * value_dim(), call_.key_stride);
  }

  void run_piece(const AttentionPiece& piece, const Corner& corner, const KeyGradientSum& sum,
                 bool first) {
    auto& attention = args_.context->kept<Attention>();
    PlanShape shape = plan_shape(call_, piece, /*gradient=*/true);
    if (!direct_) {
      shape.key_gradient_stride = key_elements() + value_elements();
      shape.key_gradient_rows = piece.keys;
    }
    Plan& plan = attention.plan(shape, workspace_size_);
    set_operands(call_, corner, /*gradient=*/true, plan);
    if (!direct_) {
      plan.operands[kDK] = part_;
      plan.operands[kDV] = part_ + key_elements();
    }
    attention.run(plan, args_.stream, workspace_);
    if (direct_) return;
    const int64_t first_key = first_key_of(shape_, shape_.position(corner.row));
    add_key_gradients(args_,
                      {.rows = part_,
                       .dtype = shape_.dtype,
                       .batch = piece.batch,
                       .begin = first_key,
                       .end = first_key + piece.keys},
                      sum, first);
  }

  // The caller's sums, or this call's, which are of one sequence: pieces with several are whole.
  KeyGradientSum sum_of(int64_t b, int64_t group) const {
    if (!shape_.wide_key_gradients) {
      return {.k = sums_,
              .v = sums_ + key_elements(),
              .key_elements = key_elements(),
              .value_elements = value_elements(),
              .stride = key_elements() + value_elements(),
              .positions = shape_.positions()};
    }
    const int64_t row = b * shape_.positions() * call_.key_stride;
    return {.k = static_cast<float*>(call_.d_k) + row + group * head_dim(),
            .v = static_cast<float*>(call_.d_v) + row + group * value_dim(),
            .key_elements = key_elements(),
            .value_elements = value_elements(),
            .stride = call_.key_stride,
            .positions = shape_.positions()};
  }

  int64_t head_dim() const { return shape_.attributes.head_dim; }
  int64_t value_dim() const { return shape_.attributes.value_size(); }
  int64_t key_elements() const { return largest_.groups * head_dim(); }
  int64_t value_elements() const { return largest_.groups * value_dim(); }

  const CudaKernelArguments& args_;
  const AttentionCall& call_;
  const AttentionShape& shape_;
  const AttentionPiece largest_;
  const uint64_t workspace_size_;
  const bool direct_;  // cuDNN writes the gradients of keys and values to their place
  std::byte* const workspace_;
  uint16_t* const part_;  // bf16 or f16, as the operands are
  float* const sums_;
};

}  // namespace

void cudnn_attention(const CudaKernelArguments& args, const AttentionCall& call,
                     std::byte* scratch) {
  const AttentionShape& shape = call.shape;
  auto& attention = args.context->kept<Attention>();
  for (int64_t row = 0; row < shape.rows(); row += shape.chunk()) {
    const AttentionPiece piece{shape.attributes.batch, shape.attributes.groups, shape.chunk(),
                               keys_of(shape, row, shape.chunk())};
    Plan& plan = attention.plan(plan_shape(call, piece, /*gradient=*/false), kCudnnForwardBytes);
    set_operands(call, {.row = row}, /*gradient=*/false, plan);
    attention.run(plan, args.stream, aligned(scratch));
  }
}

void cudnn_attention_gradient(const CudaKernelArguments& args, const AttentionCall& call,
                              std::byte* scratch) {
  Backward(args, call, scratch).run();
}

}  // namespace troupe
