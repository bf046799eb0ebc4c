// Matches processes to cores, and follows them by pidfd_open, or by /proc where that is missing.
#include "ddp/transport/processes.h"

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

class Matching {
 public:
  explicit Matching(const std::vector<CoreSet>& processes)
      : processes_(processes), process_on_(CoreSet::kMostCores, kFree) {}

  // Gives the process a core. Other processes may move to another of their cores.
  bool add(int process) {
    tried_ = {};
    return move(process);
  }

 private:
  static constexpr int kFree = -1;

  bool move(int process) {
    const CoreSet& mine = processes_[process];
    for (int core = 0; core < CoreSet::kMostCores; ++core) {
      if (!mine.has(core) || process_on_[core] != kFree) continue;
      process_on_[core] = process;
      return true;
    }
    for (int core = 0; core < CoreSet::kMostCores; ++core) {
      if (!mine.has(core) || tried_.has(core)) continue;
      tried_.add(core);
      if (!move(process_on_[core])) continue;
      process_on_[core] = process;
      return true;
    }
    return false;
  }

  const std::vector<CoreSet>& processes_;
  std::vector<int> process_on_;  // [cores]
  CoreSet tried_;
};

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

CoreSet cores_of_this_thread() {
  CoreSet cores;
  // The C library's function accepts only the size of its own type.
  if (::syscall(SYS_sched_getaffinity, 0, sizeof(cores.words), cores.words) < 0) return {};
  return cores;
}

bool is_a_core_for_each(const std::vector<CoreSet>& processes) {
  Matching matching(processes);
  for (int process = 0; process < static_cast<int>(processes.size()); ++process) {
    if (!matching.add(process)) return false;
  }
  return true;
}

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
