// The order in which sums of squares are taken, the same on the CPU and on CUDA. Needs no torch header.
//
// A gradient is cut up in chunks. Element i of a chunk is added to lane i % kLanes, and the lanes to each other as a
// tree: lane i gets lane i + kLanes / 2, and so on. The sums of all chunks, in the gradients' order, are added up in
// the same way. So the order depends on sizes alone, and both devices have enough additions under way.
#pragma once

#include <cstdint>

namespace drivetrain::grad {

constexpr int64_t kChunk = 1 << 14;  // elements
constexpr int kLanes = 32;           // a warp; on the CPU enough to hide the addition's latency

constexpr int64_t num_chunks(int64_t numel) { return (numel + kChunk - 1) / kChunk; }

}  // namespace drivetrain::grad
