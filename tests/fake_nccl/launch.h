// Declares a group of operations on a stream. It never waits, because one thread may run several streams.
#pragma once

#include <nccl.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "communicator.h"

namespace fake_nccl {

enum class Kind { kAllReduce, kBroadcast, kReduce, kAllGather, kReduceScatter, kAllToAll, kSend, kRecv };

struct Operation {
  Kind kind = Kind::kAllReduce;
  const void* from = nullptr;
  void* to = nullptr;
  size_t count = 0;  // as passed to NCCL's function
  ncclDataType_t type = ncclFloat32;
  ncclRedOp_t op = ncclSum;
  int peer = 0;      // root of a broadcast or reduction, or the other rank of a send or receive
  size_t group = 1;  // number of operations in its group

  bool is_between_two() const { return kind == Kind::kSend || kind == Kind::kRecv; }
  std::string text() const;  // "float sum 96"
};

// Puts the operations on the stream, largest first. NCCL may reorder them too; the order is the same on every rank.
void launch(ncclComm& comm, std::vector<Operation> operations, cudaStream_t stream);

}  // namespace fake_nccl
