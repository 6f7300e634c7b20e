#!/usr/bin/env bash
# On a machine with an NVIDIA GPU: the tests, then a short speed table on CUDA; one JSON under $OUT (default: runs/).
# Needs no network: it uses the python3 and torch it finds, and does without packages that are missing.
# Without a GPU it says so and ends well.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${OUT:-runs}
python=${PYTHON:-python3}
if ! command -v nvidia-smi >/dev/null || ! nvidia-smi -L 2>/dev/null | grep -q GPU; then
  echo "device_check: no NVIDIA GPU here, nothing to check"
  exit 0
fi
mkdir -p "$out"
for wheels in wheels shared/wheels; do
  [ -d "$wheels" ] && "$python" -m pip install --quiet --no-index --find-links "$wheels" --no-deps "$wheels"/*.whl
done
exec "$python" scripts/device_check.py --out "$out/device_check.json"
