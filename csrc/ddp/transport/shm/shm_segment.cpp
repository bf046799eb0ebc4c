// Implements shared memory on memfd and mmap.
#include "ddp/transport/shm/shm_segment.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <string>
#include <utility>

#include "base/check.h"

namespace drivetrain::ddp {
namespace {

// The nonce has its own page before the data, so that the data stay aligned to pages, which aarch64 may have of 64 KiB.
constexpr int64_t kHeaderBytes = 64 << 10;
constexpr int64_t kReservedAtOnce = 16 << 20;

// MFD_NOEXEC_SEAL of Linux 6.3, which older C libraries do not name.
constexpr unsigned kNoExecution = 0x0008;
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

[[noreturn]] void fail(const std::string& call, int code) {
  throw EnvironmentError(text(call, ": ", std::strerror(code), " (errno ", code, ")"));
}

// Under vm.memfd_noexec=2 the kernel requires the flag, and an older kernel does not know it.
Descriptor create_file() {
  constexpr unsigned kFlags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
  Descriptor file(::memfd_create("drivetrain", kFlags | kNoExecution));
  if (file.get() < 0 && errno == EINVAL) file = Descriptor(::memfd_create("drivetrain", kFlags));
  if (file.get() < 0) fail("memfd_create", errno);
  return file;
}

}  // namespace

Descriptor& Descriptor::operator=(Descriptor&& other) noexcept {
  if (this != &other) {
    reset();
    std::swap(fd_, other.fd_);
  }
  return *this;
}

void Descriptor::reset() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

// A file's pages in this process. A list of all mappings lets a forked child find its own.
class Mapping {
 public:
  // keeps_file: this process created the file, and a forked child gets a private copy of it.
  Mapping(Descriptor file, int64_t bytes, bool keeps_file);
  ~Mapping();
  Mapping(const Mapping&) = delete;

  char* begin() const { return begin_; }
  int fd() const { return file_.get(); }
  int64_t bytes() const { return bytes_; }

  static uint64_t fork_depth() { return fork_depth_.load(std::memory_order_relaxed); }

 private:
  static void watch_forks();
  static void before_fork() { mutex_.lock(); }
  static void after_fork_in_parent() { mutex_.unlock(); }
  static void after_fork_in_child();
  void detach_from_parent();

  // None has a destructor, as a process may fork while it exits.
  static constinit inline std::mutex mutex_;
  static constinit inline Mapping* newest_ = nullptr;
  static constinit inline std::atomic<uint64_t> fork_depth_ = 0;

  Descriptor file_;
  char* begin_ = nullptr;
  const int64_t bytes_;
  bool is_private_ = false;
  Mapping* newer_ = nullptr;
  Mapping* older_ = nullptr;
};

void Mapping::watch_forks() {
  static const int failure = ::pthread_atfork(&before_fork, &after_fork_in_parent, &after_fork_in_child);
  if (failure != 0) fail("pthread_atfork", failure);
}

Mapping::Mapping(Descriptor file, int64_t bytes, bool keeps_file) : file_(std::move(file)), bytes_(bytes) {
  watch_forks();
  // No fork may happen between the mapping and its entry in the list.
  const std::lock_guard<std::mutex> lock(mutex_);
  // Populates this process's own memory, as page faults in the first step would cost more. A peer's memory would then
  // count as resident here as well.
  const int flags = MAP_SHARED | (keeps_file ? MAP_POPULATE : 0);
  void* address = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, file_.get(), 0);
  if (address == MAP_FAILED) fail(text("mmap of ", bytes, " bytes of shared memory"), errno);
  begin_ = static_cast<char*>(address);
  if (!keeps_file) file_.reset();
  older_ = newest_;
  if (older_ != nullptr) older_->newer_ = this;
  newest_ = this;
}

Mapping::~Mapping() {
  const std::lock_guard<std::mutex> lock(mutex_);
  (newer_ != nullptr ? newer_->older_ : newest_) = older_;
  if (older_ != nullptr) older_->newer_ = newer_;
  ::munmap(begin_, bytes_);
}

void Mapping::after_fork_in_child() {
  fork_depth_.fetch_add(1, std::memory_order_relaxed);
  for (Mapping* mapping = newest_; mapping != nullptr; mapping = mapping->older_) mapping->detach_from_parent();
  mutex_.unlock();
}

// Makes system calls only, as the child of a process with several threads may do nothing else.
void Mapping::detach_from_parent() {
  if (is_private_) return;  // a child's child has its parent's private pages
  is_private_ = true;
  const bool has_copy = file_.get() >= 0;
  // Keeps the address range of a peer's memory reserved until the destructor unmaps it.
  const int protection = has_copy ? PROT_READ | PROT_WRITE : PROT_NONE;
  const int flags = MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE | (has_copy ? 0 : MAP_ANONYMOUS);
  // If that fails, a write ends the child instead of changing its parent's gradients.
  if (::mmap(begin_, bytes_, protection, flags, file_.get(), 0) == MAP_FAILED) ::mprotect(begin_, bytes_, PROT_READ);
}

uint64_t fork_depth() { return Mapping::fork_depth(); }

void check_not_forked(uint64_t creator, const std::string& rank) {
  if (fork_depth() == creator) return;
  throw EnvironmentError(text("process ", ::getpid(), " was forked from ", rank,
                              ", and only the process that constructed the wrapper takes part in reductions"));
}

ShmSegment ShmSegment::create(int64_t bytes) {
  Descriptor file = create_file();
  const int64_t all = bytes + kHeaderBytes;
  if (::ftruncate(file.get(), all) != 0) fail(text("ftruncate of shared memory to ", all, " bytes"), errno);
  // Reserves in parts: a signal undoes the current part, and periodic signals must not undo everything each time.
  for (int64_t begin = 0; begin < all;) {
    const int64_t part = std::min(kReservedAtOnce, all - begin);
    if (::fallocate(file.get(), 0, begin, part) == 0) {
      begin += part;
    } else if (errno != EINTR) {
      fail(text("fallocate of ", all, " bytes of shared memory"), errno);
    }
  }
  if (::fcntl(file.get(), F_ADD_SEALS, kSeals) != 0) fail("fcntl F_ADD_SEALS of shared memory", errno);
  ShmSegment segment(std::make_unique<Mapping>(std::move(file), all, /*keeps_file=*/true));
  uint64_t nonce = 0;
  if (::getrandom(&nonce, sizeof(nonce), 0) != sizeof(nonce)) fail("getrandom", errno);
  std::memcpy(segment.mapping_->begin(), &nonce, sizeof(nonce));
  return segment;
}

ShmSegment ShmSegment::open(const Address& address) {
  const std::string path = text("/proc/", address.pid, "/fd/", address.fd);
  const std::string not_it = text(path, " is not the memory that its process announced");
  const int64_t all = address.bytes + kHeaderBytes;
  Descriptor file(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (file.get() < 0) fail("open of " + path, errno);
  struct stat facts = {};
  if (::fstat(file.get(), &facts) != 0) fail("fstat of " + path, errno);
  // An access beyond a file's end raises SIGBUS, and only a sealed file keeps its end.
  if (!S_ISREG(facts.st_mode) || facts.st_size < all) throw EnvironmentError(not_it);
  const int seals = ::fcntl(file.get(), F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) throw EnvironmentError(text(not_it, ": it is not sealed"));
  ShmSegment segment(std::make_unique<Mapping>(std::move(file), all, /*keeps_file=*/false));
  if (segment.nonce() != address.nonce) throw EnvironmentError(not_it);
  return segment;
}

ShmSegment::ShmSegment(std::unique_ptr<Mapping> mapping) : mapping_(std::move(mapping)) {}
ShmSegment::ShmSegment(ShmSegment&& other) noexcept = default;
ShmSegment::~ShmSegment() = default;

char* ShmSegment::data() const { return mapping_->begin() + kHeaderBytes; }
ShmSegment::Address ShmSegment::address() const {
  return {::getpid(), mapping_->fd(), nonce(), mapping_->bytes() - kHeaderBytes};
}

uint64_t ShmSegment::nonce() const {
  uint64_t nonce = 0;
  std::memcpy(&nonce, mapping_->begin(), sizeof(nonce));
  return nonce;
}

}  // namespace drivetrain::ddp
