// Memory that the ranks of one host share: anonymous, reserved, gone with the last process that maps it.
#pragma once

#include <cstdint>

namespace drivetrain::ddp {

// An owned file descriptor.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() { reset(); }
  Descriptor(Descriptor&& other) noexcept : fd_(other.fd_) { other.fd_ = -1; }
  Descriptor& operator=(Descriptor&& other) noexcept;

  int get() const { return fd_; }
  void reset();

 private:
  int fd_ = -1;
};

// A mapped memfd: it has no name, so nothing is left behind even after SIGKILL, and the size of /dev/shm does not
// matter. Its pages are reserved when it is created, so that a lack of memory is an error then and not a SIGBUS later.
// Throws EnvironmentError with the call, the code and its meaning.
class Segment {
 public:
  // Zeroed memory of `bytes` bytes.
  static Segment create(int64_t bytes);
  // The same memory as process `pid` of the same pid namespace has under the file descriptor `fd` and with this nonce.
  static Segment open(int64_t pid, int64_t fd, uint64_t nonce, int64_t bytes);

  ~Segment();
  Segment(Segment&& other) noexcept;
  Segment& operator=(Segment&&) = delete;

  char* data() const;
  uint64_t nonce() const;  // random; proves to a peer that it opened what it was meant to
  int fd() const { return file_.get(); }
  // The mapping stays. To be called once all peers have opened it.
  void close_file() { file_.reset(); }

 private:
  Segment(Descriptor file, int64_t bytes);

  Descriptor file_;
  char* mapping_ = nullptr;
  int64_t mapped_bytes_ = 0;
};

}  // namespace drivetrain::ddp
