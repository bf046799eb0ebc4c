// Stands for the header of that name, which nccl.h includes and whose types it does not use.
#pragma once
