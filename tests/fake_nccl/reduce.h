// Declares reductions of NCCL's types, in the order of ranks.
#pragma once

#include <nccl.h>

#include <cstddef>
#include <vector>

namespace fake_nccl {

// Returns the size of an element, or 0 if the fake does not support the type.
size_t bytes_of(ncclDataType_t type);

// Writes the reduction of `parts`, each of `count` elements, to `to`. Rounds to the type after every addition.
void reduce(const std::vector<const char*>& parts, char* to, size_t count, ncclDataType_t type, ncclRedOp_t op);

}  // namespace fake_nccl
