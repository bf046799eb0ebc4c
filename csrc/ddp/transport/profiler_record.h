// Records collectives of our transports for torch's profilers, in the form that process groups use. Without a
// profiler it costs one check.
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

// Records the start of a collective of one tensor as a range such as "gloo:all_reduce", the name that torch's tools
// look for. The range ends with the call, as NCCL's does, so that ranges nest, which NVTX requires. tag: of the
// collective; those that plan buckets get other names, and do not count as reductions of gradients.
template <class Body>
auto recording_collective(const std::string& name, const Tag& tag, const at::Tensor& flat, Body&& body) {
  if (!at::hasCallbacks()) return body();
  std::string title = tag.purpose == Purpose::kPlan ? "drivetrain::plan" : name;
  // A sum of rank 0's values and zeros is a broadcast, which torch's class records when it rebuilds its buckets.
  if (tag.purpose == Purpose::kFromRank0) title = name.substr(0, name.find(':')) + ":broadcast";
  const c10::IValue input = flat;
  at::RecordFunction range(at::RecordScope::USER_SCOPE);
  if (range.isActive()) {
    range._setAsync();
    range.before(title.c_str(), c10::ArrayRef<const c10::IValue>(input));
  }
  return body();
}

// Records the launch of one or several collectives as "record_param_comms", from which trace analyses read bytes and
// ranks, also for the device's kernels. number: of this launch within the group.
template <class Body>
auto recording_launch(c10d::ProcessGroup& group, const Ranks& ranks, const char* collective, int64_t number,
                      int64_t numel, at::ScalarType dtype, Body&& body) {
  if (!at::hasCallbacks()) return body();
  const int size = group.getSize();
  int64_t stride = size > 1 ? ranks.global(1) - ranks.global(0) : 1;
  for (int rank = 1; rank < size; ++rank) {
    if (ranks.global(rank) - ranks.global(rank - 1) != stride) stride = 0;  // torch then shows no list of ranks
  }
  const std::vector<at::Tensor> none;
  const std::vector<int64_t> even;
  RECORD_PARAM_COMMS_DATA(std::make_tuple(number, false), std::make_tuple(group.getGroupName(), group.getGroupDesc()),
                          none, none, group.getRank(), std::string(collective), numel, numel, dtype, even, even,
                          static_cast<int>(ranks.global(0)), static_cast<int>(stride), size);
  return body();
}

}  // namespace drivetrain::ddp
