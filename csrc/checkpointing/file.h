// Declares files that are written past the page cache where the file system allows. Needs no torch header.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace drivetrain::checkpointing {

constexpr int64_t kBlockBytes = 4096;  // O_DIRECT needs memory, sizes and offsets of whole blocks

// Reports a failed system call: OSError in Python.
class FileError : public std::runtime_error {
 public:
  FileError(const std::string& call, std::string path, int code);
  const std::string& path() const { return path_; }
  int code() const { return code_; }

 private:
  std::string path_;
  int code_;
};

// A new file of a known size. Several threads may write different parts. Throws FileError.
class OutputFile {
 public:
  OutputFile(std::string path, int64_t size, bool direct);
  ~OutputFile();
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  // Writes bytes. The offset and the memory are multiples of a block. The memory is readable and zero up to the next
  // multiple of a block after its end.
  void write(int64_t offset, const void* bytes, int64_t size);

  // Sets the exact size, and returns once the file's contents are durable. Its name is durable after its folder's
  // fsync.
  void finish();

 private:
  std::string path_;
  int64_t size_;
  int fd_;
};

// An existing file, read through the page cache, whose reads ahead were faster than direct ones. Several threads may
// read. Throws FileError.
class InputFile {
 public:
  explicit InputFile(std::string path);
  ~InputFile();
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;

  // Reads up to `size` bytes and returns their number, which is smaller only at the end of the file.
  int64_t read(int64_t offset, void* bytes, int64_t size) const;

  // Lets the kernel read into the page cache, without waiting.
  void read_ahead(int64_t offset, int64_t size) const;

 private:
  std::string path_;
  int fd_;
};

}  // namespace drivetrain::checkpointing
