// Declares the hooks through which autograd saves tensors in a recorded pass and takes them in backward.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "budget/recorder/recorded_pass.h"

namespace drivetrain::budget {

// Pushes hooks for the pass on this thread's stack, and returns the pack hook, which the stack owns. Throws inside of
// torch.func transforms that allow no hooks. The GIL must be held, here and below.
PyObject* push_pass_hooks(const std::shared_ptr<RecordedPass>& pass);
// Removes the hooks of a pass from this thread's stack, and leaves hooks that were pushed above them.
void remove_pass_hooks(PyObject* pack);

// Returns the type of the exception with which a frugal profile ends a step when its backward begins. It derives from
// BaseException, so that handlers of the training step let it pass.
PyObject* profile_ended();

}  // namespace drivetrain::budget
