#!/bin/sh
# `flowgpu` of a user who is not root: /usr/local/bin/flowgpu (docs/install.md).
program=/opt/flowgpu/.venv/bin/flowgpu
# A copy of setpriv that has these capabilities, and that only some users may start.
setpriv=/usr/local/libexec/flowgpu/setpriv
rights=+sys_admin,+sys_ptrace,+sys_time,+net_admin,+setpcap,+checkpoint_restore
exec "$setpriv" --inh-caps="$rights" --ambient-caps="$rights" "$program" "$@"
