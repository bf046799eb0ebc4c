// Empty: nccl.h includes it and uses nothing of it, and the real one needs headers of the CUDA toolkit.
