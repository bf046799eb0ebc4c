// Reads chunks of a file in parallel, verifies them, and copies them into tensors.
#include "checkpointing/reader.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <mutex>
#include <utility>

#include "checkpointing/crc32c.h"
#include "checkpointing/file.h"
#include "checkpointing/slab.h"
#include "checkpointing/snapshot.h"

namespace drivetrain::checkpointing {
namespace {

// Chunks that the kernel is asked to read ahead. Its own guess fails, because threads read chunks in turns.
constexpr size_t kChunksAhead = 16;

// Returns the first target that ends after `at`.
std::vector<Target>::const_iterator first_after(const std::vector<Target>& targets, int64_t at) {
  const auto ends_after = [](int64_t place, const Target& target) { return place < target.begin + target.size; };
  return std::upper_bound(targets.begin(), targets.end(), at, ends_after);
}

}  // namespace

struct CheckpointReader::State {
  explicit State(ReadJob from) : job(std::move(from)), file(job.path) {}

  const ReadJob job;
  const InputFile file;
  std::atomic<size_t> next{0};
  std::atomic<bool> is_abandoned{false};

  std::mutex mutex;
  std::condition_variable changed;
  // The mutex guards the rest.
  int readers = 0;
  std::vector<BadChunk> bad;
  std::exception_ptr error;

  void read_chunks();
  void read_chunk(size_t index, unsigned char* buffer);
  void read_ahead(size_t index) const;
  unsigned char* place_of(int64_t first, int64_t last) const;
  void scatter(const unsigned char* buffer, int64_t first, int64_t last) const;
  void end_reader();
};

void CheckpointReader::State::read_chunks() {
  try {
    const Pages buffer(kChunkBytes);
    for (size_t index; !is_abandoned && (index = next.fetch_add(1)) < job.chunks.size();) {
      read_chunk(index, buffer.begin());
    }
  } catch (...) {
    const std::lock_guard lock(mutex);
    if (!error) error = std::current_exception();
    is_abandoned = true;
  }
  end_reader();
}

void CheckpointReader::State::read_chunk(size_t index, unsigned char* buffer) {
  const int64_t chunk = job.chunks[index];
  const int64_t first = chunk * kChunkBytes, last = std::min(first + kChunkBytes, job.file_bytes);
  read_ahead(index);
  unsigned char* const whole = place_of(first, last);
  if (whole != nullptr) buffer = whole;
  const int64_t found = file.read(first, buffer, last - first);
  const uint32_t checksum = crc32c(0, buffer, found);
  if (found < last - first || checksum != job.expected[index]) {
    const std::lock_guard lock(mutex);
    bad.push_back({chunk, checksum});
    return;
  }
  if (whole == nullptr) scatter(buffer, first, last);
}

// The first chunk asks for all chunks of the window, and each later one for the chunk that enters it.
void CheckpointReader::State::read_ahead(size_t index) const {
  const size_t end = std::min(index + kChunksAhead, job.chunks.size());
  for (size_t next = index == 0 ? 1 : end - 1; next < end; ++next) {
    file.read_ahead(job.chunks[next] * kChunkBytes, kChunkBytes);
  }
}

// Returns where the bytes of one target begin if they are all of the range, and null otherwise.
unsigned char* CheckpointReader::State::place_of(int64_t first, int64_t last) const {
  const auto target = first_after(job.targets, first);
  if (target == job.targets.end() || target->begin > first || target->begin + target->size < last) return nullptr;
  return static_cast<unsigned char*>(target->bytes) + (first - target->begin);
}

void CheckpointReader::State::scatter(const unsigned char* buffer, int64_t first, int64_t last) const {
  for (auto target = first_after(job.targets, first); target != job.targets.end() && target->begin < last; ++target) {
    const int64_t begin = std::max(first, target->begin), end = std::min(last, target->begin + target->size);
    if (begin >= end) continue;
    std::memcpy(static_cast<unsigned char*>(target->bytes) + (begin - target->begin), buffer + (begin - first),
                end - begin);
  }
}

void CheckpointReader::State::end_reader() {
  const std::lock_guard lock(mutex);
  --readers;
  changed.notify_all();
}

CheckpointReader::CheckpointReader(ReadJob job, int num_threads) : state_(std::make_shared<State>(std::move(job))) {
  const int count = static_cast<int>(std::min<size_t>(num_threads, state_->job.chunks.size()));
  state_->readers = count;
  const int started = start_threads("dt-ckpt-read", count, 0, [state = state_] { state->read_chunks(); });
  if (started == 0 && count > 0) throw FileError("pthread_create", state_->job.path, EAGAIN);
  for (int i = started; i < count; ++i) state_->end_reader();
}

CheckpointReader::~CheckpointReader() { state_->is_abandoned = true; }

std::optional<std::vector<BadChunk>> CheckpointReader::wait(double timeout_s) const {
  std::unique_lock lock(state_->mutex);
  const bool is_done =
      state_->changed.wait_for(lock, std::chrono::duration<double>(timeout_s), [&] { return state_->readers == 0; });
  if (!is_done) return std::nullopt;
  if (state_->error) std::rethrow_exception(state_->error);
  std::vector<BadChunk> bad = state_->bad;
  std::sort(bad.begin(), bad.end());
  return bad;
}

}  // namespace drivetrain::checkpointing
