#!/usr/bin/env bash
# Packs what the benchmarks and tests on a CUDA machine need beside torch and transformers into one archive:
# TransformerLens, nnsight and pytest, with all that they import, as wheels of one version of Python.
# Such a machine often reaches no package index: take the archive there, unpack it, and give
# `python -m benchmarks.gpu_pairs` the folder with `--peers`.
#
# usage: benchmarks/pack_peers.sh FOLDER [VERSION OF PYTHON]; writes FOLDER and FOLDER.tar.xz
set -euo pipefail
cd "$(dirname "$0")/.."

folder=$1
version=${2:-3.12}
python=${PYTHON:-python3}

# Not datasets, which needs 50 MB of pyarrow: TransformerLens imports it and a sweep reads none.
packages=(
    transformer-lens jaxtyping wadler-lindig beartype fancy-einsum einops typeguard accelerate psutil
    pandas python-dateutil six rich markdown-it-py mdurl pygments
    nnsight greenlet cloudpickle pydantic pydantic-core annotated-types typing-inspection zstandard
    websocket-client httpx httpcore h11 anyio sniffio idna certifi typing-extensions tqdm pyyaml
    pytest pluggy iniconfig packaging hypothesis sortedcontainers
)

rm -rf "$folder" "$folder.tar.xz"
"$python" -m pip install --quiet --disable-pip-version-check -c constraints.txt --target "$folder" \
    --no-deps --only-binary=:all: --implementation cp --python-version "$version" \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
    "${packages[@]}"

# Tests of the packages and what was compiled for this machine's Python are not needed there.
find "$folder" -depth -type d \( -name __pycache__ -o -name tests \) -exec rm -rf {} +
rm -rf "$folder/bin"
tar --sort=name --owner=0 --group=0 --mtime='2000-01-01 00:00Z' -C "$(dirname "$folder")" -cf - "$(basename "$folder")" |
    xz -9 -T2 >"$folder.tar.xz"
du -h "$folder.tar.xz"
