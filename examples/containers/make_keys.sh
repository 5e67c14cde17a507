#!/bin/sh
# Make the secrets of compose.yaml, once: the head's key, the hosts' key, and the names that it stands for.
set -eu
cd "$(dirname "$0")"
umask 077
mkdir -p secrets
cd secrets
for name in head_key host_key; do
    [ -e "$name" ] || ssh-keygen -q -t ed25519 -N '' -C "podium $name" -f "$name"
done
names=$(sed '/^#/d; s/ .*//' ../hosts | paste -s -d ,)
echo "$names $(cat host_key.pub)" >known_hosts
