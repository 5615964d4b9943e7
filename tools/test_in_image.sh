#!/usr/bin/env bash
# The suite with the packages that are here already, as in a host's image: only what runs the tests is added, and
# tf-keras of TensorFlow's own version where it is missing. Called by .github/workflows/hosts.yml.
set -euo pipefail
cd "$(dirname "$0")/.."
git config --global --add safe.directory "$PWD"
python3 -m pip install --quiet papermill nbval pytest-xdist hypothesis ruff scikit-learn matplotlib ipykernel
python3 -c "import tensorflow" || python3 -m pip install --quiet "tensorflow>=2.20,<2.22"
version=$(python3 -c "import tensorflow as tf; print('.'.join(tf.__version__.split('.')[:2]))")
python3 -c "import tf_keras" || python3 -m pip install --quiet --no-deps "tf-keras==$version.*"
python3 -m pip list 2>/dev/null | grep --ignore-case --extended-regexp "^(tensorflow|tf|keras|jax|libtpu|numpy|protobuf)" || true
exec python3 -m pytest --numprocesses=auto --dist=worksteal
