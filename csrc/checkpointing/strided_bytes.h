// Declares access to the elements of a strided array in row-major order. Needs no torch header.
#pragma once

#include <cstdint>
#include <vector>

namespace drivetrain::checkpointing {

// The elements of an array, as a sequence of bytes in row-major order.
class StridedBytes {
 public:
  // strides: in bytes. Dimensions of size 1 and those that continue each other are merged.
  StridedBytes(const void* first, int64_t item_bytes, const std::vector<int64_t>& sizes,
               const std::vector<int64_t>& strides);

  int64_t size() const { return size_; }
  const unsigned char* first() const { return first_; }
  bool is_contiguous() const { return dims_.empty() || (dims_.size() == 1 && dims_[0].stride == item_bytes_); }

  // Copies bytes `begin` to `end`, both multiples of the element's size.
  void copy(void* to, int64_t begin, int64_t end) const;

 private:
  struct Dim {
    int64_t size, stride;
  };

  const unsigned char* first_;
  int64_t item_bytes_;
  int64_t size_;
  std::vector<Dim> dims_;  // the last varies fastest
};

}  // namespace drivetrain::checkpointing
