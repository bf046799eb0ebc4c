// Follows a process by pidfd_open, or by /proc where that is missing.
#include "ddp/transport/peer_process.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>

#include "base/check.h"

namespace drivetrain::ddp {
namespace {

struct Life {
  char state;
  uint64_t started_at;
};

// Reads /proc/<pid>/stat. Returns none if there is no such process, or if it is hidden.
std::optional<Life> life_of(int64_t pid) {
  const Descriptor file(::open(text("/proc/", pid, "/stat").c_str(), O_RDONLY | O_CLOEXEC));
  char content[1024];
  const ssize_t size = file.get() < 0 ? -1 : ::read(file.get(), content, sizeof(content));
  if (size <= 0) return std::nullopt;
  std::string_view rest(content, static_cast<size_t>(size));
  const size_t name_end = rest.rfind(')');  // the name may contain anything
  if (name_end == std::string_view::npos || rest.size() < name_end + 3) return std::nullopt;
  rest.remove_prefix(name_end + 2);
  Life life = {rest[0], 0};
  // The state is field 3, the start field 22.
  for (int field = 3; field < 22; ++field) {
    const size_t space = rest.find(' ');
    if (space == std::string_view::npos) return std::nullopt;
    rest.remove_prefix(space + 1);
  }
  std::from_chars(rest.data(), rest.data() + rest.size(), life.started_at);
  return life;
}

}  // namespace

PeerProcess::PeerProcess(int64_t pid) : pid_(pid), descriptor_(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0))) {
  if (descriptor_.get() >= 0) return;
  const int code = errno;
  const std::optional<Life> life = code == ESRCH ? std::nullopt : life_of(pid);
  if (!life) throw EnvironmentError(text("pidfd_open of process ", pid, ": ", std::strerror(code)));
  started_at_ = life->started_at;
}

bool PeerProcess::has_ended() const {
  if (descriptor_.get() >= 0) {
    pollfd process = {descriptor_.get(), POLLIN, 0};
    return ::poll(&process, 1, 0) > 0;
  }
  const std::optional<Life> life = life_of(pid_);
  return !life || life->state == 'Z' || life->state == 'X' || life->started_at != started_at_;
}

}  // namespace drivetrain::ddp
