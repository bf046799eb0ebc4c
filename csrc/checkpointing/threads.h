// Declares the background threads of checkpoints. Needs no torch header.
#pragma once

#include <functional>

namespace drivetrain::checkpointing {

struct ThreadSettings {
  int count;
  int nice;  // added to the niceness of the calling thread
};

// Starts detached threads that run the work, and returns how many the system had.
int start_threads(const char* name, ThreadSettings settings, const std::function<void()>& work);

}  // namespace drivetrain::checkpointing
