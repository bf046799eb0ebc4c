// Adds a micro-batch's gradient to the accumulated one, which may have another storage format. Needs no torch header.
#pragma once

#include <cstdint>

#include "base/isa_namespace.h"
#include "formats/storage.h"

namespace drivetrain::grad {

// Describes main += micro, computed in float32, or main = micro. `main` is float32, or bfloat16 with 8 bits of
// remainder; `micro` has a plain format. Both are dense and have the same layout.
struct Addition {
  formats::TypedArray main;
  formats::TypedArray micro;
  bool starts;  // overwrites `main`
};

// Runs on the CPU's threads. The bits do not depend on their number or the instruction set, and equal CUDA's.
void accumulate(const Addition& addition, int64_t numel);

// Enqueues the addition on a CUDA stream.
void accumulate_cuda(const Addition& addition, int64_t numel, void* stream);

// Adds elements [begin, end); begin is a multiple of a tile. One copy per instruction set.
DT_PER_ISA(void accumulate_cpu(const Addition& addition, int64_t begin, int64_t end))

}  // namespace drivetrain::grad
