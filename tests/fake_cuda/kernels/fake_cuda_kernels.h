// What launches of our kernels use of the stand-in, beside CUDA's functions.
#pragma once

namespace fake_cuda_kernels {

// While it lives, launches of this thread have that name.
class Named {
 public:
  explicit Named(const char* name);
  ~Named();
  Named(const Named&) = delete;
  Named& operator=(const Named&) = delete;

 private:
  const char* former_;
};

}  // namespace fake_cuda_kernels
