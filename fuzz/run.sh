#!/usr/bin/env bash
# Runs every fuzz target for a bounded time, under AddressSanitizer: fuzz/run.sh [seconds per target]
# Needs no cargo-fuzz and no nightly toolchain: RUSTC_BOOTSTRAP lets the stable one take the flags of the sanitizers.
# (`cargo fuzz run problem` works too.)
set -euo pipefail
cd "$(dirname "$0")"
seconds=${1:-60}
target=$(rustc -vV | sed -n 's/^host: //p')
export RUSTC_BOOTSTRAP=1
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-target}
export RUSTFLAGS="--cfg fuzzing -Zsanitizer=address -Cforce-frame-pointers -Cdebug-assertions -Ccodegen-units=1 \
-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
-Cllvm-args=-sanitizer-coverage-pc-table -Cllvm-args=-sanitizer-coverage-trace-compares"
cargo build --release --target "$target"
for name in problem entry_points; do
    mkdir -p "corpus/$name" "artifacts/$name"
    # A scenario takes a few hundred bytes: start from some of that length, the same on every machine.
    for seed in $(seq 64); do
        LC_ALL=C awk -v seed="$seed" 'BEGIN { srand(seed); for (i = 0; i < 400; i++) printf "%c", int(256 * rand()) }' \
            >"corpus/$name/seed$seed"
    done
    echo "fuzzing $name for $seconds s"
    "$CARGO_TARGET_DIR/$target/release/$name" "corpus/$name" -artifact_prefix="artifacts/$name/" \
        -max_total_time="$seconds" -timeout=20 -rss_limit_mb=4096 -max_len=1024 -len_control=0 \
        -print_final_stats=1
done
