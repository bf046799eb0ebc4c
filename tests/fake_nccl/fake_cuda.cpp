// Implements on the host the CUDA runtime functions that csrc/ddp/transport/nccl/nccl_communicator.cpp calls. A stream
// is a thread with a queue. The null stream is the calling thread itself, so that CPU tensors can replace CUDA tensors.
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <utility>

namespace {

struct Event {
  std::mutex mutex;
  std::condition_variable changed;
  int recorded = 0;
  int completed = 0;

  void complete(int number) {
    const std::lock_guard<std::mutex> lock(mutex);
    completed = std::max(completed, number);
    changed.notify_all();
  }
  void wait(int number) {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [&] { return completed >= number; });
  }
};

class Stream {
 public:
  Stream() : thread_([this] { run(); }) {}
  ~Stream() {
    push(nullptr);
    thread_.join();
  }
  void push(std::function<void()> work) {
    const std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back(std::move(work));
    changed_.notify_all();
  }

 private:
  void run() {
    while (true) {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [&] { return !queue_.empty(); });
      const std::function<void()> work = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      if (!work) return;
      work();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  std::thread thread_;
};

thread_local cudaError_t last_error = cudaSuccess;
std::mutex streams_mutex;
std::set<Stream*> streams;

void enqueue(cudaStream_t stream, std::function<void()> work) {
  if (stream == nullptr) {
    work();
  } else {
    reinterpret_cast<Stream*>(stream)->push(std::move(work));
  }
}

// A cudaEvent_t points to a shared pointer, because streams may still use an event that has been destroyed.
using Held = std::shared_ptr<Event>;
const Held& held(cudaEvent_t event) { return *reinterpret_cast<Held*>(event); }

// Aborts if the calling thread holds Python's GIL. A thread that waits for the device must not hold it, because the
// device's work may depend on other Python threads.
void refuse_gil(const char* call) {
  using Check = int (*)();
  const auto holds_gil = reinterpret_cast<Check>(dlsym(RTLD_DEFAULT, "PyGILState_Check"));
  const auto is_initialized = reinterpret_cast<Check>(dlsym(RTLD_DEFAULT, "Py_IsInitialized"));
  if (holds_gil == nullptr || is_initialized == nullptr || is_initialized() == 0 || holds_gil() == 0) return;
  std::fprintf(stderr, "fake CUDA: %s is called by a thread that holds Python's GIL\n", call);
  std::abort();
}

}  // namespace

extern "C" {

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
const char* cudaGetErrorName(cudaError_t) { return "cudaErrorFake"; }
const char* cudaGetErrorString(cudaError_t) { return "a fake error"; }
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned int, int) {
  const std::lock_guard<std::mutex> lock(streams_mutex);
  auto* made = new Stream;
  streams.insert(made);
  *stream = reinterpret_cast<cudaStream_t>(made);
  return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  auto* ended = reinterpret_cast<Stream*>(stream);
  {
    const std::lock_guard<std::mutex> lock(streams_mutex);
    streams.erase(ended);
  }
  delete ended;
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
  refuse_gil("cudaDeviceSynchronize");
  const std::lock_guard<std::mutex> lock(streams_mutex);
  for (Stream* stream : streams) {
    Event end;
    stream->push([&] { end.complete(1); });
    end.wait(1);
  }
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned int) {
  *event = reinterpret_cast<cudaEvent_t>(new Held(std::make_shared<Event>()));
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete reinterpret_cast<Held*>(event);
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  const Held recorded = held(event);
  int number = 0;
  {
    const std::lock_guard<std::mutex> lock(recorded->mutex);
    number = ++recorded->recorded;
  }
  enqueue(stream, [recorded, number] { recorded->complete(number); });
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  const std::lock_guard<std::mutex> lock(held(event)->mutex);
  if (held(event)->completed >= held(event)->recorded) return cudaSuccess;
  return last_error = cudaErrorNotReady;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int) {
  const Held awaited = held(event);
  int number = 0;
  {
    const std::lock_guard<std::mutex> lock(awaited->mutex);
    number = awaited->recorded;
  }
  enqueue(stream, [awaited, number] { awaited->wait(number); });
  return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  enqueue(stream, [=] { function(data); });
  return cudaSuccess;
}
}
