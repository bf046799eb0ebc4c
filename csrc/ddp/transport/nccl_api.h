// NCCL's functions, looked up in its library when they are first wanted: drivetrain itself loads where there is none.
// Needs no torch header.
#pragma once

#include <nccl.h>

#include <memory>
#include <string>
#include <utility>

namespace drivetrain::ddp {

// Without these there is no transport.
#define DT_NCCL_REQUIRED(F) \
  F(ncclGetUniqueId)        \
  F(ncclCommInitRankConfig) \
  F(ncclCommFinalize)       \
  F(ncclCommDestroy)        \
  F(ncclCommAbort)          \
  F(ncclCommGetAsyncError)  \
  F(ncclGetErrorString)     \
  F(ncclGetLastError)       \
  F(ncclGroupStart)         \
  F(ncclGroupEnd)           \
  F(ncclAllReduce)          \
  F(ncclBroadcast)

// Null where the library is older.
#define DT_NCCL_OPTIONAL(F) \
  F(ncclMemAlloc)           \
  F(ncclMemFree)            \
  F(ncclCommRegister)       \
  F(ncclCommDeregister)     \
  F(ncclCommWindowRegister) \
  F(ncclCommWindowDeregister)

struct NcclApi {
  std::string path;     // of the library
  std::string version;  // "2.28.9"
#define DT_NCCL_POINTER(name) decltype(&::name) name = nullptr;
  DT_NCCL_REQUIRED(DT_NCCL_POINTER)
  DT_NCCL_OPTIONAL(DT_NCCL_POINTER)
#undef DT_NCCL_POINTER
};

// Opens that library. Throws EnvironmentError if that fails, or where a required function is missing.
std::shared_ptr<const NcclApi> open_nccl(const std::string& path);

// As transport.h declares them for those that do not know NCCL.
std::shared_ptr<const NcclApi> find_nccl(const std::string& fallback);
std::pair<std::string, std::string> path_and_version(const NcclApi& api);

}  // namespace drivetrain::ddp
