// Work of ATen's on fake streams: CPU tensors over device memory, and the enqueuing of what uses them.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAStream.h>

#include <functional>
#include <string>
#include <vector>

#include "../fake_cuda.h"

namespace fake_aten {

// A CPU tensor over the same elements, at the addresses that work on streams may use. Its creation touches no memory.
at::Tensor over_device(const at::Tensor& tensor);

// The bytes of a tensor, as few ranges as its strides allow.
void add_ranges(std::vector<fake_cuda_range>& ranges, const at::Tensor& tensor, bool writes);

// Puts a function on the device's current stream. An exception of the function is an error of the program under test.
void launch(const std::string& name, c10::Device device, const std::vector<fake_cuda_range>& ranges,
            std::function<void()> function);

// A CPU generator for one operation, from a CUDA generator's seed and offset, which it advances. Call the function that
// it returns when the work runs: in a graph, seed and offset are those of the replay.
std::function<at::Generator()> next_generator(const std::optional<at::Generator>& generator, c10::Device device,
                                              int64_t numel, std::vector<fake_cuda_range>& ranges);

}  // namespace fake_aten
