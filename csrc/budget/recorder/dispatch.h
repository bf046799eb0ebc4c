// Declares how a thread starts and ends handing its operations and its saved tensors to a recorded pass.
#pragma once

#include <Python.h>

#include <memory>

#include "budget/recorder/recorded_pass.h"

namespace drivetrain::budget {

// Returns the pass that the calling thread records; null: none.
RecordedPass* recorded_pass();

// Starts to record this thread's operations in the pass, and pushes its saved-tensor hooks. Throws inside of torch.func
// transforms that allow no hooks. The GIL must be held, here and below.
void begin_recording(const std::shared_ptr<RecordedPass>& pass);
// Stops recording this thread's operations. Returns the pass that was recorded; null: none.
std::shared_ptr<RecordedPass> end_recording();

// Returns the type of the exception with which a frugal profile ends a step when its backward begins. It derives from
// BaseException, so that handlers of the training step let it pass.
PyObject* profile_ended();

}  // namespace drivetrain::budget
