# A container for training.  CPU:  docker build -t polarlm .
#                            CUDA: docker build -t polarlm --build-arg BASE=nvidia/cuda:13.0.0-runtime-ubuntu24.04 --build-arg TORCH_INDEX= .
#   docker run --rm -v "$PWD:/work" polarlm train block=polar trainer.max_steps=100
#   docker run --rm --gpus all -v "$PWD:/work" polarlm train block=polar trainer=gpu
ARG BASE=ubuntu:24.04
FROM ${BASE}

# Python 3.12 comes with Ubuntu 24.04; the build tools are for torch.compile's CPU code and the native kernels.
RUN apt-get update \
 && apt-get install -y --no-install-recommends python3 python3-venv python3-dev g++ git \
 && rm -rf /var/lib/apt/lists/*

# The public index has torch's CUDA builds; PyTorch's own index has the CPU build. An empty value means: CUDA.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS=
RUN python3 -m venv /opt/polarlm
ENV PATH=/opt/polarlm/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1

WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY configs configs
COPY hydra_plugins hydra_plugins
COPY polarlm polarlm
RUN pip install ${TORCH_INDEX:+--extra-index-url ${TORCH_INDEX}} -c constraints.txt ".${EXTRAS:+[${EXTRAS}]}" && polarlm --version

# Runs, caches and your own configs/ lie where the container is started.
WORKDIR /work
ENTRYPOINT ["polarlm"]
CMD ["--help"]
