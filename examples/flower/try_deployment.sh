#!/usr/bin/env bash
# Runs the commands of docs/deployment.md, as they stand there, on this machine: three nodes with TLS and
# keys. PORT and NODE_PORTS replace the ports of the page if they are taken. Everything is below a
# directory of its own, and every process is ended.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
page="$here/../../docs/deployment.md"
place="${1:-$(mktemp -d)}"
mkdir -p "$place"
cp -r "$here" "$place/app"
cd "$place"
commands="$(awk '/^```bash$/ { on = 1; next } /^```$/ { on = 0 } on' "$page" |
  sed "s/18443/${PORT:-18443}/g; s/19090/${NODE_PORTS:-19090}/g")"

ended() {
  # shellcheck disable=SC2046
  for pid in $(jobs -p | sort -r); do kill -TERM "$pid" 2> /dev/null || true; done
  wait || true
}
trap ended EXIT

eval "$commands"
test -s run/params.npz
test -s report.html
echo "the page's commands ran in $place"
