"""Plain PyTorch twins of the native kernels: slow and obvious."""
