# Sourced by install-system and install-apptainer: apt-get as root, with a function `fail` of theirs.
# shellcheck shell=bash

# sudo drops the environment, and with it the proxy.
as_root=()
if [[ $(id -u) -eq 0 ]]; then
    export DEBIAN_FRONTEND=noninteractive
elif sudo -n true 2>/dev/null; then
    as_root=(sudo -n env DEBIAN_FRONTEND=noninteractive)
    for name in http_proxy https_proxy no_proxy HTTP_PROXY HTTPS_PROXY NO_PROXY; do
        [[ -z "${!name-}" ]] || as_root+=("$name=${!name}")
    done
fi

apt_get() {  # a fresh machine updates itself for minutes, and holds dpkg's lock meanwhile
    "${as_root[@]}" apt-get -q -o DPkg::Lock::Timeout=600 "$@"
}

apt_update() {
    local output deadline=$((SECONDS + 600))
    until output=$(apt_get update 2>&1); do
        # The timeout above is not that of this lock.
        if [[ "$output" != *lists/lock* ]] || ((SECONDS >= deadline)); then
            tail -n 10 <<<"$output" >&2
            fail "'apt-get update' failed; its last lines are above. Repair the network, the proxy or /etc/apt, then run this again"
        fi
        sleep 2
    done
}
