"""`make gpu-check`: the whole proof of the GPU side on a machine with an NVIDIA GPU, in parts, and its report."""
