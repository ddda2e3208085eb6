#!/bin/sh
# An aarch64 Python with packages, which qemu runs on this machine: FOLDER/usr/bin/python.
#
#     sh tools/aarch64_python.sh FOLDER PIP PACKAGE...
#
# Nothing is installed on this system. The interpreter and what it needs are Debian's packages for aarch64: apt finds and
# downloads them with its state in FOLDER. The Python packages come from pip, with all that they need: torch's wheel for
# aarch64 needs the libraries of CUDA. 4.5 GB on disk.
set -eu
mkdir -p "$1/apt/state/lists/partial" "$1/apt/cache/archives/partial"
root=$(cd "$1" && pwd) pip=$2
shift 2

debian() {
  : > "$root/apt/status" # nothing is installed, so that every package that is needed is downloaded
  apt-get -qq -o Dir::Etc=/etc/apt -o Dir::State="$root/apt/state" -o Dir::State::status="$root/apt/status" \
    -o Dir::Cache="$root/apt/cache" -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o Debug::NoLocking=1 "$@"
}
debian update
debian --yes --no-install-recommends --download-only install python3-minimal libpython3-stdlib libstdc++6 > /dev/null
for package in "$root"/apt/cache/archives/*.deb; do dpkg-deb -x "$package" "$root"; done
test -e "$root/lib" || ln -s usr/lib "$root/lib" # where all of Debian's packages name usr/lib

# A program sees the files of FOLDER in the place of this system's. Without these, torch would look for an aarch64
# processor among those of this machine, and crash.
cpu=$root/sys/devices/system/cpu
mkdir -p "$root/proc" "$cpu/cpu0/regs/identification"
echo 0-1 | tee "$cpu/possible" > "$cpu/present"
echo 0x00000000413fd0c1 > "$cpu/cpu0/regs/identification/midr_el1" # an Arm Neoverse N1, as is what follows
for core in 0 1; do
  printf '%s\t: %s\n' processor $core Features 'fp asimd atomics fphp asimdhp asimddp' 'CPU implementer' 0x41 \
    'CPU architecture' 8 'CPU variant' 0x3 'CPU part' 0xd0c 'CPU revision' 1 '' ''
done > "$root/proc/cpuinfo"

# Python takes this script for itself, so that the processes which it starts are emulated too.
cat > "$root/usr/bin/python" << 'END'
#!/bin/sh
root=$(cd "$(dirname "$0")/../.." && pwd)
exec qemu-aarch64-static -L "$root" -0 "$root/usr/bin/python" "$root/usr/bin/python3" "$@"
END
chmod +x "$root/usr/bin/python"

version=$("$root/usr/bin/python" -c 'import platform; print(platform.python_version())')
platforms=$(seq --format '--platform manylinux_2_%g_aarch64' 17 36)
# shellcheck disable=SC2086
"$pip" install -q --no-compile --upgrade --target "$root/usr/lib/python3/dist-packages" --python-version "$version" \
  --implementation cp --only-binary=:all: --platform manylinux2014_aarch64 $platforms "$@"
