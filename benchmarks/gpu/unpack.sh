#!/usr/bin/env bash
# Joins and unpacks what pack.sh made, without a network; whole pieces only.
#   unpack.sh PIECES FOLDER             then: benchmarks/gpu/run.sh --stack FOLDER
set -euo pipefail
[ $# = 2 ] || { sed -n '2,3s/^# \?//p' "$0" >&2; exit 2; }
(cd "$1" && sha256sum --check --quiet SHA256SUMS)
mkdir -p "$2"
decompress=(python3 -c 'import lzma, shutil, sys; shutil.copyfileobj(lzma.open(sys.stdin.buffer), sys.stdout.buffer, 1 << 20)')
if command -v xz > /dev/null; then decompress=(xz -dcT0); fi     # on all cores; an image may lack it
cat "$1"/stack.tar.xz.* | "${decompress[@]}" | tar -C "$2" -x
echo "$2: $(du -sh "$2" | cut -f1)"
