// Implements streams and events: the queues, the order in which work may run, and host waits.
#include <unistd.h>

#include <algorithm>
#include <sstream>

#include "core.h"

namespace fake_cuda {

void Clock::join(const Clock& other) {
  if (other.numbers_.size() > numbers_.size()) numbers_.resize(other.numbers_.size());
  for (size_t i = 0; i < other.numbers_.size(); ++i) numbers_[i] = std::max(numbers_[i], other.numbers_[i]);
}

void Clock::set(uint32_t stream, uint64_t number) {
  if (stream >= numbers_.size()) numbers_.resize(stream + 1);
  numbers_[stream] = number;
}

std::string OpInfo::describe() const {
  return name + " (operation " + std::to_string(number) + " on " + stream + (location.empty() ? "" : ", " + location) +
         ")";
}

State& state() {
  static State* the_state = [] {
    auto* made = new State;
    made->random.seed(number_from_environment("FAKE_CUDA_SEED", 1));
    made->delay_us = number_from_environment("FAKE_CUDA_DELAY_US", 1000);
    return made;
  }();
  return *the_state;
}

thread_local int current_device = 0;

Stream* make_stream(int device, bool is_blocking, std::string label) {
  auto* stream = new Stream;  // never deleted, so that no later stream gets its address
  stream->id = static_cast<uint32_t>(state().streams.size());
  stream->device = device;
  stream->is_blocking = is_blocking;
  stream->label = label + " of device " + std::to_string(device);
  state().streams.push_back(stream);
  return stream;
}

Stream* find_stream(cudaStream_t handle) {
  if (handle == nullptr || handle == cudaStreamLegacy || handle == cudaStreamPerThread) {
    Stream*& legacy = state().legacy[current_device];
    if (legacy == nullptr) legacy = make_stream(current_device, true, "the default stream");
    return legacy;
  }
  for (Stream* stream : state().streams) {
    if (reinterpret_cast<cudaStream_t>(stream) == handle) return stream->is_destroyed ? nullptr : stream;
  }
  return nullptr;
}

OpRef append(Stream* stream, std::shared_ptr<const Work> work, std::vector<OpRef> deps) {
  State& all = state();
  auto op = std::make_shared<Op>();
  auto info = std::make_shared<OpInfo>();
  info->name = work->name;
  info->stream = stream->label;
  info->location = location();
  info->stream_id = stream->id;
  info->number = ++stream->number;
  Stream* legacy = all.legacy.count(stream->device) ? all.legacy[stream->device] : nullptr;
  if (stream == legacy) {
    for (Stream* other : all.streams) {
      if (other != stream && other->device == stream->device && other->is_blocking && other->last) {
        deps.push_back(other->last);
      }
    }
  } else if (stream->is_blocking && legacy != nullptr && legacy->last) {
    deps.push_back(legacy->last);
  }
  op->clock = stream->clock;
  op->clock.join(all.host);
  for (const OpRef& dep : deps) op->clock.join(dep->clock);
  op->clock.set(stream->id, info->number);
  deps.erase(std::remove_if(deps.begin(), deps.end(), [](const OpRef& dep) { return dep->is_done; }), deps.end());
  op->work = std::move(work);
  op->info = std::move(info);
  op->stream = stream;
  op->deps = std::move(deps);
  if (all.delay_us > 0) {
    if (stream->queue.empty()) {
      constexpr unsigned kLags[] = {0, 1, 1, 6};
      stream->lag = kLags[all.random() % 4];
      op->delay = std::chrono::microseconds(all.random() % (all.delay_us * stream->lag + 1));
    } else if (all.random() % 32 == 0) {
      op->delay = std::chrono::microseconds(all.random() % (all.delay_us * stream->lag + 1));
    }
  }
  if (stream->queue.empty()) op->ready = std::chrono::steady_clock::now() + op->delay;
  stream->clock = op->clock;
  stream->last = op;
  stream->queue.push_back(op);
  start_executor();
  all.changed.notify_one();
  return op;
}

cudaError_t enqueue(Stream* stream, std::shared_ptr<const Work> work) {
  close_after_fault();
  if (stream->capture) {
    Capture& capture = *stream->capture;
    if (capture.is_invalid) return fail(cudaErrorStreamCaptureInvalidated);
    const size_t node = capture.graph->nodes.size();
    auto& tail = capture.tails[stream];
    capture.graph->nodes.push_back({std::move(work), {tail.begin(), tail.end()}, capture.lanes[stream]});
    tail = {node};
    return cudaSuccess;
  }
  if (stream->is_blocking) {  // illegal if the legacy stream would wait for a capture, or a capture for it
    Stream* legacy = state().legacy.count(stream->device) ? state().legacy[stream->device] : nullptr;
    for (const auto& capture : std::set(state().captures)) {
      for (const auto& [other, tail] : capture->tails) {
        if (other->device == stream->device && other->is_blocking && (stream == legacy || other == legacy)) {
          invalidate(capture);
          return fail(cudaErrorStreamCaptureImplicit);
        }
      }
    }
  }
  append(stream, std::move(work));
  return cudaSuccess;
}

OpRef marker(Stream* stream, const char* name) {
  auto work = std::make_shared<Work>();
  work->name = name;
  return append(stream, std::move(work));
}

void observe(const OpRef& op) { state().host.join(op->clock); }

namespace {

void hurry(Stream* stream, const Op* until) {
  for (const OpRef& op : stream->queue) {
    if (!op->is_urgent) {
      op->is_urgent = true;
      for (const OpRef& dep : op->deps) {
        if (!dep->is_done) hurry(dep->stream, dep.get());
      }
    }
    if (op.get() == until) return;
  }
}

std::string pending_work() {
  std::ostringstream text;
  for (const Stream* stream : state().streams) {
    if (stream->queue.empty()) continue;
    const Op& first = *stream->queue.front();
    text << "\n  " << stream->queue.size() << " operations on " << stream->label
         << ", the first: " << first.info->describe();
    for (const OpRef& dep : first.deps) {
      if (!dep->is_done) text << ", after " << dep->info->describe();
    }
  }
  return text.str();
}

}  // namespace

cudaError_t wait_for(Lock& lock, const std::vector<OpRef>& ops, const char* call) {
  State& all = state();
  const auto limit = std::chrono::seconds(number_from_environment("FAKE_CUDA_WAIT_S", 300));
  const Time until = std::chrono::steady_clock::now() + limit;
  for (const OpRef& op : ops) {
    if (op->is_done) continue;
    hurry(op->stream, op.get());
    all.changed.notify_one();
    while (!op->is_done) {
      if (all.done.wait_until(lock, until) == std::cv_status::timeout) {
        const std::string text = std::string(call) + " has waited " + std::to_string(limit.count()) + " s for " +
                                 op->info->describe() + "; these are not done:" + pending_work();
        lock.unlock();
        report("timeout", text);
        _exit(86);  // the work may still write to memory that the host would use
      }
    }
  }
  for (const OpRef& op : ops) observe(op);
  if (all.device_error != cudaSuccess) return fail(std::exchange(all.device_error, cudaSuccess));
  return cudaSuccess;
}

}  // namespace fake_cuda

using namespace fake_cuda;

namespace {

cudaError_t create_stream(cudaStream_t* handle, unsigned flags, int priority) {
  use_context("cudaStreamCreate");
  if (handle == nullptr || flags > cudaStreamNonBlocking) return fail(cudaErrorInvalidValue);
  const Lock lock(state().mutex);
  Stream* stream =
      make_stream(current_device, flags != cudaStreamNonBlocking, "stream " + std::to_string(state().streams.size()));
  stream->priority = std::min(0, std::max(-5, priority));
  *handle = reinterpret_cast<cudaStream_t>(stream);
  return cudaSuccess;
}

Event* find_event(cudaEvent_t handle) {
  auto* event = reinterpret_cast<Event*>(handle);
  return state().events.count(event) ? event : nullptr;
}

}  // namespace

FAKE_CUDA_API cudaError_t cudaStreamCreate(cudaStream_t* stream) { return create_stream(stream, 0, 0); }
FAKE_CUDA_API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return create_stream(stream, flags, 0);
}
FAKE_CUDA_API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  return create_stream(stream, flags, priority);
}

FAKE_CUDA_API cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  use_context(__func__);
  const Lock lock(state().mutex);
  Stream* stream = find_stream(handle);
  if (stream == nullptr || handle == nullptr) return fail(cudaErrorInvalidResourceHandle);
  if (stream->capture) invalidate(stream->capture);
  stream->is_destroyed = true;  // the work that it still holds runs
  return cudaSuccess;
}

FAKE_CUDA_API cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* priority) {
  use_context(__func__);
  const Lock lock(state().mutex);
  Stream* stream = find_stream(handle);
  if (stream == nullptr) return fail(cudaErrorInvalidResourceHandle);
  *priority = stream->priority;
  return cudaSuccess;
}

FAKE_CUDA_API cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  use_context(__func__);
  Lock lock(state().mutex);
  Stream* stream = find_stream(handle);
  if (stream == nullptr) return fail(cudaErrorInvalidResourceHandle);
  if (const cudaError_t error = check_capture(stream)) return error;
  ++state().num_host_waits;
  close_after_fault();
  return wait_for(lock, {marker(stream, "cudaStreamSynchronize")}, "cudaStreamSynchronize");
}

FAKE_CUDA_API cudaError_t cudaStreamQuery(cudaStream_t handle) {
  use_context(__func__);
  Lock lock(state().mutex);
  Stream* stream = find_stream(handle);
  if (stream == nullptr) return fail(cudaErrorInvalidResourceHandle);
  if (const cudaError_t error = check_capture(stream)) return error;
  close_after_fault();
  if (!stream->queue.empty()) return fail(cudaErrorNotReady);
  if (stream->last) observe(stream->last);
  return cudaSuccess;
}

FAKE_CUDA_API cudaError_t cudaDeviceSynchronize() {
  use_context(__func__);
  Lock lock(state().mutex);
  if (is_forbidden_by_capture()) return fail(cudaErrorStreamCaptureUnsupported);
  ++state().num_host_waits;
  close_after_fault();
  std::vector<OpRef> ops;
  for (Stream* stream : state().streams) {
    if (stream->device == current_device && stream->last) ops.push_back(stream->last);
  }
  return wait_for(lock, ops, "cudaDeviceSynchronize");
}

FAKE_CUDA_API cudaError_t cudaStreamWaitEvent(cudaStream_t stream_handle, cudaEvent_t event_handle, unsigned) {
  use_context(__func__);
  const Lock lock(state().mutex);
  Stream* stream = find_stream(stream_handle);
  Event* event = find_event(event_handle);
  if (stream == nullptr || event == nullptr) return fail(cudaErrorInvalidResourceHandle);
  if (stream->capture && stream->capture->is_invalid) return fail(cudaErrorStreamCaptureInvalidated);
  if (event->capture) {
    Capture& capture = *event->capture;
    if (!state().captures.count(event->capture)) return fail(cudaErrorCapturedEvent);
    if (capture.is_invalid) return fail(cudaErrorStreamCaptureInvalidated);
    if (stream->capture && stream->capture != event->capture) {
      invalidate(event->capture);
      invalidate(stream->capture);
      return fail(cudaErrorStreamCaptureMerge);
    }
    if (!stream->capture) {
      if (stream == find_stream(nullptr)) {
        invalidate(event->capture);
        return fail(cudaErrorStreamCaptureImplicit);
      }
      stream->capture = event->capture;
      capture.lanes.emplace(stream, capture.lanes.size());
    }
    capture.tails[stream].insert(event->nodes.begin(), event->nodes.end());
    return cudaSuccess;
  }
  if (!event->op) return cudaSuccess;  // never recorded
  if (stream->capture) {
    invalidate(stream->capture);
    return fail(cudaErrorStreamCaptureIsolation);
  }
  auto work = std::make_shared<Work>();
  work->name = "a wait for an event";
  append(stream, std::move(work), {event->op});
  return cudaSuccess;
}

FAKE_CUDA_API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* handle, unsigned flags) {
  use_context(__func__);
  if (handle == nullptr || flags > 7) return fail(cudaErrorInvalidValue);
  const Lock lock(state().mutex);
  auto* event = new Event;
  event->device = current_device;
  event->flags = flags;
  state().events.insert(event);
  *handle = reinterpret_cast<cudaEvent_t>(event);
  return cudaSuccess;
}
FAKE_CUDA_API cudaError_t cudaEventCreate(cudaEvent_t* handle) { return cudaEventCreateWithFlags(handle, 0); }

FAKE_CUDA_API cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  use_context(__func__);
  const Lock lock(state().mutex);
  Event* event = find_event(handle);
  if (event == nullptr) return fail(cudaErrorInvalidResourceHandle);
  state().events.erase(event);
  delete event;
  return cudaSuccess;
}

FAKE_CUDA_API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event_handle, cudaStream_t stream_handle, unsigned) {
  use_context(__func__);
  const Lock lock(state().mutex);
  Stream* stream = find_stream(stream_handle);
  Event* event = find_event(event_handle);
  if (stream == nullptr || event == nullptr || event->device != stream->device) {
    return fail(cudaErrorInvalidResourceHandle);
  }
  close_after_fault();
  if (stream->capture) {
    if (stream->capture->is_invalid) return fail(cudaErrorStreamCaptureInvalidated);
    event->op = nullptr;
    event->capture = stream->capture;
    event->nodes = stream->capture->tails[stream];
    return cudaSuccess;
  }
  event->capture = nullptr;
  event->nodes.clear();
  event->op = marker(stream, "an event's record");
  return cudaSuccess;
}
FAKE_CUDA_API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, 0);
}

FAKE_CUDA_API cudaError_t cudaEventQuery(cudaEvent_t handle) {
  use_context(__func__);
  const Lock lock(state().mutex);
  Event* event = find_event(handle);
  if (event == nullptr) return fail(cudaErrorInvalidResourceHandle);
  if (event->capture) {
    invalidate(event->capture);
    return fail(cudaErrorCapturedEvent);
  }
  if (is_forbidden_by_capture()) return fail(cudaErrorStreamCaptureUnsupported);
  if (!event->op) return cudaSuccess;
  if (!event->op->is_done) return fail(cudaErrorNotReady);
  observe(event->op);
  return cudaSuccess;
}

FAKE_CUDA_API cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  use_context(__func__);
  Lock lock(state().mutex);
  Event* event = find_event(handle);
  if (event == nullptr) return fail(cudaErrorInvalidResourceHandle);
  if (event->capture) {
    invalidate(event->capture);
    return fail(cudaErrorCapturedEvent);
  }
  if (is_forbidden_by_capture()) return fail(cudaErrorStreamCaptureUnsupported);
  ++state().num_host_waits;
  if (!event->op) return cudaSuccess;
  return wait_for(lock, {event->op}, "cudaEventSynchronize");
}

FAKE_CUDA_API cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start_handle, cudaEvent_t end_handle) {
  use_context(__func__);
  const Lock lock(state().mutex);
  const Event *start = find_event(start_handle), *end = find_event(end_handle);
  if (start == nullptr || end == nullptr || !start->op || !end->op ||
      ((start->flags | end->flags) & cudaEventDisableTiming)) {
    return fail(cudaErrorInvalidResourceHandle);
  }
  if (!start->op->is_done || !end->op->is_done) return fail(cudaErrorNotReady);
  *milliseconds = std::chrono::duration<float, std::milli>(end->op->done_at - start->op->done_at).count();
  return cudaSuccess;
}

FAKE_CUDA_API cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void* context) {
  use_context(__func__);
  const Lock lock(state().mutex);
  Stream* stream = find_stream(handle);
  if (stream == nullptr) return fail(cudaErrorInvalidResourceHandle);
  auto work = std::make_shared<Work>();
  work->name = "a host function";
  work->run = [function, context] {
    function(context);
    return FAKE_CUDA_DONE;
  };
  return enqueue(stream, std::move(work));
}

FAKE_CUDA_API cudaError_t cudaStreamAddCallback(cudaStream_t handle, cudaStreamCallback_t function, void* context,
                                                unsigned) {
  use_context(__func__);
  const Lock lock(state().mutex);
  Stream* stream = find_stream(handle);
  if (stream == nullptr) return fail(cudaErrorInvalidResourceHandle);
  if (const cudaError_t error = check_capture(stream)) return error;
  auto work = std::make_shared<Work>();
  work->name = "a stream's callback";
  work->run = [handle, function, context] {
    function(handle, cudaSuccess, context);
    return FAKE_CUDA_DONE;
  };
  return enqueue(stream, std::move(work));
}

FAKE_CUDA_API int fake_cuda_enqueue(fake_cuda_stream handle, const char* name, fake_cuda_work function, void* context,
                                    void (*release)(void*), const fake_cuda_range* ranges, size_t num_ranges) {
  use_context("a launch");
  note_location();
  const std::shared_ptr<void> held(context, release != nullptr ? release : [](void*) {});
  const Lock lock(state().mutex);
  Stream* stream = find_stream(handle);
  if (stream == nullptr) return fail(cudaErrorInvalidResourceHandle);
  auto work = std::make_shared<Work>();
  work->name = name;
  work->run = [function, held] { return function(held.get()); };
  for (size_t i = 0; i < num_ranges; ++i) {
    if (ranges[i].bytes == 0) continue;
    work->ranges.push_back({reinterpret_cast<uintptr_t>(ranges[i].address), ranges[i].bytes, ranges[i].writes != 0});
  }
  return enqueue(stream, std::move(work));
}

FAKE_CUDA_API int fake_cuda_drain(fake_cuda_stream handle) {
  Lock lock(state().mutex);
  Stream* stream = find_stream(handle);
  if (stream == nullptr) return fail(cudaErrorInvalidResourceHandle);
  if (const cudaError_t error = check_capture(stream)) return error;
  return wait_for(lock, {marker(stream, "a wait within the stand-in")}, "a wait within the stand-in");
}

FAKE_CUDA_API uint64_t fake_cuda_num_host_waits() {
  const Lock lock(state().mutex);
  return state().num_host_waits;
}
FAKE_CUDA_API void fake_cuda_seed(uint64_t seed) {
  const Lock lock(state().mutex);
  state().random.seed(seed);
}
FAKE_CUDA_API void fake_cuda_set_delay(uint64_t microseconds) {
  const Lock lock(state().mutex);
  state().delay_us = microseconds;
}
