// Shows what our own transports carry to torch's profilers as process groups show what they carry. Costs nothing but a
// look where no profiler runs.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>

#include <cstdint>
#include <string>
#include <torch/csrc/distributed/c10d/ParamCommsUtils.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <tuple>
#include <vector>

#include "ddp/transport/transport.h"

namespace drivetrain::ddp {

// Around the beginning of a collective of one tensor: the range "gloo:all_reduce", which torch's tools look for under
// the backend's name. It ends where that call does, as NCCL's does, so that ranges nest, which NVTX's must. tag: the
// collective's; what plans buckets is not counted among those that reduce gradients.
template <class Body>
auto recording_collective(const std::string& name, uint64_t tag, const at::Tensor& flat, Body&& body) {
  if (!at::hasCallbacks()) return body();
  const std::string title = static_cast<Purpose>(tag & 0xff) == Purpose::kPlan ? "drivetrain::plan" : name;
  const c10::IValue input = flat;
  at::RecordFunction range(at::RecordScope::USER_SCOPE);
  if (range.isActive()) {
    range._setAsync();
    range.before(title.c_str(), c10::ArrayRef<const c10::IValue>(input));
  }
  return body();
}

// Around what gives one or several collectives, begun together, to the other ranks: "record_param_comms", from which
// analyses of traces read bytes and ranks, for the device's kernels too. number: of this launch within the group.
template <class Body>
auto recording_launch(c10d::ProcessGroup& group, const Ranks& ranks, const char* collective, int64_t number,
                      int64_t numel, at::ScalarType dtype, Body&& body) {
  if (!at::hasCallbacks()) return body();
  const int size = group.getSize();
  int64_t stride = size > 1 ? ranks.global(1) - ranks.global(0) : 1;
  for (int rank = 1; rank < size; ++rank) {
    if (ranks.global(rank) - ranks.global(rank - 1) != stride) stride = 0;  // no such list: torch then shows none
  }
  const std::vector<at::Tensor> none;
  const std::vector<int64_t> even;
  RECORD_PARAM_COMMS_DATA(std::make_tuple(number, false), std::make_tuple(group.getGroupName(), group.getGroupDesc()),
                          none, none, group.getRank(), std::string(collective), numel, numel, dtype, even, even,
                          static_cast<int>(ranks.global(0)), static_cast<int>(stride), size);
  return body();
}

}  // namespace drivetrain::ddp
