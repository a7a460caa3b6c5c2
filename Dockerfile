# `make demo` in a container: two CPU ranks, or with GPUs one rank on each.
#
#   docker build -t polyshard .
#   docker run --rm --shm-size 1g polyshard
#   docker run --rm --gpus all --ipc host polyshard
#
# torch's usual build has its CUDA libraries, and needs the host's driver alone. Where there is no GPU,
# --build-arg PIP_EXTRA_INDEX_URL=... with the index of torch's CPU build makes a smaller image.
FROM python:3.11-slim-bookworm
# A compiler is for torch.compile. Debian keeps one version of each, so none can be pinned.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends g++ git make \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /polyshard
COPY . .
ARG PIP_EXTRA_INDEX_URL
ENV PIP_NO_CACHE_DIR=1
RUN make .venv/.installed
CMD ["make", "demo"]
