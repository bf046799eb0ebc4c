# An image with torch, drivetrain and its examples; `docker build -t drivetrain .` and then `docker run drivetrain`.
# Without a GPU, give the URL of the index of torch's CPU builds, as torch's page about its installation names it; the
# default index has larger builds for GPUs: --build-arg TORCH_INDEX=URL
# For NVIDIA GPUs: --build-arg BASE=nvidia/cuda:13.0.1-devel-ubuntu24.04 --build-arg TORCH="torch==2.11.0"
ARG BASE=ubuntu:24.04
# The stage without drivetrain is the image of .devcontainer, which builds the checkout.
FROM ${BASE} AS tools
ARG TORCH="torch==2.13.0"
ARG TORCH_INDEX=""
ENV DEBIAN_FRONTEND=noninteractive VIRTUAL_ENV=/opt/venv PATH=/opt/venv/bin:$PATH
RUN apt-get update \
  && apt-get install -y --no-install-recommends g++ git make python3 python3-dev python3-venv \
  && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv "$VIRTUAL_ENV" \
  && pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$TORCH" \
  && pip install --no-cache-dir numpy "scikit-build-core>=0.10" "pybind11>=3.0" "cmake>=3.25" ninja "rich>=13"

FROM tools
WORKDIR /opt/drivetrain
COPY . .
RUN pip install --no-cache-dir --no-build-isolation . && rm -rf build
CMD ["torchrun", "--nproc-per-node", "2", "examples/gpt/train.py"]
