// Declares memory that the ranks of one host share, and that is freed with the last process that maps it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

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

// Throws EnvironmentError in a process that was forked from the one in which fork_depth() returned `creator`. rank: the
// name of that one.
void check_not_forked(uint64_t creator, const std::string& rank);

class Mapping;

// A mapped memfd. It has no name, so that nothing is left behind even after SIGKILL, and the size of /dev/shm does not
// limit it. Its pages are reserved when it is created, so that a lack of memory is an error then and no SIGBUS later.
// It is sealed, so that no process can shrink it. Throws EnvironmentError with the call, the code and its meaning.
//
// A forked child gets a private copy-on-write mapping of the memory that its parent created. It reads the parent's
// values, and its own writes stay private. Pages that it has not written follow the parent's. It cannot access memory
// that the parent opened.
class ShmSegment {
 public:
  // Says where another process finds the memory.
  struct Address {
    int64_t pid = 0;
    int64_t fd = -1;
    uint64_t nonce = 0;  // random; proves that it is the right memory
    int64_t bytes = 0;
  };

  // Creates zeroed memory of `bytes` bytes.
  static ShmSegment create(int64_t bytes);
  // Opens the memory that a process of this pid namespace has created.
  static ShmSegment open(const Address& address);

  ~ShmSegment();
  ShmSegment(ShmSegment&& other) noexcept;
  ShmSegment& operator=(ShmSegment&&) = delete;

  char* data() const;
  Address address() const;  // of memory that this process created, for its peers

 private:
  explicit ShmSegment(std::unique_ptr<Mapping> mapping);
  uint64_t nonce() const;

  std::unique_ptr<Mapping> mapping_;
};

}  // namespace drivetrain::ddp
