#!/usr/bin/env bash
# Renew the locks from pyproject.toml: versions and hashes only, for every platform; no address, no path of this machine.
set -euo pipefail
# A machine's own package folders must not leak into the locks, nor decide what they hold.
unset PIP_FIND_LINKS UV_FIND_LINKS
compile() {
  "${BIN:-.venv/bin}/uv" pip compile --quiet --universal --python-version 3.11 --generate-hashes \
    --no-emit-index-url --no-emit-find-links --custom-compile-command "make lock" "$@"
}
compile "$@" --group bootstrap --output-file requirements/uv.lock.txt
compile "$@" pyproject.toml --extra run --group build --output-file requirements/run.lock
# What a run uses and what is tested are the same versions.
compile "$@" pyproject.toml --extra run --extra datahub-service --extra kubectl --group dev \
  --constraints requirements/run.lock --output-file requirements/dev.lock
# Images install the versions that were tested, and only those of their role.
role() {
  compile pyproject.toml "${@:2}" --constraints requirements/dev.lock --output-file "requirements/$1.lock"
}
role operator --extra operator
role datahub --extra datahub-service
role trainer --extra trainer
role cli --extra kubectl --extra services
compile --group build --constraints requirements/dev.lock --output-file requirements/build.lock
compile --group release --output-file requirements/release.lock
compile --group site --output-file requirements/site.lock
