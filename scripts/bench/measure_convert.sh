#!/usr/bin/env bash
# Measures a conversion and compares it with the speed of its disk.
#
#   scripts/bench/measure_convert.sh SOURCE TARGET [convert's flags…]
#
# TARGET must not exist; it is removed at the end. First the script reads and writes the source's size past the page cache,
# one after the other and both at once, so that the rates are of the same minutes. Most disks share their bandwidth
# between reads and writes, so a conversion that writes as much as it reads cannot be faster than both at once. As root the page
# cache is dropped before converting; otherwise the script warns that a recently read source may be in memory.
# Prints the disk's rates, the conversion's rate as a share of them, and its peak memory.
set -euo pipefail
source=$1 target=$2
shift 2
larder=${LARDER:-$(dirname "$0")/../../target/release/larder}
[ ! -e "$target" ] || { echo "$target exists already" >&2; exit 1; }
scratch="$target.scratch"
trap 'rm -rf "$scratch" "$target"' EXIT

mapfile -t files < <(find -L "$source" -type f \( -name '*.safetensors' -o -name '*.gguf' \) | sort)
megabytes=$(($(cat "${files[@]}" | wc -c) / 1000000))

# MB per second of a command that transfers all of the source's bytes.
rate() {
    local start end
    start=$(date +%s%N)
    "$@" >/dev/null 2>&1
    end=$(date +%s%N)
    echo $((megabytes * 1000000000 / (end - start) ))
}
read_all() { for file in "${files[@]}"; do dd if="$file" of=/dev/null bs=4M iflag=direct; done; }
write_all() { dd if=/dev/zero of="$scratch" bs=4M count=$((megabytes / 4)) oflag=direct conv=fsync; }

both() { read_all & write_all; wait; }

reading=$(rate read_all)
writing=$(rate write_all)
rm -f "$scratch"
copying=$(rate both)
rm -f "$scratch"
slower=$((reading < writing ? reading : writing))
sync
echo 3 2>/dev/null >/proc/sys/vm/drop_caches || echo "the page cache could not be dropped: the source may be in memory"

report=$("$larder" convert "$source" "$target" --json "$@" 2>/dev/null)
field() { sed -E "s/.*\"$1\":([0-9.]+).*/\1/" <<<"$report"; }
awk -v read="$reading" -v write="$writing" -v slower="$slower" -v copy="$copying" -v peak="$(field peak_memory_bytes)" \
    -v seconds="$(field seconds)" -v from="$(field source_bytes)" -v to="$(field store_bytes)" 'BEGIN {
    rate = from / seconds / 1e6
    printf "disk: reads %d MB/s, writes %d MB/s, both at once %d MB/s each\n", read, write, copy
    printf "converted %.2f GB into %.2f GB in %.1f s: %d MB/s of source, %d %% of the slower rate, %d %% of both at once\n",
        from / 1e9, to / 1e9, seconds, rate, 100 * rate / slower, 100 * rate / copy
    printf "peak memory %.0f MB\n", peak / 1e6
}'
