// Implements the order of a step's streams.
#include "ddp/step_streams.h"

#include <algorithm>
#include <optional>

#include "base/stream_order.h"

namespace drivetrain::ddp {

void StepStreams::note(c10::Device device) {
  const std::optional<c10::Stream> here = stream_on(device);
  if (!here || std::find(streams_.begin(), streams_.end(), *here) != streams_.end()) return;
  wait_for_others(device);
  streams_.push_back(*here);
}

void StepStreams::join(c10::Device device) {
  wait_for_others(device);
  note(device);
}

void StepStreams::wait_for_others(c10::Device device) const {
  const std::optional<c10::Stream> here = stream_on(device);
  if (!here) return;
  for (const c10::Stream& other : streams_) {
    if (other.device() == here->device()) run_after(*here, other);
  }
}

// In a capture, leaves out streams that it has not reached: they would end it, and have no work of this step.
std::vector<c10::Stream> StepStreams::streams_of_accumulators() const {
  std::vector<c10::Stream> streams;
  for (const Parameter& param : params_) {
    const std::optional<c10::Stream> stream = param.accumulator ? param.accumulator->stream() : std::nullopt;
    if (!stream || std::find(streams.begin(), streams.end(), *stream) != streams.end()) continue;
    if (is_capturing_on(stream->device()) && !is_capturing(*stream)) continue;
    streams.push_back(*stream);
  }
  return streams;
}

void StepStreams::wait_for_accumulators() const {
  for (const c10::Stream& stream : streams_of_accumulators()) {
    if (const auto here = stream_on(stream.device())) run_after(*here, stream);
  }
}

void StepStreams::let_accumulators_wait() const {
  for (const c10::Stream& stream : streams_of_accumulators()) {
    if (const auto here = stream_on(stream.device())) run_after(stream, *here);
  }
}

void StepStreams::keep_alive(const at::Tensor& memory) const {
  const std::optional<c10::Stream> here = stream_on(memory.device());
  if (!here) return;
  record_use(memory.storage(), *here);
  for (const c10::Stream& other : streams_) {
    if (other.device() == here->device()) record_use(memory.storage(), other);
  }
}

}  // namespace drivetrain::ddp
