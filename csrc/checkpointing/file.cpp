// Implements files on pwrite, pread, O_DIRECT and fsync.
#include "checkpointing/file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "base/check.h"

namespace drivetrain::checkpointing {
namespace {

int64_t rounded_up(int64_t size) { return (size + kBlockBytes - 1) / kBlockBytes * kBlockBytes; }

// Opens with O_DIRECT if asked to, and without where the file system has none.
int open_new(const char* path, bool direct) {
  constexpr int kFlags = O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC;
  if (direct) {
    const int fd = ::open(path, kFlags | O_DIRECT, 0644);
    if (fd >= 0 || errno != EINVAL) return fd;
    ::unlink(path);  // some file systems create the file before they refuse the flag
  }
  return ::open(path, kFlags, 0644);
}

void leave_direct_mode(int fd) {
  const int flags = ::fcntl(fd, F_GETFL);
  if (flags >= 0) ::fcntl(fd, F_SETFL, flags & ~O_DIRECT);
}

bool is_direct(int fd) { return (::fcntl(fd, F_GETFL) & O_DIRECT) != 0; }

}  // namespace

FileError::FileError(const std::string& call, std::string path, int code)
    : std::runtime_error(text(call, " of ", path, ": ", std::strerror(code))), path_(std::move(path)), code_(code) {}

OutputFile::OutputFile(std::string path, int64_t size, bool direct)
    : path_(std::move(path)), size_(size), fd_(open_new(path_.c_str(), direct)) {
  if (fd_ < 0) throw FileError("open", path_, errno);
  // Reserved space lets direct writes run in parallel, and a full disk shows before anything is written.
  if (::fallocate(fd_, 0, 0, rounded_up(size)) != 0 && errno != EOPNOTSUPP && errno != ENOSYS) {
    const int code = errno;
    ::close(std::exchange(fd_, -1));
    throw FileError("fallocate", path_, code);
  }
}

OutputFile::~OutputFile() {
  if (fd_ >= 0) ::close(fd_);
}

void OutputFile::write(int64_t offset, const void* bytes, int64_t size) {
  const auto* from = static_cast<const char*>(bytes);
  int64_t left = is_direct(fd_) ? rounded_up(size) : size;
  while (left > 0) {
    const ssize_t written = ::pwrite(fd_, from, left, offset);
    if (written > 0) {
      from += written;
      offset += written;
      left -= written;
      // The rest of a short write may begin within a block.
      if (left > 0 && written % kBlockBytes != 0) leave_direct_mode(fd_);
      continue;
    }
    if (written < 0 && errno == EINTR) continue;
    if (written < 0 && errno == EINVAL && is_direct(fd_)) {  // the device has larger blocks
      leave_direct_mode(fd_);
      continue;
    }
    throw FileError("pwrite", path_, written == 0 ? ENOSPC : errno);
  }
}

void OutputFile::finish() {
  if (::ftruncate(fd_, size_) != 0) throw FileError("ftruncate", path_, errno);
  if (::fsync(fd_) != 0) throw FileError("fsync", path_, errno);
  // Some network file systems report a failed write only here.
  if (::close(std::exchange(fd_, -1)) != 0) throw FileError("close", path_, errno);
}

InputFile::InputFile(std::string path) : path_(std::move(path)), fd_(::open(path_.c_str(), O_RDONLY | O_CLOEXEC)) {
  if (fd_ < 0) throw FileError("open", path_, errno);
  ::posix_fadvise(fd_, 0, 0, POSIX_FADV_RANDOM);  // read_ahead() says what follows; only a hint
}

InputFile::~InputFile() { ::close(fd_); }

void InputFile::read_ahead(int64_t offset, int64_t size) const {
  ::posix_fadvise(fd_, offset, size, POSIX_FADV_WILLNEED);  // only a hint
}

int64_t InputFile::read(int64_t offset, void* bytes, int64_t size) const {
  int64_t done = 0;
  while (done < size) {
    const ssize_t found = ::pread(fd_, static_cast<char*>(bytes) + done, size - done, offset + done);
    if (found < 0 && errno == EINTR) continue;
    if (found < 0) throw FileError("pread", path_, errno);
    if (found == 0) break;
    done += found;
  }
  return done;
}

}  // namespace drivetrain::checkpointing
