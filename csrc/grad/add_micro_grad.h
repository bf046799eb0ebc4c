// Adds a micro-batch's gradient to the one that is being accumulated, which may live in another format. No torch
// header.
#pragma once

#include <cstdint>

#include "formats/storage.h"

namespace drivetrain::grad {

// main += micro, in float32, or main = micro. main: float32, or bfloat16 with 8 bits of remainder; micro: a plain
// format. Both walked from the first to the last element.
struct Addition {
  formats::TypedArray main;
  formats::TypedArray micro;
  bool starts;  // main holds nothing yet
};

// On the CPU's threads; the same bits whatever their number and the instruction set, and on CUDA.
void accumulate(const Addition& addition, int64_t numel);

// Enqueues it on a CUDA stream.
void accumulate_cuda(const Addition& addition, int64_t numel, void* stream);

// Elements [begin, end); begin is a multiple of a tile. One copy per instruction set.
namespace baseline {
void accumulate_cpu(const Addition& addition, int64_t begin, int64_t end);
}
namespace avx2 {
void accumulate_cpu(const Addition& addition, int64_t begin, int64_t end);
}
namespace avx512 {
void accumulate_cpu(const Addition& addition, int64_t begin, int64_t end);
}

}  // namespace drivetrain::grad
