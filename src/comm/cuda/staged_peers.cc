// What a staged group does instead of reaching into the memory of others: all of it is NcclGroup's.
#include "comm/cuda/nccl_group.h"
#include "comm/cuda/peers.h"

namespace troupe {

void CudaPeers::exchange(const CudaKernelArguments& args, std::span<const PeerBlock> sends,
                         std::span<const PeerBlock> receives,
                         std::span<const PeerWhole> wholes) const {
  nccl_->exchange(args, {staged_op_, op_}, sends, receives, wholes);
}

void CudaPeers::send_staged(const CudaKernelArguments& args, int to) const {
  nccl_->send(args, {staged_op_, op_}, to);
}

void CudaPeers::finish_staged(const CudaKernelArguments& args, int to) const {
  nccl_->finish_send(args, {staged_op_, op_}, to);
}

void CudaPeers::receive_staged(const CudaKernelArguments& args, int from) const {
  nccl_->receive(args, {staged_op_, op_}, from);
}

}  // namespace troupe
