// Notes that the process was forked; see parallel.h.
#include "base/parallel.h"

#include <pthread.h>

#include <atomic>

namespace drivetrain {
namespace {

std::atomic<bool> fork_seen{false};

// Registers when the module is loaded: before any loop of the module can have started threads.
const int fork_handler = pthread_atfork(nullptr, nullptr, [] { fork_seen.store(true, std::memory_order_relaxed); });

}  // namespace

bool is_forked() { return fork_seen.load(std::memory_order_relaxed) && fork_handler == 0; }

}  // namespace drivetrain
