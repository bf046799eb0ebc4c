// Declares the host memory that holds a snapshot until it is written, and is used again for the next one.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>

namespace drivetrain::checkpointing {

// A mapping of anonymous memory, aligned to pages and zero where it was never written.
class Pages {
 public:
  explicit Pages(int64_t bytes);  // throws std::bad_alloc
  ~Pages();
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;

  unsigned char* begin() const { return begin_; }
  int64_t size() const { return size_; }

 private:
  int64_t size_;
  unsigned char* begin_;
};

// Lends its pages to one snapshot at a time. They grow to the largest snapshot. Thread-safe.
class SnapshotSlab : public std::enable_shared_from_this<SnapshotSlab> {
 public:
  // Returns at least that many bytes; they come back when the last copy of the pointer goes. Throws EnvironmentError if
  // an earlier snapshot still holds the pages.
  std::shared_ptr<Pages> lend(int64_t bytes);

  // Returns the bytes that are mapped, whether lent or not.
  int64_t nbytes() const;

 private:
  mutable std::mutex mutex_;
  std::unique_ptr<Pages> pages_;
  int64_t lent_bytes_ = 0;
};

}  // namespace drivetrain::checkpointing
