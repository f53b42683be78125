# Operator, CSI driver, mount pods and the local Files API server.
FROM python:3.12-slim-bookworm AS build
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev libfuse3-dev pkg-config
COPY . /src
RUN python -m venv /opt/trainmount && /opt/trainmount/bin/pip install --no-cache-dir '/src[cli,csi]'

FROM python:3.12-slim-bookworm
RUN apt-get update && apt-get install -y --no-install-recommends fuse3 && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/trainmount /opt/trainmount
ENV PATH=/opt/trainmount/bin:$PATH PYTHONUNBUFFERED=1
USER 65534
CMD ["trainmount", "--help"]
