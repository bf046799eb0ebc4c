// Declares how a thread starts and ends handing its operations to a recorded pass.
#pragma once

#include <Python.h>

#include <memory>

#include "budget/recorder/recorded_pass.h"

namespace drivetrain::budget {

// Lets operators whose calls never need recording bypass the recorder. Called once per process.
void register_fallthroughs();

// Starts to record this thread's operations in the pass, whose hooks have been pushed; `pack` is its pack hook. The GIL
// must be held, here and below.
void begin_recording(const std::shared_ptr<RecordedPass>& pass, PyObject* pack);
// Stops recording this thread's operations. Returns the pass that was recorded; null: none.
std::shared_ptr<RecordedPass> end_recording();
// Returns whether begin_recording() was called for this pass on this thread, and has not been undone.
bool is_recording(const std::shared_ptr<RecordedPass>& pass);

}  // namespace drivetrain::budget
