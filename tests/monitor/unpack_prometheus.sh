#!/usr/bin/env bash
# Unpacks Debian's Prometheus into build/prometheus for tests/monitor/test_prometheus_server.py, and installs nothing.
# Prints the folder of its programs. Needs apt's tools and sources, but not root.
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=$PWD/build/prometheus
if [ ! -x "$folder/usr/bin/promtool" ]; then
  mkdir -p "$folder/apt/state/lists/partial" "$folder/apt/cache/archives/partial"
  cd "$folder/apt"
  options=(-o Dir::State="$PWD/state" -o Dir::Cache="$PWD/cache" -o APT::Sandbox::User= -o Acquire::http::Timeout=30)
  options+=(-o Dir::State::status=/var/lib/dpkg/status -o Acquire::Retries=2)
  apt-get "${options[@]}" --quiet update >&2
  apt-get "${options[@]}" --quiet download prometheus >&2
  dpkg-deb --extract prometheus_*.deb "$folder"
  cd "$folder"
  rm -r apt
fi
echo "$folder/usr/bin"
