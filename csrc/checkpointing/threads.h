// Declares the background threads of checkpoints. Needs no torch header.
#pragma once

#include <functional>

namespace drivetrain::checkpointing {

// Starts detached threads that run the work, and returns how many the system had. `nice` is added to the niceness.
int start_threads(const char* name, int count, int nice, const std::function<void()>& work);

}  // namespace drivetrain::checkpointing
