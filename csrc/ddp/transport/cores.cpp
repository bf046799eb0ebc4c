// Matches processes to cores.
#include "ddp/transport/cores.h"

#include <sys/syscall.h>
#include <unistd.h>

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

}  // namespace drivetrain::ddp
