# For NVIDIA GPUs: torch's wheels bring CUDA, the machine its driver and NVIDIA's container toolkit. Checked with
# hadolint; not built yet, and not run on a GPU.
#   docker build -t grpo . && docker run --rm -it --gpus all --shm-size 16g grpo bash scripts/gpu_check.sh
FROM python:3.12-slim-bookworm
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends bubblewrap g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /grpo
COPY requirements*.txt ./
COPY scripts/install.sh scripts/torchvision_shim.py scripts/
RUN PIP_NO_CACHE_DIR=1 bash scripts/install.sh gpu
COPY . .
ENV PATH="/grpo/.venv/bin:$PATH" NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
CMD ["python", "train_grpo.py"]
