// Copies tensors chunk by chunk with their checksums, and writes the chunks in order as they become ready.
#include "checkpointing/snapshot.h"

#include <pthread.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#include "base/check.h"
#include "checkpointing/crc32c.h"
#include "checkpointing/file.h"

namespace drivetrain::checkpointing {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kChunksPerWrite = 2;
constexpr int kWriters = 2;
constexpr int kNice = 10;  // of the threads that copy and write: the training goes first

void lower_priority(int nice) {
  const auto self = static_cast<id_t>(::syscall(SYS_gettid));
  errno = 0;
  const int now = ::getpriority(PRIO_PROCESS, self);
  if (errno == 0) ::setpriority(PRIO_PROCESS, self, std::min(19, now + nice));
}

}  // namespace

int start_threads(const char* name, int count, int nice, const std::function<void()>& work) {
  for (int i = 0; i < count; ++i) {
    try {
      std::thread([=] {
        ::pthread_setname_np(::pthread_self(), name);
        lower_priority(nice);
        work();
      }).detach();
    } catch (const std::system_error&) {
      return i;
    }
  }
  return count;
}

// A part of the file: the header or a tensor. Named outside the anonymous namespace, as Snapshot::State has fields of
// it.
struct FilePart {
  int64_t begin, end;
  Source source;
  std::atomic<int64_t> chunks_left;

  FilePart(int64_t at, Source from)
      : begin(at),
        end(at + from.bytes.size()),
        source(std::move(from)),
        chunks_left(begin == end ? 0 : (end - 1) / kChunkBytes - begin / kChunkBytes + 1) {}
};

struct Snapshot::State {
  std::string header;
  std::vector<std::unique_ptr<FilePart>> parts;  // the header and the sources, in the order of the file
  int64_t nbytes = 0;
  int64_t num_chunks = 0;
  std::shared_ptr<Pages> pages;
  std::vector<uint32_t> checksums;
  Clock::time_point began = Clock::now();

  std::atomic<int64_t> next_to_copy{0}, next_to_write{0};
  std::atomic<bool> is_abandoned{false};

  std::mutex mutex;
  std::condition_variable changed;
  // The mutex guards the rest.
  std::vector<bool> chunk_is_copied;
  std::vector<bool> chunk_is_replaced;  // empty if none will be
  int64_t chunks_copied = 0;
  std::optional<double> copy_seconds;
  int writers = 0;
  bool is_written = false;
  std::unique_ptr<OutputFile> file;
  std::exception_ptr error;

  void copy_chunks();
  void copy_chunk(int64_t chunk);
  void write_chunks();
  bool wait_for_chunks(int64_t begin, int64_t end);
  void end_writer();
  void release_if_idle();  // with the mutex
  void fail(std::exception_ptr why);
};

void Snapshot::State::copy_chunks() {
  for (int64_t chunk; (chunk = next_to_copy.fetch_add(1)) < num_chunks;) copy_chunk(chunk);
}

void Snapshot::State::copy_chunk(int64_t chunk) {
  const int64_t first = chunk * kChunkBytes, last = std::min(first + kChunkBytes, nbytes);
  uint32_t checksum = 0;
  const auto after = [](int64_t at, const std::unique_ptr<FilePart>& part) { return at < part->end; };
  auto next = std::upper_bound(parts.begin(), parts.end(), first, after);
  for (; next != parts.end() && (*next)->begin < last; ++next) {
    FilePart& part = **next;
    const int64_t begin = std::max(first, part.begin), end = std::min(last, part.end);
    if (begin >= end) continue;
    unsigned char* to = pages->begin() + begin;
    const StridedBytes& from = part.source.bytes;
    if (from.is_contiguous()) {
      checksum = copy_crc32c(checksum, to, from.first() + (begin - part.begin), end - begin);
    } else {
      from.copy(to, begin - part.begin, end - part.begin);
      checksum = crc32c(checksum, to, end - begin);
    }
    if (part.chunks_left.fetch_sub(1) == 1) part.source.owner.reset();
  }
  checksums[chunk] = checksum;
  const std::lock_guard lock(mutex);
  chunk_is_copied[chunk] = true;
  if (++chunks_copied == num_chunks) {
    copy_seconds = std::chrono::duration<double>(Clock::now() - began).count();
    release_if_idle();
  }
  changed.notify_all();
}

// Returns false if the snapshot fails meanwhile.
bool Snapshot::State::wait_for_chunks(int64_t begin, int64_t end) {
  std::unique_lock lock(mutex);
  changed.wait(lock, [&] {
    if (error || is_abandoned) return true;
    const std::vector<bool>& is_ready = chunk_is_replaced.empty() ? chunk_is_copied : chunk_is_replaced;
    return std::all_of(is_ready.begin() + begin, is_ready.begin() + end, [](bool is) { return is; });
  });
  return !error && !is_abandoned;
}

void Snapshot::State::write_chunks() {
  try {
    for (int64_t begin; (begin = next_to_write.fetch_add(kChunksPerWrite)) < num_chunks;) {
      const int64_t end = std::min(begin + kChunksPerWrite, num_chunks);
      if (!wait_for_chunks(begin, end)) break;
      const int64_t first = begin * kChunkBytes, last = std::min(end * kChunkBytes, nbytes);
      file->write(first, pages->begin() + first, last - first);
    }
  } catch (...) {
    fail(std::current_exception());
  }
  end_writer();
}

// Gives the memory back once no thread uses it and none will.
void Snapshot::State::release_if_idle() {
  if (chunks_copied == num_chunks && writers == 0 && (is_written || error || is_abandoned)) pages.reset();
}

// The last writer makes the file durable.
void Snapshot::State::end_writer() {
  {
    const std::lock_guard lock(mutex);
    if (writers > 1) {
      --writers;
      return;
    }
  }
  bool is_durable = false;
  try {
    if (!error && !is_abandoned) {  // no other thread changes it anymore
      file->finish();
      is_durable = true;
    }
  } catch (...) {
    fail(std::current_exception());
  }
  file.reset();
  const std::lock_guard lock(mutex);
  writers = 0;
  is_written = is_durable;
  release_if_idle();
  changed.notify_all();
}

void Snapshot::State::fail(std::exception_ptr why) {
  const std::lock_guard lock(mutex);
  if (!error) error = std::move(why);
  changed.notify_all();
}

Snapshot::Snapshot(SnapshotSlab& slab, const std::string& header, std::vector<Source> sources, bool replaces_chunks)
    : state_(std::make_shared<State>()) {
  State& state = *state_;
  DT_INVARIANT(header.size() % kBlockBytes == 0 && !header.empty());
  state.header = header;
  const auto size = static_cast<int64_t>(header.size());
  state.parts.reserve(sources.size() + 1);
  state.parts.push_back(
      std::make_unique<FilePart>(0, Source{StridedBytes(state.header.data(), 1, {size}, {1}), nullptr}));
  for (Source& source : sources) {
    const int64_t at = state.parts.back()->end;
    state.parts.push_back(std::make_unique<FilePart>(at, std::move(source)));
  }
  state.nbytes = state.parts.back()->end;
  state.num_chunks = (state.nbytes + kChunkBytes - 1) / kChunkBytes;
  state.checksums.resize(state.num_chunks);
  state.chunk_is_copied.resize(state.num_chunks);
  if (replaces_chunks) state.chunk_is_replaced.resize(state.num_chunks);
  for (const auto& part : state.parts) {
    if (part->begin == part->end) part->source.owner.reset();
  }
  const int64_t padded = (state.nbytes + kBlockBytes - 1) / kBlockBytes * kBlockBytes;
  state.pages = slab.lend(padded);
  std::memset(state.pages->begin() + state.nbytes, 0, padded - state.nbytes);
  if (start_threads("dt-ckpt-copy", 1, kNice, [state = state_] { state->copy_chunks(); }) == 0) {
    throw FileError("pthread_create", "a snapshot", EAGAIN);
  }
}

Snapshot::~Snapshot() { abandon(); }

void Snapshot::abandon() {
  state_->is_abandoned = true;
  const std::lock_guard lock(state_->mutex);
  state_->release_if_idle();
  state_->changed.notify_all();
}

bool Snapshot::wait_released(double timeout_s) const {
  std::unique_lock lock(state_->mutex);
  return state_->changed.wait_for(lock, std::chrono::duration<double>(timeout_s), [&] { return !state_->pages; });
}

int64_t Snapshot::nbytes() const { return state_->nbytes; }

int64_t Snapshot::num_chunks() const { return state_->num_chunks; }

int64_t Snapshot::chunk_bytes(int64_t index) const {
  return std::min(kChunkBytes, state_->nbytes - index * kChunkBytes);
}

std::shared_ptr<const unsigned char> Snapshot::chunk(int64_t index, double timeout_s) const {
  DT_INVARIANT(0 <= index && index < state_->num_chunks);
  std::unique_lock lock(state_->mutex);
  const bool is_copied = state_->changed.wait_for(lock, std::chrono::duration<double>(timeout_s),
                                                  [&] { return state_->chunk_is_copied[index] || state_->error; });
  if (!is_copied || state_->error || !state_->pages) return nullptr;
  return {state_->pages, state_->pages->begin() + index * kChunkBytes};
}

void Snapshot::replace_chunk(int64_t index, const void* bytes) {
  std::shared_ptr<Pages> pages;
  {
    const std::lock_guard lock(state_->mutex);
    DT_INVARIANT(0 <= index && index < static_cast<int64_t>(state_->chunk_is_replaced.size()));
    DT_INVARIANT(state_->chunk_is_copied[index] && !state_->chunk_is_replaced[index]);
    pages = state_->pages;
  }
  if (!pages) return;  // the snapshot has failed or was abandoned
  const uint32_t checksum = copy_crc32c(0, pages->begin() + index * kChunkBytes, bytes, chunk_bytes(index));
  const std::lock_guard lock(state_->mutex);
  state_->checksums[index] = checksum;
  state_->chunk_is_replaced[index] = true;
  state_->changed.notify_all();
}

// Copies as well, because the threads of low priority may get no core for long while others want all of them.
bool Snapshot::wait_copied(double timeout_s) const {
  const auto deadline =
      Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout_s));
  while (Clock::now() < deadline) {
    const int64_t chunk = state_->next_to_copy.fetch_add(1);
    if (chunk >= state_->num_chunks) break;
    state_->copy_chunk(chunk);
  }
  std::unique_lock lock(state_->mutex);
  return state_->changed.wait_until(lock, deadline, [&] { return state_->chunks_copied == state_->num_chunks; });
}

std::optional<double> Snapshot::copy_seconds() const {
  const std::lock_guard lock(state_->mutex);
  return state_->copy_seconds;
}

void Snapshot::write(const std::string& path, bool direct) {
  State& state = *state_;
  DT_INVARIANT(!state.file && !state.is_written);
  auto file = std::make_unique<OutputFile>(path, state.nbytes, direct);
  const int64_t units = (state.num_chunks + kChunksPerWrite - 1) / kChunksPerWrite;
  const int count = static_cast<int>(std::min<int64_t>(kWriters, units));
  {
    const std::lock_guard lock(state.mutex);
    state.file = std::move(file);
    state.writers = count;
  }
  const int started = start_threads("dt-ckpt-write", count, kNice, [state = state_] { state->write_chunks(); });
  if (started == 0) state.fail(std::make_exception_ptr(FileError("pthread_create", path, EAGAIN)));
  for (int i = started; i < count; ++i) state.end_writer();
}

bool Snapshot::wait_written(double timeout_s) const {
  std::unique_lock lock(state_->mutex);
  state_->changed.wait_for(lock, std::chrono::duration<double>(timeout_s),
                           [&] { return state_->is_written || state_->error; });
  if (state_->error) std::rethrow_exception(state_->error);
  return state_->is_written;
}

std::vector<uint32_t> Snapshot::checksums() const {
  const std::lock_guard lock(state_->mutex);
  DT_INVARIANT(state_->chunks_copied == state_->num_chunks);
  return state_->checksums;
}

}  // namespace drivetrain::checkpointing
