// Implements HostPages on mmap.
#include "base/host_pages.h"

#include <ATen/ops/from_blob.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <new>

#include "base/page_lock.h"

namespace drivetrain {
namespace {

int64_t whole_pages(int64_t bytes) {
  const int64_t page = ::sysconf(_SC_PAGESIZE);
  return std::max<int64_t>(1, (bytes + page - 1) / page) * page;
}

char* map(int64_t bytes) {
  void* const found = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (found == MAP_FAILED) throw std::bad_alloc();
  ::madvise(found, bytes, MADV_DONTFORK);  // a fork would copy page-locked memory at once
  return static_cast<char*>(found);
}

}  // namespace

std::shared_ptr<HostPages> HostPages::make(int64_t bytes) { return std::shared_ptr<HostPages>(new HostPages(bytes)); }

HostPages::HostPages(int64_t bytes) : size_(whole_pages(bytes)), begin_(map(size_)) {}

HostPages::~HostPages() {
  int64_t begin = 0;
  for (const int64_t end : ends_) {
    unlock_pages(begin_ + begin);
    begin = end;
  }
  ::munmap(begin_, size_);
}

bool HostPages::lock(int64_t bytes) {
  const int64_t begin = locked_bytes(), end = std::min(begin + whole_pages(bytes), size_);
  ends_.reserve(ends_.size() + 1);
  if (begin == end || !lock_pages(begin_ + begin, end - begin)) return false;
  ends_.push_back(end);
  return true;
}

at::Tensor HostPages::tensor() {
  return at::from_blob(begin_, {size_}, [held = shared_from_this()](void*) {}, at::kByte);
}

int64_t HostPages::locked_bytes() const { return ends_.empty() ? 0 : ends_.back(); }

}  // namespace drivetrain
