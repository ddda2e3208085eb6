#!/bin/sh
# Says in a line each what this machine lacks for set-up, and what installs it, before anything is downloaded.
#
#   sh tools/prerequisites.sh python3
python=$1
missing=0

# lacks WHAT PACKAGE-OF-DEBIAN PACKAGE-OF-FEDORA COMMAND-ON-MACOS
lacks() {
  echo "Needs $1. Debian, Ubuntu: sudo apt install $2. Fedora: sudo dnf install $3. macOS: $4." >&2
  missing=1
}

if ! command -v "$python" > /dev/null; then
  lacks "Python 3.10 or newer, and there is no $python" 'python3 python3-venv python3-dev' python3-devel 'brew install python'
elif ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
  has=$("$python" -c 'import platform; print(platform.python_version())')
  echo "Needs Python 3.10 or newer; $python is $has. With another one installed: make PYTHON=python3.11 ..." >&2
  missing=1
else
  "$python" -c 'import ensurepip, venv' 2> /dev/null ||
    lacks "Python's venv" python3-venv python3 'brew install python'
  "$python" -c 'import os, sysconfig, sys
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' ||
    lacks "Python's headers (Python.h)" python3-dev python3-devel 'brew install python'
fi

compiler=
for name in ${CXX:-c++ g++ clang++}; do
  command -v "$name" > /dev/null && compiler=$name && break
done
[ -n "$compiler" ] || lacks 'a C++ compiler' g++ gcc-c++ 'xcode-select --install'

exit $missing
