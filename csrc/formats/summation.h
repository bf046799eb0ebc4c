// Defines the order of sums of squares, which is the same on the CPU and on CUDA. Needs no torch header.
//
// A gradient is divided into chunks with a sum each. Element i of a chunk is added to slot i % kSlots. The slots are
// added as a tree: slot i gets slot i + kSlots / 2, and so on. So a thread of a warp owns four neighboring slots, whose
// elements it loads at once: 16 bytes in float32.
//
// The sums of all chunks, in the gradients' order, are divided into groups of kGroup. Sum i of a group is added to lane
// i % kLanes, and the lanes are added as a tree. The groups' sums are added in the same way. So the order depends on
// sizes alone, both devices have enough independent additions, and several warps share the groups.
#pragma once

#include <cstdint>

namespace drivetrain::formats {

constexpr int64_t kChunk = 1 << 12;  // elements of a chunk, which one warp sums
constexpr int kSlots = 128;
constexpr int kLanes = 32;           // a warp
constexpr int64_t kGroup = 1 << 10;  // sums of chunks
static_assert(kChunk % kSlots == 0 && kSlots % kLanes == 0 && kGroup % kLanes == 0);

constexpr int64_t num_chunks(int64_t numel) { return (numel + kChunk - 1) / kChunk; }

}  // namespace drivetrain::formats
