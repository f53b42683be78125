# Training pods: the in-pod runtime and what the digits example imports.
FROM python:3.12-slim-bookworm
COPY . /src
RUN pip install --no-cache-dir '/src[runtime]' scikit-learn pillow && rm -rf /src
ENV PYTHONUNBUFFERED=1
CMD ["python"]
