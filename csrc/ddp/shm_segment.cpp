// memfd and mmap; see shm_segment.h.
#include "ddp/shm_segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "base/check.h"

namespace drivetrain::ddp {
namespace {

// The nonce has a page of its own before the data, which stays aligned to pages.
constexpr int64_t kHeaderBytes = 4096;
constexpr int64_t kReservedAtOnce = 16 << 20;

[[noreturn]] void fail(const std::string& call, int code) {
  throw EnvironmentError(text(call, ": ", std::strerror(code), " (errno ", code, ")"));
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

Segment::Segment(Descriptor file, int64_t bytes) : file_(std::move(file)), mapped_bytes_(bytes + kHeaderBytes) {
  // Populated: page faults at the first step would cost more than here. With MAP_SHARED nothing is copied.
  void* address = ::mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, file_.get(), 0);
  if (address == MAP_FAILED) fail(text("mmap of ", mapped_bytes_, " bytes of shared memory"), errno);
  mapping_ = static_cast<char*>(address);
}

Segment Segment::create(int64_t bytes) {
  Descriptor file(::memfd_create("drivetrain", MFD_CLOEXEC));
  if (file.get() < 0) fail("memfd_create", errno);
  const int64_t all = bytes + kHeaderBytes;
  if (::ftruncate(file.get(), all) != 0) fail(text("ftruncate of shared memory to ", all, " bytes"), errno);
  // In parts: a signal undoes the part under way, and one that comes regularly must not undo everything each time.
  for (int64_t begin = 0; begin < all;) {
    const int64_t part = std::min(kReservedAtOnce, all - begin);
    if (::fallocate(file.get(), 0, begin, part) == 0) {
      begin += part;
    } else if (errno != EINTR) {
      fail(text("fallocate of ", all, " bytes of shared memory"), errno);
    }
  }
  Segment segment(std::move(file), bytes);
  uint64_t nonce = 0;
  if (::getrandom(&nonce, sizeof(nonce), 0) != sizeof(nonce)) fail("getrandom", errno);
  std::memcpy(segment.mapping_, &nonce, sizeof(nonce));
  return segment;
}

Segment Segment::open(int64_t pid, int64_t fd, uint64_t nonce, int64_t bytes) {
  const std::string path = text("/proc/", pid, "/fd/", fd);
  Descriptor file(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (file.get() < 0) fail("open of " + path, errno);
  struct stat facts = {};
  if (::fstat(file.get(), &facts) != 0) fail("fstat of " + path, errno);
  // Beyond a file's end lies SIGBUS.
  if (!S_ISREG(facts.st_mode) || facts.st_size < bytes + kHeaderBytes) {
    throw EnvironmentError(text(path, " is not the memory that its process announced"));
  }
  Segment segment(std::move(file), bytes);
  segment.close_file();
  if (segment.nonce() != nonce) throw EnvironmentError(text(path, " is not the memory that its process announced"));
  return segment;
}

Segment::Segment(Segment&& other) noexcept
    : file_(std::move(other.file_)), mapping_(other.mapping_), mapped_bytes_(other.mapped_bytes_) {
  other.mapping_ = nullptr;
}

Segment::~Segment() {
  if (mapping_ != nullptr) ::munmap(mapping_, mapped_bytes_);
}

char* Segment::data() const { return mapping_ + kHeaderBytes; }

uint64_t Segment::nonce() const {
  uint64_t nonce = 0;
  std::memcpy(&nonce, mapping_, sizeof(nonce));
  return nonce;
}

}  // namespace drivetrain::ddp
