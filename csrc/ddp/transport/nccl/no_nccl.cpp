// Stands for the NCCL transport in a build without nvcc or nccl.h.
#include "base/check.h"
#include "ddp/transport/transport.h"

namespace drivetrain::ddp {

struct NcclApi {};

std::shared_ptr<const NcclApi> find_nccl(const std::string&) {
  throw UnsupportedError(
      "drivetrain was built without NCCL. Put nvcc on PATH and install NCCL's header, which a CUDA build of torch "
      "brings: pip install nvidia-nccl-cu13, or -cu12 for CUDA 12. Then reinstall with \"pip install "
      "--no-build-isolation --force-reinstall --no-deps .\", or use transport='torch'.");
}

std::pair<std::string, std::string> path_and_version(const NcclApi&) { return {}; }

std::pair<int64_t, int64_t> nccl_memory_bytes() { return {0, 0}; }

std::unique_ptr<Comm> make_nccl_comm(const NcclOptions&) {
  throw UnsupportedError("drivetrain was built without NCCL");
}

}  // namespace drivetrain::ddp
