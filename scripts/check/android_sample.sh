#!/usr/bin/env bash
# Checks examples/android without an SDK or an NDK: compiles the JNI glue and the class Larder for the Java machine here, and runs
# scripts/check/android_sample.kt with the demo model, under the checks of -Xcheck:jni. Checks the form of the XML files.
#
# Needs a JDK from 17 on ($JAVA_HOME or javac), a C compiler, Python, npm, and liblarder.so in target/release (cargo build --release -p
# larder-c). Installs Kotlin's compiler once to target/kotlin, from npm.
set -euo pipefail
cd "$(dirname "$0")/../.."
sample=examples/android/app/src/main
target=${CARGO_TARGET_DIR:-$PWD/target}
kotlin_version=2.4.20
kotlin_sha256=c23dab400d7ce5ea8b6c909947c0ca5454189e4bb1108695b5f464500e5e950f
kotlin=$target/kotlin/$kotlin_version
# What version 9.1 of the Android Gradle plugin compiles.
language=2.2

skip() {
    echo "skipped: $1"
    exit 0
}

[ "$(uname -s)" = Linux ] || skip "the checks read /proc of Linux"
command -v "${JAVA_HOME:+$JAVA_HOME/bin/}javac" >/dev/null || skip "no JDK was found: javac is missing"
java_home=${JAVA_HOME:-$(dirname "$(dirname "$(readlink -f "$(command -v javac)")")")}
[ -f "$java_home/include/jni.h" ] || skip "$java_home has no include/jni.h"
version=$("$java_home/bin/javac" -version 2>&1 | grep -oE '[0-9]+' | head -1)
[ "$version" -ge 17 ] || skip "the JDK of $java_home is older than 17"
cc=${CC:-cc}
command -v python3 >/dev/null || skip "python3 is missing"
command -v "$cc" >/dev/null || skip "no C compiler was found: $cc is missing"
[ -f "$target/release/liblarder.so" ] || skip "there is no liblarder.so: run cargo build --release -p larder-c"

if [ ! -d "$kotlin" ]; then
    command -v npm >/dev/null || skip "Kotlin's compiler is not in $kotlin, and npm, which would install it, is missing"
    rm -rf "$kotlin.part"
    mkdir -p "$kotlin.part"
    (cd "$kotlin.part" && npm pack --silent "kotlin-compiler@$kotlin_version" >/dev/null) || skip "npm cannot install Kotlin's compiler"
    archive=$kotlin.part/kotlin-compiler-$kotlin_version.tgz
    echo "$kotlin_sha256  $archive" | sha256sum --check --status || { echo "$archive has another checksum" >&2 && exit 1; }
    tar -xzf "$archive" -C "$kotlin.part" --strip-components 1
    rm "$archive"
    mv "$kotlin.part" "$kotlin"
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export JAVA_HOME=$java_home

python3 - "$sample/AndroidManifest.xml" "$sample/res/layout/main.xml" <<'PYTHON'
import sys, xml.dom.minidom
for path in sys.argv[1:]:
    xml.dom.minidom.parse(path)
PYTHON
echo "ok: the XML files are well-formed"

link=(-Icrates/larder-c/include "-L$target/release" -llarder "-Wl,-rpath,$target/release")
"$cc" -std=c11 -O2 -Wall -Wextra -Wpedantic -Werror -shared -fPIC -I"$java_home/include" -I"$java_home/include/linux" \
    $sample/cpp/larder_jni.c "${link[@]}" -o "$work/liblarder_jni.so"
"$cc" -std=c11 examples/c/generate.c "${link[@]}" -o "$work/generate"
echo "ok: the glue compiles without a warning"

bash "$kotlin/bin/kotlinc" -Werror -language-version $language -api-version $language -jvm-target 17 -d "$work/classes" \
    $sample/kotlin/larder/sample/Larder.kt scripts/check/android_sample.kt 2>"$work/said" || { cat "$work/said" >&2 && exit 1; }
echo "ok: Larder.kt compiles as Kotlin $language without a warning"

# The texts of the program in C.
expect() { "$work/generate" models/demo "$1" '{"cache": "16x", "threads": 2}' '{"max-tokens": 30, "temperature": 0}' 2>/dev/null; }
expect "The old man looked at the door, and" >"$work/text"
expect "“Où?” – 木 𝄞 said he" >"$work/non-ascii"

# A heap of fixed size that is touched at the start, so that memory which grows is that of the library.
"$java_home/bin/java" -Xcheck:jni -Xms96m -Xmx96m -XX:+AlwaysPreTouch -Djava.library.path="$work" \
    -cp "$work/classes:$kotlin/lib/kotlin-stdlib.jar" larder.sample.Android_sampleKt models/demo "$work/text" "$work/non-ascii" |
    tee "$work/output"
if grep -qE 'WARNING in native method|FATAL ERROR in native method|WARNING: JNI' "$work/output"; then
    echo "FAILED: the glue breaks a rule of JNI" >&2
    exit 1
fi
echo "ok: -Xcheck:jni found nothing"
