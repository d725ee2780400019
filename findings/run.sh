#!/usr/bin/env bash
# Runs all findings of this folder, or those whose files are given, one after the other: `make findings`.
set -uo pipefail
cd "$(dirname "$0")/.."
changed=0
for finding in "${@:-findings/*.sh}"; do
    for file in $finding; do
        [ "$(basename "$file")" = run.sh ] && continue
        echo "== $file"
        bash "$file" || { echo "changed: $file"; changed=1; }
    done
done
exit $changed
