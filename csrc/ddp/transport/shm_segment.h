// Declares memory that the ranks of one host share, and that is freed with the last process that maps it.
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

// Returns the number of forks between this process and the one that loaded this library.
uint64_t fork_depth();

class Mapping;

// A mapped memfd. It has no name, so that nothing is left behind even after SIGKILL, and the size of /dev/shm does not
// limit it. Its pages are reserved when it is created, so that a lack of memory is an error then and no SIGBUS later.
// It is sealed, so that no process can shrink it. Throws EnvironmentError with the call, the code and its meaning.
//
// A forked child gets a private copy-on-write mapping of what its parent created. It reads the parent's values, and
// what it writes stays its own. Pages that it has not written follow the parent's. It cannot access what the parent
// opened.
class Segment {
 public:
  // Creates zeroed memory of `bytes` bytes.
  static Segment create(int64_t bytes);
  // Opens the memory that process `pid` of this pid namespace has under the file descriptor `fd` and with this nonce.
  static Segment open(int64_t pid, int64_t fd, uint64_t nonce, int64_t bytes);

  ~Segment();
  Segment(Segment&& other) noexcept;
  Segment& operator=(Segment&&) = delete;

  char* data() const;
  uint64_t nonce() const;  // random; proves to a peer that it opened the right memory
  int fd() const;          // for peers and forked children; only of memory that this process created

 private:
  explicit Segment(std::unique_ptr<Mapping> mapping);

  std::unique_ptr<Mapping> mapping_;
};

}  // namespace drivetrain::ddp
