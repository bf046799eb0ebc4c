// Starts detached threads with a raised nice value.
#include "checkpointing/threads.h"

#include <pthread.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <thread>

namespace drivetrain::checkpointing {
namespace {

void lower_priority(int nice) {
  const auto self = static_cast<id_t>(::syscall(SYS_gettid));
  errno = 0;
  const int now = ::getpriority(PRIO_PROCESS, self);
  if (errno == 0) ::setpriority(PRIO_PROCESS, self, std::min(19, now + nice));
}

}  // namespace

int start_threads(const char* name, int count, int nice, const std::function<void()>& work) {
  for (int i = 0; i < count; ++i) {
    try {
      std::thread([=] {
        ::pthread_setname_np(::pthread_self(), name);
        lower_priority(nice);
        work();
      }).detach();
    } catch (const std::system_error&) {
      return i;
    }
  }
  return count;
}

}  // namespace drivetrain::checkpointing
