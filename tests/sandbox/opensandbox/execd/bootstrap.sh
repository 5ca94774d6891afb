#!/bin/sh
# Starts the daemon beside the box's entry point, which stays the first process.
/opt/opensandbox/execd </dev/null >/dev/null 2>&1 &
exec "$@"
