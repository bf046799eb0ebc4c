// Declares the sum over ranks of a range of values, for all transports. Needs no torch header.
#pragma once

#include <cstdint>

#include "base/isa_namespace.h"

namespace drivetrain::ddp {

enum class ElementType : uint8_t { kFloat32, kFloat64, kBFloat16, kFloat16, kInt32, kInt64 };

constexpr int64_t bytes_of(ElementType type) {
  switch (type) {
    case ElementType::kBFloat16:
    case ElementType::kFloat16:
      return 2;
    case ElementType::kFloat32:
    case ElementType::kInt32:
      return 4;
    case ElementType::kFloat64:
    case ElementType::kInt64:
      return 8;
  }
  return 0;
}

// Adds the elements [begin, end) of all inputs in the order of the inputs, multiplies them by `scale` and writes them
// to all outputs. Outputs may be inputs too, or begin where one begins if their elements are narrower. 16-bit floats
// are added in float and rounded once. Integers wrap around and are not scaled.
//
// in_tree: adds floats as ((x0 + x1) + (x2 + x3)) + ..., and rounds each sum to their type. The number of inputs is
// then a power of two up to kMostInTree.
struct SumJob {
  ElementType type;
  ElementType output_type;  // the same, unless both are floats of at most 32 bits
  const char* const* inputs;
  int num_inputs;
  char* const* outputs;
  int num_outputs;
  int64_t begin;
  int64_t end;
  double scale;
  bool in_tree = false;
};

constexpr int kMostInTree = 1024;

// Runs the kernel of the chosen instruction set. Every instruction set gives the same bits.
void sum_range(const SumJob& job);

DT_PER_ISA(void sum_range(const SumJob& job))

}  // namespace drivetrain::ddp
