# docker build -f docker/cpu.Dockerfile -t tonnage:cpu .
# docker run --rm -it -v "$PWD:/work" tonnage:cpu train config.yaml
FROM python:3.11-slim

ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1

COPY constraints.txt pyproject.toml README.md LICENSE /opt/tonnage/
COPY src /opt/tonnage/src
RUN pip install --extra-index-url https://download.pytorch.org/whl/cpu --constraint /opt/tonnage/constraints.txt /opt/tonnage \
    && useradd --create-home --uid 1000 tonnage \
    && mkdir /work \
    && chown tonnage /work

USER 1000
WORKDIR /work
ENTRYPOINT ["tonnage"]
CMD ["--help"]
