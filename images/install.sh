#!/bin/sh
# Install a lock, by hash, or the one wheel of a folder, and compile it so that two builds make the same bytes.
#
#   install-lock LOCK TARGET
#   install-lock --wheel FOLDER TARGET
#
# PACKAGES=none leaves the target empty.
set -eu
mkdir -p "${3:-$2}"
if [ "$1" = --wheel ]; then
  target=$3
  python3 -m pip install --quiet --no-compile --no-index --no-deps --find-links "$2" --target "$target" polyreme
elif [ "${PACKAGES:-locked}" = none ]; then
  exit 0
else
  target=$2
  # --no-compile: bytecode of pip holds the time of its source and the name of a temporary folder.
  python3 -m pip install --quiet --no-compile --require-hashes --no-deps --only-binary :all: --target "$target" -r "$1"
fi
# Never checked against its source: a layer's files have one time, and the root file system is read-only.
python3 -m compileall -q --invalidation-mode unchecked-hash "$target" > /dev/null || true
