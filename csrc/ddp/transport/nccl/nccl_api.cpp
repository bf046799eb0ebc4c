// Opens libnccl.so.2 and looks up its functions.
#include "ddp/transport/nccl/nccl_api.h"

#include <dlfcn.h>
#include <link.h>

#include "base/check.h"

namespace drivetrain::ddp {
namespace {

constexpr const char* kLibrary = "libnccl.so.2";

template <class Function>
void look_up(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(::dlsym(library, name));
}

// Returns "2.28.9" for 22809. Versions before 2.9 have one digit less.
std::string dotted(int code) {
  const int major = code < 10000 ? code / 1000 : code / 10000;
  return text(major, ".", code < 10000 ? code / 100 % 10 : code / 100 % 100, ".", code % 100);
}

// Never closes the library: NCCL's threads may outlive every communicator by a moment.
std::shared_ptr<const NcclApi> functions_of(void* library) {
  auto api = std::make_shared<NcclApi>();
  const link_map* map = nullptr;
  if (::dlinfo(library, RTLD_DI_LINKMAP, &map) == 0) api->path = map->l_name;
  decltype(&ncclGetVersion) get_version = nullptr;
  look_up(library, "ncclGetVersion", get_version);
  if (get_version == nullptr || get_version(&api->number) != ncclSuccess) {
    throw EnvironmentError(text(api->path, " does not tell its version: it is not NCCL."));
  }
  api->version = dotted(api->number);
  std::string missing;
#define DT_LOOK_UP(name) look_up(library, #name, api->name);
#define DT_LOOK_UP_REQUIRED(name) \
  DT_LOOK_UP(name)                \
  if (api->name == nullptr) missing += (missing.empty() ? "" : ", ") + std::string(#name);
  DT_NCCL_REQUIRED(DT_LOOK_UP_REQUIRED)
  DT_NCCL_OPTIONAL(DT_LOOK_UP)
#undef DT_LOOK_UP_REQUIRED
#undef DT_LOOK_UP
  if (!missing.empty()) {
    throw EnvironmentError(text("NCCL ", api->version, " at ", api->path, " has no ", missing,
                                ", which drivetrain needs: install NCCL 2.14 or newer, or use transport='torch'."));
  }
  return api;
}

}  // namespace

std::shared_ptr<const NcclApi> open_nccl(const std::string& path) {
  void* library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) throw EnvironmentError(text("NCCL could not be loaded: ", ::dlerror()));
  return functions_of(library);
}

// Prefers the library that torch has loaded: two copies of NCCL in a process would not know of each other.
std::shared_ptr<const NcclApi> find_nccl(const std::string& fallback) {
  if (void* library = ::dlopen(kLibrary, RTLD_NOW | RTLD_NOLOAD)) return functions_of(library);
  return open_nccl(fallback.empty() ? kLibrary : fallback);
}

std::pair<std::string, std::string> path_and_version(const NcclApi& api) { return {api.path, api.version}; }

}  // namespace drivetrain::ddp
