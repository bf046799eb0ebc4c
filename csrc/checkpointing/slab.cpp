// Implements the memory of snapshots on mmap.
#include "checkpointing/slab.h"

#include <sys/mman.h>

#include <new>
#include <utility>

#include "base/check.h"

namespace drivetrain::checkpointing {
namespace {

constexpr int64_t kHugePage = 2 << 20;

unsigned char* map(int64_t bytes) {
  void* found = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (found == MAP_FAILED) throw std::bad_alloc();
  ::madvise(found, bytes, MADV_HUGEPAGE);  // fewer page faults; some kernels have none
  ::madvise(found, bytes, MADV_DONTFORK);  // a forked data loader must not copy the pages that are written meanwhile
  return static_cast<unsigned char*>(found);
}

}  // namespace

Pages::Pages(int64_t bytes) : size_((bytes + kHugePage - 1) / kHugePage * kHugePage), begin_(map(size_)) {}

Pages::~Pages() { ::munmap(begin_, size_); }

std::shared_ptr<Pages> SnapshotSlab::lend(int64_t bytes) {
  std::unique_ptr<Pages> pages;
  {
    const std::lock_guard lock(mutex_);
    if (lent_bytes_ != 0) {
      throw EnvironmentError("the memory of an earlier snapshot is still being written: the disk does not answer.");
    }
    if (!pages_ || pages_->size() < bytes) {
      pages_.reset();  // first, so that both never exist at once
      pages_ = std::make_unique<Pages>(bytes);
    }
    lent_bytes_ = pages_->size();
    pages = std::move(pages_);
  }
  return {pages.release(), [slab = shared_from_this()](Pages* back) {
            const std::lock_guard lock(slab->mutex_);
            slab->pages_.reset(back);
            slab->lent_bytes_ = 0;
          }};
}

int64_t SnapshotSlab::nbytes() const {
  const std::lock_guard lock(mutex_);
  return pages_ ? pages_->size() : lent_bytes_;
}

}  // namespace drivetrain::checkpointing
