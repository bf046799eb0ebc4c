#!/usr/bin/env bash
# Installs nvcc, CUDA's headers and its static runtime from the package index into FOLDER, for machines without a CUDA
# toolkit. Prints the folder to put on PATH, FOLDER/cuda/bin. Usage: nvcc.sh PYTHON FOLDER
set -euo pipefail
python=$1
mkdir -p "$2"
folder=$(cd "$2" && pwd)
"$python" -m venv "$folder"
# The packages of one toolkit; their requirements alone would mix its nvcc with the newest other parts.
"$folder/bin/python" -m pip install --quiet "nvidia-cuda-nvcc==13.0.*" "nvidia-cuda-crt==13.0.*" "nvidia-nvvm==13.0.*" \
  "nvidia-cuda-runtime==13.0.*" "nvidia-cuda-cccl==13.0.*" >&2
cuda=$("$folder/bin/python" -c "import nvidia.cu13; print(nvidia.cu13.__path__[0])")
# nvcc and CMake look for these two names, which a toolkit has and the packages lack.
ln -sfn lib "$cuda/lib64"
ln -sf libcudart.so.13 "$cuda/lib/libcudart.so"
ln -sfn "$cuda" "$folder/cuda"
echo "$folder/cuda/bin"
