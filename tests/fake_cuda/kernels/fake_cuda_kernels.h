// Declares how a launch of the package's kernels gets a name for reports.
#pragma once

namespace fake_cuda_kernels {

// Names all launches of this thread while the object lives.
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
