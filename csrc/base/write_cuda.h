// Declares calls outside of the capture of a CUDA graph, and what a graph keeps: the host's bytes, and objects. Needs
// no torch header.
#pragma once

#include <cstddef>
#include <memory>

namespace drivetrain {

// Returns whether the stream is being captured into a CUDA graph.
bool is_capturing(void* stream);

// Lets the calling thread query events for as long as this object lives. Otherwise such a query would end, with an
// error, the capture that any thread makes under torch.cuda.graph's default mode.
class OutsideCaptures {
 public:
  OutsideCaptures() noexcept;
  ~OutsideCaptures();
  OutsideCaptures(const OutsideCaptures&) = delete;
  OutsideCaptures& operator=(const OutsideCaptures&) = delete;

 private:
  int mode_before_;  // a cudaStreamCaptureMode
};

// Lets a thread that captures nothing query events until it ends.
void leave_captures() noexcept;

// Keeps an object as long as the graph that the stream is being captured into, and the executable graphs made of it.
// CUDA then calls the deleter on a thread of its own, which may call no CUDA function.
using KeptForGraph = std::unique_ptr<void, void (*)(void*) noexcept>;
void keep_for_graph(void* stream, KeptForGraph object);

// Writes host bytes to the device through kernel arguments. A graph stores those, so that no host memory has to outlive
// it.
void write_cuda(void* to, const void* from, size_t bytes, void* stream);

}  // namespace drivetrain
