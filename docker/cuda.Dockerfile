# docker build -f docker/cuda.Dockerfile -t tonnage:cuda .
# docker run --rm -it --gpus all --ipc=host --ulimit memlock=-1 -v "$PWD:/work" tonnage:cuda train config.yaml
#
# torch brings CUDA's libraries in its wheel; the host needs NVIDIA's driver and container toolkit. Triton needs a C
# compiler where it runs. What is in /work must be writable for user 1000.
# Weights that were downloaded stay with: -v "$HOME/.cache/huggingface:/home/tonnage/.cache/huggingface".
FROM python:3.11-slim

ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1

COPY constraints.txt pyproject.toml README.md LICENSE /opt/tonnage/
COPY src /opt/tonnage/src
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev libgomp1 && rm -rf /var/lib/apt/lists/*
RUN pip install --constraint /opt/tonnage/constraints.txt "/opt/tonnage[serve]" \
    && rm -rf /opt/tonnage \
    && useradd --create-home --uid 1000 tonnage \
    && mkdir /work \
    && chown tonnage /work

USER 1000
WORKDIR /work
ENTRYPOINT ["tonnage"]
CMD ["--help"]
