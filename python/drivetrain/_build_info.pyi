"""What a build was made with; the module itself is written by CMakeLists.txt."""

TORCH_VERSION: str
TORCH_CUDA: str
CUDA: str
NCCL: str
COMPILER: str
SANITIZE: str
