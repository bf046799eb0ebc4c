// Implements graphs. A capture records work instead of enqueuing it; a launch enqueues it on the graph's own streams.
#include <algorithm>

#include "core.h"

namespace fake_cuda {

thread_local cudaStreamCaptureMode thread_capture_mode = cudaStreamCaptureModeGlobal;

void invalidate(const std::shared_ptr<Capture>& capture) { capture->is_invalid = true; }

cudaError_t check_capture(Stream* stream) {
  if (stream->capture) {
    const bool was_invalid = stream->capture->is_invalid;
    invalidate(stream->capture);
    return fail(was_invalid ? cudaErrorStreamCaptureInvalidated : cudaErrorStreamCaptureUnsupported);
  }
  // The call is illegal because the legacy stream would have to wait for blocking streams that capture.
  if (stream == find_stream(nullptr)) {
    for (const auto& capture : std::set(state().captures)) {
      for (const auto& [other, tail] : capture->tails) {
        if (other->is_blocking && other->device == stream->device) {
          invalidate(capture);
          return fail(cudaErrorStreamCaptureImplicit);
        }
      }
    }
  }
  return cudaSuccess;
}

bool is_forbidden_by_capture() {
  if (thread_capture_mode == cudaStreamCaptureModeRelaxed) return false;
  bool is_forbidden = false;
  for (const auto& capture : std::set(state().captures)) {
    if (capture->mode == cudaStreamCaptureModeRelaxed) continue;
    const bool is_own = capture->thread == std::this_thread::get_id();
    const bool is_others =
        capture->mode == cudaStreamCaptureModeGlobal && thread_capture_mode == cudaStreamCaptureModeGlobal;
    if (!is_own && !is_others) continue;
    invalidate(capture);
    is_forbidden = true;
  }
  return is_forbidden;
}

namespace {

void leave(const std::shared_ptr<Capture>& capture) {
  for (Stream* stream : state().streams) {
    if (stream->capture == capture) stream->capture = nullptr;
  }
  state().captures.erase(capture);
}

std::set<size_t> ancestors(const Graph& graph, const std::set<size_t>& tail) {
  std::set<size_t> all = tail;
  for (size_t i = graph.nodes.size(); i-- > 0;) {
    if (all.count(i)) all.insert(graph.nodes[i].deps.begin(), graph.nodes[i].deps.end());
  }
  return all;
}

// Holds the streams of destroyed graphs for later ones, keyed by device and by index within the graph.
std::map<std::pair<int, size_t>, std::vector<Stream*>>& free_lanes() {
  static auto* made = new std::map<std::pair<int, size_t>, std::vector<Stream*>>;
  return *made;
}

}  // namespace

}  // namespace fake_cuda

using namespace fake_cuda;

FAKE_CUDA_API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  use_context(__func__);
  std::swap(*mode, thread_capture_mode);
  return cudaSuccess;
}

FAKE_CUDA_API cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  use_context(__func__);
  Lock lock(state().mutex);
  Stream* stream = find_stream(handle);
  if (stream == nullptr) return fail(cudaErrorInvalidResourceHandle);
  if (stream == find_stream(nullptr)) return fail(cudaErrorStreamCaptureUnsupported);
  if (stream->capture) return fail(cudaErrorIllegalState);
  // torch writes the random seed and offset on this stream before the capture, and on another stream before a replay,
  // without ordering the two. Both write the same values, so this wait keeps the stand-in from reporting a race.
  if (stream->last) {
    if (const cudaError_t error = wait_for(lock, {stream->last}, "cudaStreamBeginCapture")) return error;
  }
  auto capture = std::make_shared<Capture>();
  capture->id = ++state().num_captures;
  capture->mode = mode;
  capture->thread = std::this_thread::get_id();
  capture->origin = stream;
  capture->tails[stream] = {};
  capture->lanes[stream] = 0;
  stream->capture = capture;
  state().captures.insert(capture);
  return cudaSuccess;
}

FAKE_CUDA_API cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  use_context(__func__);
  const Lock lock(state().mutex);
  *graph = nullptr;
  Stream* stream = find_stream(handle);
  if (stream == nullptr) return fail(cudaErrorInvalidResourceHandle);
  const std::shared_ptr<Capture> capture = stream->capture;
  if (!capture) return fail(cudaErrorIllegalState);
  if (capture->origin != stream) {
    invalidate(capture);
    return fail(cudaErrorStreamCaptureUnmatched);
  }
  if (capture->mode != cudaStreamCaptureModeRelaxed && capture->thread != std::this_thread::get_id()) {
    return fail(cudaErrorStreamCaptureWrongThread);
  }
  leave(capture);
  if (capture->is_invalid) return fail(cudaErrorStreamCaptureInvalidated);
  const std::set<size_t> joined = ancestors(*capture->graph, capture->tails[stream]);
  for (const auto& [other, tail] : capture->tails) {
    if (!std::includes(joined.begin(), joined.end(), tail.begin(), tail.end())) {
      return fail(cudaErrorStreamCaptureUnjoined);
    }
  }
  capture->graph->num_lanes = capture->lanes.size();
  *graph = reinterpret_cast<cudaGraph_t>(capture->graph.release());
  return cudaSuccess;
}

FAKE_CUDA_API cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  use_context(__func__);
  const Lock lock(state().mutex);
  Stream* stream = find_stream(handle);
  if (stream == nullptr) return fail(cudaErrorInvalidResourceHandle);
  *status = !stream->capture              ? cudaStreamCaptureStatusNone
            : stream->capture->is_invalid ? cudaStreamCaptureStatusInvalidated
                                          : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}

FAKE_CUDA_API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus* status,
                                                   unsigned long long* id, cudaGraph_t* graph,
                                                   const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges,
                                                   size_t* num_nodes) {
  use_context(__func__);
  if (const cudaError_t error = cudaStreamIsCapturing(handle, status)) return error;
  const Lock lock(state().mutex);
  Stream* stream = find_stream(handle);
  if (id != nullptr) *id = stream->capture ? stream->capture->id : 0;
  if (graph != nullptr) {
    *graph = stream->capture ? reinterpret_cast<cudaGraph_t>(stream->capture->graph.get()) : nullptr;
  }
  static thread_local std::vector<cudaGraphNode_t> tail;
  tail.clear();
  if (stream->capture) {
    for (const size_t node : stream->capture->tails[stream])
      tail.push_back(reinterpret_cast<cudaGraphNode_t>(node + 1));
  }
  if (nodes != nullptr) *nodes = tail.data();
  if (edges != nullptr) *edges = nullptr;
  if (num_nodes != nullptr) *num_nodes = tail.size();
  return cudaSuccess;
}

FAKE_CUDA_API cudaError_t cudaGraphGetNodes(cudaGraph_t handle, cudaGraphNode_t* nodes, size_t* num_nodes) {
  const auto* graph = reinterpret_cast<Graph*>(handle);
  if (graph == nullptr || num_nodes == nullptr) return fail(cudaErrorInvalidValue);
  const size_t asked = nodes == nullptr ? graph->nodes.size() : std::min(*num_nodes, graph->nodes.size());
  for (size_t i = 0; nodes != nullptr && i < asked; ++i) nodes[i] = reinterpret_cast<cudaGraphNode_t>(i + 1);
  *num_nodes = asked;
  return cudaSuccess;
}

FAKE_CUDA_API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* handle, cudaGraph_t graph_handle,
                                                        unsigned long long) {
  use_context(__func__);
  const Lock lock(state().mutex);
  const auto* graph = reinterpret_cast<Graph*>(graph_handle);
  if (graph == nullptr || handle == nullptr) return fail(cudaErrorInvalidValue);
  auto* exec = new GraphExec{graph->nodes, {}, graph->kept};
  for (size_t lane = 0; lane < graph->num_lanes; ++lane) {
    auto& free = free_lanes()[{current_device, lane}];
    if (free.empty()) {
      free.push_back(make_stream(current_device, false, "branch " + std::to_string(lane) + " of a graph"));
    }
    exec->lanes.push_back(free.back());
    free.pop_back();
  }
  *handle = reinterpret_cast<cudaGraphExec_t>(exec);
  return cudaSuccess;
}

FAKE_CUDA_API cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long flags) {
  return cudaGraphInstantiateWithFlags(exec, graph, flags);
}

FAKE_CUDA_API cudaError_t cudaGraphLaunch(cudaGraphExec_t handle, cudaStream_t stream_handle) {
  use_context(__func__);
  const Lock lock(state().mutex);
  const auto* exec = reinterpret_cast<GraphExec*>(handle);
  Stream* stream = find_stream(stream_handle);
  if (exec == nullptr || stream == nullptr) return fail(cudaErrorInvalidResourceHandle);
  if (stream->capture) {
    invalidate(stream->capture);
    return fail(cudaErrorNotSupported, "cudaGraphLaunch on a capturing stream is not supported by tests/fake_cuda");
  }
  close_after_fault();
  const OpRef fork = marker(stream, "a graph's launch");
  std::vector<OpRef> ops;
  std::set<size_t> begun;
  for (const Node& node : exec->nodes) {
    std::vector<OpRef> deps;
    if (begun.insert(node.lane).second) deps.push_back(fork);
    for (const size_t dep : node.deps) {
      if (exec->nodes[dep].lane != node.lane) deps.push_back(ops[dep]);
    }
    ops.push_back(append(exec->lanes[node.lane], node.work, std::move(deps)));
  }
  std::vector<OpRef> last;
  for (const size_t lane : begun) last.push_back(exec->lanes[lane]->last);
  auto work = std::make_shared<Work>();
  work->name = "a graph's end";
  work->run = [kept = exec->kept] { return FAKE_CUDA_DONE; };  // until then, as the graph itself may be destroyed
  append(stream, std::move(work), std::move(last));
  return cudaSuccess;
}

FAKE_CUDA_API cudaError_t cudaUserObjectCreate(cudaUserObject_t* object, void* pointer, cudaHostFn_t destroy,
                                               unsigned references, unsigned flags) {
  if (object == nullptr || destroy == nullptr || references != 1 || flags != cudaUserObjectNoDestructorSync) {
    return fail(cudaErrorInvalidValue);
  }
  *object = reinterpret_cast<cudaUserObject_t>(new std::shared_ptr<UserObject>(new UserObject(pointer, destroy)));
  return cudaSuccess;
}

FAKE_CUDA_API cudaError_t cudaUserObjectRelease(cudaUserObject_t object, unsigned references) {
  if (object == nullptr || references != 1) return fail(cudaErrorInvalidValue);
  delete reinterpret_cast<std::shared_ptr<UserObject>*>(object);
  return cudaSuccess;
}

// The graph takes the caller's only reference (cudaGraphUserObjectMove).
FAKE_CUDA_API cudaError_t cudaGraphRetainUserObject(cudaGraph_t handle, cudaUserObject_t object, unsigned references,
                                                    unsigned flags) {
  auto* graph = reinterpret_cast<Graph*>(handle);
  if (graph == nullptr || object == nullptr || references != 1 || flags != cudaGraphUserObjectMove) {
    return fail(cudaErrorInvalidValue);
  }
  graph->kept.push_back(*reinterpret_cast<std::shared_ptr<UserObject>*>(object));
  return cudaUserObjectRelease(object, 1);
}

FAKE_CUDA_API cudaError_t cudaGraphDestroy(cudaGraph_t handle) {
  use_context(__func__);
  delete reinterpret_cast<Graph*>(handle);
  return cudaSuccess;
}

FAKE_CUDA_API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t handle) {
  use_context(__func__);
  const Lock lock(state().mutex);
  const auto* exec = reinterpret_cast<GraphExec*>(handle);
  if (exec == nullptr) return fail(cudaErrorInvalidValue);
  for (size_t lane = 0; lane < exec->lanes.size(); ++lane) {
    free_lanes()[{exec->lanes[lane]->device, lane}].push_back(exec->lanes[lane]);
  }
  delete reinterpret_cast<GraphExec*>(handle);  // enqueued operations keep their work alive
  return cudaSuccess;
}

FAKE_CUDA_API cudaError_t cudaGraphDebugDotPrint(cudaGraph_t, const char*, unsigned) {
  return fail(cudaErrorNotSupported, "cudaGraphDebugDotPrint is not supported by tests/fake_cuda");
}

FAKE_CUDA_API cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t, cudaGraphNode_t*, cudaGraphEdgeData*, size_t*) {
  return fail(cudaErrorNotSupported, "cudaGraphNodeGetDependencies is not supported by tests/fake_cuda");
}
