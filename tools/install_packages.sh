#!/bin/sh
# Install Debian packages that tests need: install_packages.sh PACKAGE…
# Needs root and apt-get. Where it cannot, one line says so and the exit code is 0: tests then skip with their reason.
# The daemons among them are neither started nor enabled: tests start their own.
set -u
policy=/usr/sbin/policy-rc.d

is_installed() { [ "$(dpkg-query --show --showformat='${db:Status-Status}' "$1" 2>/dev/null)" = installed ]; }

give_up() {
    echo "Not installed: $absent ($1). Tests that need them are skipped." >&2
    exit 0
}

absent=
for package; do
    is_installed "$package" || absent="$absent${absent:+ }$package"
done
[ -n "$absent" ] || exit 0
command -v apt-get >/dev/null || give_up "no apt-get on this machine"
[ "$(id -u)" = 0 ] || give_up "installing needs root: sudo apt-get install $absent"

echo "Installing $absent"
export DEBIAN_FRONTEND=noninteractive
log=$(mktemp)
install() { apt-get install --yes --no-install-recommends $absent >"$log" 2>&1; }
# Debian's way to keep a package from starting its daemon; a policy that is there already stays.
if [ ! -e "$policy" ]; then
    trap 'rm -f "$policy"' EXIT
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
fi
# Lists of packages may be absent or older than what is on the mirror.
install || { apt-get update >"$log" 2>&1 && install; } || give_up "apt-get failed: $log"
rm -f "$log"
if [ -d /run/systemd/system ]; then
    units=$(dpkg-query --listfiles $absent | sed -n 's|.*/systemd/system/\([^/@]*\.\(service\|socket\)\)$|\1|p')
    [ -z "$units" ] || systemctl --quiet disable --now $units || echo "Still enabled, maybe: $units" >&2
fi
