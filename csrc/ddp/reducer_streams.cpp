// The order of a device's streams in a step: hooks run on the streams of autograd's accumulators, which may be several,
// and a bucket is reduced from one.
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>

#include "base/stream_order.h"
#include "ddp/reducer.h"

namespace drivetrain::ddp {

// Makes the current stream of that device one of the step's. Its first work runs after what the others have done so
// far, such as making a new arena.
void Reducer::note_stream(c10::Device device) {
  const std::optional<c10::Stream> here = stream_on(device);
  if (!here || std::find(streams_.begin(), streams_.end(), *here) != streams_.end()) return;
  wait_for_streams(device);
  streams_.push_back(*here);
}

// The same, and what it is given from now on runs after everything that any has done so far.
void Reducer::join_streams(c10::Device device) {
  wait_for_streams(device);
  note_stream(device);
}

void Reducer::wait_for_streams(c10::Device device) const {
  const std::optional<c10::Stream> here = stream_on(device);
  if (!here) return;
  for (const c10::Stream& other : streams_) {
    if (other.device() == here->device()) run_after(*here, other);
  }
}

std::vector<c10::Stream> Reducer::streams_of_accumulators() const {
  std::vector<c10::Stream> streams;
  for (const Parameter& param : params_) {
    const std::optional<c10::Stream> stream = param.accumulator ? param.accumulator->stream() : std::nullopt;
    if (stream && std::find(streams.begin(), streams.end(), *stream) == streams.end()) streams.push_back(*stream);
  }
  return streams;
}

// What writes gradients outside of hooks is in order with their accumulators' streams alone. So whoever moves all of
// them waits for those streams before, and they wait for it after.
void Reducer::wait_for_accumulators() const {
  for (const c10::Stream& stream : streams_of_accumulators()) {
    if (const auto here = stream_on(stream.device())) run_after(*here, stream);
  }
}

void Reducer::let_accumulators_wait() const {
  for (const c10::Stream& stream : streams_of_accumulators()) {
    if (const auto here = stream_on(stream.device())) run_after(stream, *here);
  }
}

// Memory that is let go of may be another tensor's only once these streams have done what they were given.
void Reducer::keep_for_streams(const at::Tensor& memory) const {
  const std::optional<c10::Stream> here = stream_on(memory.device());
  if (!here) return;
  const c10::impl::VirtualGuardImpl guard(memory.device().type());
  guard.recordDataPtrOnStream(memory.storage().data_ptr(), *here);
  for (const c10::Stream& other : streams_) {
    if (other.device() == here->device()) guard.recordDataPtrOnStream(memory.storage().data_ptr(), other);
  }
}

}  // namespace drivetrain::ddp
