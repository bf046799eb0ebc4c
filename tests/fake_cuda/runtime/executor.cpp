// Implements the executor: one thread that runs each stream's work in order, and the streams in a random order.
#include <pthread.h>

#include <cstdlib>

#include "core.h"

namespace fake_cuda {

namespace {

thread_local bool am_executor = false;
OpRef current_op;  // used by the executor only

// Returns whether all operations of other streams that must run before this one are done.
bool may_run(const Op& op) {
  for (const OpRef& dep : op.deps) {
    if (!dep->is_done) return false;
  }
  return true;
}

int run(const OpRef& op) {
  current_op = op;
  if (!op->has_begun) {
    op->has_begun = true;
    for (const Range& range : op->work->ranges) check_access(*op, range.address, range.bytes, range.writes);
  }
  const int outcome = op->work->run ? op->work->run() : FAKE_CUDA_DONE;
  current_op = nullptr;
  return outcome;
}

void finish(const OpRef& op, int outcome) {
  State& all = state();
  Stream* stream = op->stream;
  op->is_done = true;
  if (all.record && op->work->run) {
    *all.record << op->work->name << '\t' << op->bytes_read << '\t' << op->bytes_written << '\n';
  }
  op->done_at = std::chrono::steady_clock::now();
  op->deps.clear();
  op->work = nullptr;
  if (outcome == FAKE_CUDA_FAILED) all.device_error = cudaErrorLaunchFailure;
  stream->queue.pop_front();
  if (!stream->queue.empty()) stream->queue.front()->ready = op->done_at + stream->queue.front()->delay;
  all.done.notify_all();
}

void execute() {
  am_executor = true;
  pthread_setname_np(pthread_self(), "fake_cuda");
  State& all = state();
  Lock lock(all.mutex);
  while (true) {
    if (all.is_stopping) {
      all.is_running = false;
      all.done.notify_all();
      return;
    }
    const Time now = std::chrono::steady_clock::now();
    Time next = Time::max();
    std::vector<OpRef> able;
    for (Stream* stream : all.streams) {
      if (stream->queue.empty()) continue;
      const OpRef& op = stream->queue.front();
      if (!may_run(*op)) continue;
      if (op->ready <= now || (op->is_urgent && !op->has_begun)) {
        able.push_back(op);
      } else {
        next = std::min(next, op->ready);
      }
    }
    if (able.empty()) {
      if (next == Time::max()) {
        all.changed.wait(lock);
      } else {
        all.changed.wait_until(lock, next);
      }
      continue;
    }
    const OpRef op = able[able.size() == 1 ? 0 : all.random() % able.size()];
    // The work is kept alive past finish(), because its destructor may call into torch and must run without the lock.
    const auto work = op->work;
    all.is_running = true;
    lock.unlock();
    const int outcome = run(op);
    lock.lock();
    all.is_running = false;
    if (outcome == FAKE_CUDA_AGAIN) {
      op->ready = std::chrono::steady_clock::now() + std::chrono::microseconds(100);
    } else {
      finish(op, outcome);
    }
    lock.unlock();
    // The operation and its work are released here, without the lock.
    const_cast<std::shared_ptr<const Work>&>(work).reset();
    const_cast<OpRef&>(op).reset();
    able.clear();
    lock.lock();
  }
}

// Stops the executor at exit, because running work must not use objects that static destructors have destroyed.
void stop() {
  State& all = state();
  Lock lock(all.mutex);
  all.is_stopping = true;
  all.changed.notify_all();
  all.done.wait_for(lock, std::chrono::seconds(5), [&] { return !all.is_running; });
}

}  // namespace

void start_executor() {
  State& all = state();
  if (all.has_executor) return;
  all.has_executor = true;
  std::atexit(&stop);
  std::thread(&execute).detach();
}

bool is_executor() { return am_executor; }
const OpRef& running() { return current_op; }

}  // namespace fake_cuda

FAKE_CUDA_API int fake_cuda_is_executor() { return fake_cuda::is_executor(); }

FAKE_CUDA_API void fake_cuda_record(const char* path) {
  const fake_cuda::Lock lock(fake_cuda::state().mutex);
  fake_cuda::state().record = path != nullptr ? std::make_unique<std::ofstream>(path) : nullptr;
}
