// Declares how ATen's work reaches fake streams: CPU tensors over device memory, and launches that use them.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAStream.h>

#include <functional>
#include <string>
#include <vector>

#include "../fake_cuda.h"

namespace fake_aten {

// Returns a CPU tensor over the same elements, at the addresses that work on streams may use. Reads no element.
at::Tensor over_device(const at::Tensor& tensor);

// Appends the byte ranges of a tensor, joined where its strides allow. One range covers tensors of over 4096 runs.
void add_ranges(std::vector<fake_cuda_range>& ranges, const at::Tensor& tensor, bool writes);

// Puts a function on the device's current stream. An exception that it throws is an error of the program
// under test.
void launch(const std::string& name, c10::Device device, const std::vector<fake_cuda_range>& ranges,
            std::function<void()> function);

// Returns a function that makes a CPU generator for one operation from a CUDA generator's seed and offset. Advances the
// offset now. The work calls the function when it runs: in a graph, it reads the seed and offset of the replay.
std::function<at::Generator()> next_generator(const std::optional<at::Generator>& generator, c10::Device device,
                                              int64_t numel, std::vector<fake_cuda_range>& ranges);

}  // namespace fake_aten
