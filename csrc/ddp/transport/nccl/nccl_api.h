// Declares NCCL's functions, which are looked up at first use, so that drivetrain loads without NCCL. Needs no torch
// header.
#pragma once

#include <nccl.h>

#include <memory>
#include <string>
#include <utility>

namespace drivetrain::ddp {

// The transport needs these functions.
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
  F(ncclReduceScatter)      \
  F(ncclReduce)             \
  F(ncclAllGather)          \
  F(ncclBroadcast)          \
  F(ncclSend)               \
  F(ncclRecv)

// These functions are null where the library is older.
#define DT_NCCL_OPTIONAL(F) \
  F(ncclMemAlloc)           \
  F(ncclMemFree)            \
  F(ncclCommRegister)       \
  F(ncclCommDeregister)     \
  F(ncclCommWindowRegister) \
  F(ncclCommWindowDeregister)

struct NcclApi {
  std::string path;     // of the library
  int number = 0;       // 22809
  std::string version;  // "2.28.9"
#define DT_NCCL_POINTER(name) decltype(&::name) name = nullptr;
  DT_NCCL_REQUIRED(DT_NCCL_POINTER)
  DT_NCCL_OPTIONAL(DT_NCCL_POINTER)
#undef DT_NCCL_POINTER
};

// Opens the library at that path. Throws EnvironmentError if that fails or a required function is missing.
std::shared_ptr<const NcclApi> open_nccl(const std::string& path);

// transport.h declares the following for code that does not include NCCL.
std::shared_ptr<const NcclApi> find_nccl(const std::string& fallback);
std::pair<std::string, std::string> path_and_version(const NcclApi& api);

}  // namespace drivetrain::ddp
