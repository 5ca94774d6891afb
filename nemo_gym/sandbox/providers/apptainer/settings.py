"""Apptainer's own configuration, as this provider runs it; standard library only."""

from __future__ import annotations

CONFIGURATION = """\
allow setuid = no
allow pid ns = yes
allow user ns = yes
config passwd = no
config group = no
config resolv_conf = no
mount proc = yes
mount sys = no
mount dev = minimal
mount devpts = yes
mount home = no
mount tmp = no
mount hostfs = no
mount slave = no
user bind control = yes
enable overlay = yes
enable underlay = no
sessiondir max size = 16
always use nv = no
always use rocm = no
root default capabilities = no
memory fs type = tmpfs
systemd cgroups = no
"""
"""What decides the box is the same on every machine, whatever its administrator configured for others."""
