// A group of operations on a stream: a state machine that never waits, since one thread may run several streams.
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
  size_t count = 0;  // as NCCL's function takes it
  ncclDataType_t type = ncclFloat32;
  ncclRedOp_t op = ncclSum;
  int peer = 0;      // the root of a broadcast or reduction, or whom it is sent to or received from
  size_t group = 1;  // operations in its group

  bool is_between_two() const { return kind == Kind::kSend || kind == Kind::kRecv; }
  std::string text() const;  // "float sum 96"
};

// Puts them on the stream, in one of the orders that NCCL may choose, which is the same on every rank.
void launch(ncclComm& comm, std::vector<Operation> operations, cudaStream_t stream);

}  // namespace fake_nccl
