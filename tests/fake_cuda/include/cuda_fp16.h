// Replaces CUDA's header of that name, which nccl.h includes without using its types.
#pragma once
