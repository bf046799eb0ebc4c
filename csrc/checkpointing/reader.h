// Declares the reading of chunks of a file into tensors, with a check of their checksums. Needs no torch header.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace drivetrain::checkpointing {

// Contiguous memory that receives the bytes of a file from `begin` on.
struct Target {
  int64_t begin;
  void* bytes;
  int64_t size;
  std::shared_ptr<const void> owner;
};

using BadChunk = std::pair<int64_t, uint32_t>;  // its index, and the checksum of the bytes found

struct ReadJob {
  std::string path;
  int64_t file_bytes;
  std::vector<int64_t> chunks;     // to read
  std::vector<uint32_t> expected;  // their checksums
  std::vector<Target> targets;     // in the order of the file; bytes of other chunks are not written
};

// Reads chunks in detached threads of its own. Thread-safe.
class CheckpointReader {
 public:
  CheckpointReader(ReadJob job, int num_threads);
  ~CheckpointReader();
  CheckpointReader(const CheckpointReader&) = delete;
  CheckpointReader& operator=(const CheckpointReader&) = delete;

  // Returns the chunks whose checksums do not hold, in order; nothing if reading takes longer. Throws FileError.
  std::optional<std::vector<BadChunk>> wait(double timeout_s) const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace drivetrain::checkpointing
