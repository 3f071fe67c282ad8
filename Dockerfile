# CPU:  docker build -t algorist .
# CUDA: docker build -t algorist --build-arg TORCH=cu128 .        (what uv's --torch-backend takes)
# Run:  docker run --rm -it -v "$PWD:/work" algorist run quickstart  (with --gpus all for CUDA)
FROM python:3.11-slim AS build
WORKDIR /source
COPY pyproject.toml README.md LICENSE MANIFEST.in ./
COPY src src
COPY packages packages
RUN pip wheel --no-deps -w /dist packages/grader .

FROM python:3.11-slim
ARG TORCH=cpu
ARG EXTRAS=
COPY constraints.txt /
RUN pip install --no-cache-dir uv && uv pip install --system --no-cache --torch-backend=${TORCH} -c /constraints.txt torch
COPY --from=build /dist /dist
RUN pip install --no-cache-dir -c /constraints.txt /dist/algorist_grader-*.whl "$(ls /dist/algorist-*.whl)${EXTRAS}"
WORKDIR /work
RUN algorist run smoke-cpu output_dir=/tmp/smoke && rm -r /tmp/smoke
ENTRYPOINT ["algorist"]
CMD ["--help"]
