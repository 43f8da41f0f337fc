# docker build -f docker/cpu.Dockerfile -t tonnage:cpu .
# docker run --rm -it -v "$PWD:/work" tonnage:cpu train config.yaml
#
# GNU's OpenMP is what the loops for CPUs run on; the image has none. What is in /work must be writable for user 1000.
# Weights that were downloaded stay with: -v "$HOME/.cache/huggingface:/home/tonnage/.cache/huggingface".
FROM python:3.11-slim

ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1

COPY constraints.txt pyproject.toml README.md LICENSE /opt/tonnage/
COPY src /opt/tonnage/src
RUN apt-get update && apt-get install -y --no-install-recommends libgomp1 && rm -rf /var/lib/apt/lists/*
RUN pip install --no-deps --index-url https://download.pytorch.org/whl/cpu --constraint /opt/tonnage/constraints.txt torch \
    && pip install --constraint /opt/tonnage/constraints.txt "/opt/tonnage[serve]" \
    && rm -rf /opt/tonnage \
    && useradd --create-home --uid 1000 tonnage \
    && mkdir /work \
    && chown tonnage /work

USER 1000
WORKDIR /work
ENTRYPOINT ["tonnage"]
CMD ["--help"]
