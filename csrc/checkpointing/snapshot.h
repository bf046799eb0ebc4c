// Declares a snapshot: tensors are copied into a slab that has the layout of their file, and written from there.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "checkpointing/slab.h"
#include "checkpointing/strided_bytes.h"

namespace drivetrain::checkpointing {

constexpr int64_t kChunkBytes = 4 << 20;  // each chunk of a file has its own checksum

// Starts detached threads that run the work, and returns how many the system had. `nice` is added to the niceness.
int start_threads(const char* name, int count, int nice, const std::function<void()>& work);

struct Source {
  StridedBytes bytes;
  std::shared_ptr<const void> owner;  // released once the bytes are copied
};

// Copies and writes in detached threads of its own: a disk that never answers must not stop the process from ending.
// The threads and this object share the state. Thread-safe.
class Snapshot {
 public:
  // Starts to copy the header and the sources, one after another. The header has a multiple of kBlockBytes bytes.
  // replaces_chunks: each chunk is written only after replace_chunk() has given its encrypted bytes.
  Snapshot(SnapshotSlab& slab, const std::string& header, std::vector<Source> sources, bool replaces_chunks = false);
  ~Snapshot();
  Snapshot(const Snapshot&) = delete;
  Snapshot& operator=(const Snapshot&) = delete;

  int64_t nbytes() const;
  // Returns false if the sources are not copied in time.
  bool wait_copied(double timeout_s) const;
  // Returns the seconds from the construction until all sources were copied; nothing before.
  std::optional<double> copy_seconds() const;

  int64_t num_chunks() const;
  // Returns the bytes of a chunk, once they are copied; the pages live as long as the result. Returns nothing if they
  // are not copied in time, or if the snapshot has failed.
  std::shared_ptr<const unsigned char> chunk(int64_t index, double timeout_s) const;
  int64_t chunk_bytes(int64_t index) const;
  // Puts other bytes, as many as it has, in the place of a copied chunk, and lets it be written. May be called once per
  // chunk.
  void replace_chunk(int64_t index, const void* bytes);

  // Starts to write into a new file, once, past the page cache if `direct`. It may be called before all sources are
  // copied.
  void write(const std::string& path, bool direct = true);
  // Returns true once the file's contents are durable, and false if that takes longer. Throws FileError.
  bool wait_written(double timeout_s) const;

  // Stops a write that is in progress, and gives the memory back as soon as no thread uses it.
  void abandon();

  // Returns false if the memory is not given back in time.
  bool wait_released(double timeout_s) const;

  // Returns the CRC32C of each chunk of the file, once all sources are copied and replaced.
  std::vector<uint32_t> checksums() const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace drivetrain::checkpointing
