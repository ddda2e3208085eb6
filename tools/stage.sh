#!/bin/sh
# Runs a command as a stage of set-up, and says what it is for and how many seconds it took.
#
#   sh tools/stage.sh 'torch, 190 MB' pip install torch
what=$1 && shift
echo "==> $what"
began=$(date +%s)
"$@" || {
  echo "==> $what: failed" >&2
  exit 1
}
echo "    done in $(($(date +%s) - began)) s"
