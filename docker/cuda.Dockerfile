# docker build -f docker/cuda.Dockerfile -t tonnage:cuda .
# docker run --rm -it --gpus all --ipc=host --ulimit memlock=-1 -v "$PWD:/work" tonnage:cuda train config.yaml
#
# torch brings CUDA's libraries in its wheel; the host needs NVIDIA's driver and container toolkit. Pins are not used here:
# they name the build for processors.
FROM python:3.11-slim

ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1

COPY pyproject.toml README.md LICENSE /opt/tonnage/
COPY src /opt/tonnage/src
RUN pip install /opt/tonnage \
    && useradd --create-home --uid 1000 tonnage \
    && mkdir /work \
    && chown tonnage /work

USER 1000
WORKDIR /work
ENTRYPOINT ["tonnage"]
CMD ["--help"]
