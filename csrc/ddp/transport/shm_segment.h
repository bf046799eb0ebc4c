// Memory that the ranks of one host share: anonymous, reserved, gone with the last process that maps it.
#pragma once

#include <cstdint>
#include <memory>

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

// How many forks lie between this process and the one that loaded this library.
uint64_t fork_depth();

class Mapping;

// A mapped memfd: it has no name, so nothing is left behind even after SIGKILL, and the size of /dev/shm does not
// matter. Its pages are reserved when it is created, so that a lack of memory is an error then and not a SIGBUS later;
// it is sealed, so that no process can take them away. Throws EnvironmentError with the call, the code and its meaning.
//
// A forked child has what its parent created as a private copy on write: it reads the parent's values, and what it
// writes stays its own. Pages that it has not written follow the parent's. What the parent opened is not there for it.
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
  int fd() const;          // of memory that this process created; for peers, and for forked children

 private:
  explicit Segment(std::unique_ptr<Mapping> mapping);

  std::unique_ptr<Mapping> mapping_;
};

}  // namespace drivetrain::ddp
