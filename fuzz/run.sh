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
    echo "fuzzing $name for $seconds s"
    # Threads of the cpu backend would outnumber the cores and slow each input down.
    "$CARGO_TARGET_DIR/$target/release/$name" "corpus/$name" -artifact_prefix="artifacts/$name/" \
        -max_total_time="$seconds" -timeout=20 -rss_limit_mb=4096 -max_len=1024 -print_final_stats=1
done
