"""Plain PyTorch references of the native kernels: slow and obvious."""
