"""Records the versions and settings of this build; written by CMakeLists.txt."""

TORCH_VERSION: str = "2.13.0"
TORCH_CUDA: str = "none"
CUDA: str = "none"
NCCL: str = "none"
COMPILER: str = "GNU 12.2.0"
SANITIZE: str = ""
