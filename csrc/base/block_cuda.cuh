// Declares the sizes of warps and of blocks of threads on CUDA. Includes no torch header.
#pragma once

namespace drivetrain {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kThreads = 256;  // of a block, where a kernel needs no other number
constexpr int kWarps = kThreads / kWarp;

}  // namespace drivetrain
