"""Shims for conda, nvm and tox, with which a row's own evaluation script runs unmodified in a prepared image.

They put the prepared environment on PATH, under the names that those scripts use. They download nothing.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping

CONDA_ROOT = "/opt/miniconda3"
TESTBED_ENV = f"{CONDA_ROOT}/envs/testbed"
NVM_DIR = "/opt/nvm"
NODE_BIN = f"{NVM_DIR}/versions/node/current/bin"

_CONDA_SH = f"""\
# Activates prepared environments under conda's command names. POSIX shell, safe under `set -u`.
export CONDA_EXE={CONDA_ROOT}/bin/conda
export CONDA_SHLVL="${{CONDA_SHLVL:-0}}"

__ng_conda_leave() {{
    if [ -n "${{CONDA_PREFIX:-}}" ]; then
        PATH=":$PATH:"
        while :; do
            case "$PATH" in
                *":$CONDA_PREFIX/bin:"*) PATH="${{PATH%%":$CONDA_PREFIX/bin:"*}}:${{PATH#*":$CONDA_PREFIX/bin:"}}" ;;
                *) break ;;
            esac
        done
        PATH="${{PATH#:}}"
        PATH="${{PATH%:}}"
        export PATH
    fi
    unset CONDA_PREFIX CONDA_DEFAULT_ENV VIRTUAL_ENV
    CONDA_SHLVL=0
}}

__ng_conda_enter() {{
    case "$1" in
        base) __ng_prefix={CONDA_ROOT} ;;
        /*) __ng_prefix="$1" ;;
        *) __ng_prefix="{CONDA_ROOT}/envs/$1" ;;
    esac
    if [ ! -d "$__ng_prefix/bin" ]; then
        echo "conda: no environment named '$1' here" >&2
        return 1
    fi
    __ng_conda_leave
    export PATH="$__ng_prefix/bin:$PATH" CONDA_PREFIX="$__ng_prefix" CONDA_DEFAULT_ENV="$1" CONDA_SHLVL=1
    if [ -f "$__ng_prefix/pyvenv.cfg" ]; then
        export VIRTUAL_ENV="$__ng_prefix"
    fi
    for __ng_script in "$__ng_prefix"/etc/conda/activate.d/*.sh; do
        if [ -f "$__ng_script" ]; then
            . "$__ng_script"
        fi
    done
}}

conda() {{
    case "${{1:-}}" in
        activate) __ng_conda_enter "${{2:-base}}" ;;
        deactivate) __ng_conda_leave ;;
        *) {CONDA_ROOT}/bin/conda "$@" ;;
    esac
}}
"""

_ACTIVATE = f"""\
. {CONDA_ROOT}/etc/profile.d/conda.sh
conda activate "${{1:-base}}"
"""

_CONDA = f"""\
#!/bin/sh
# Answers what scripts commonly ask; environments here are fixed when the image is prepared.
root={CONDA_ROOT}
case "${{1:-}}" in
    --version | -V) echo "conda (prepared environments)" ;;
    env | info)
        printf '# conda environments:\\n#\\nbase  %s\\n' "$root"
        for directory in "$root"/envs/*; do
            if [ -d "$directory" ]; then
                printf '%s  %s\\n' "$(basename "$directory")" "$directory"
            fi
        done
        ;;
    list) exec "$root/envs/testbed/bin/python" -m pip list ;;
    run)
        shift
        name=testbed
        while [ $# -gt 0 ]; do
            case "$1" in
                -n | --name) name="$2"; shift 2 ;;
                --no-capture-output | --live-stream) shift ;;
                *) break ;;
            esac
        done
        . "$root/etc/profile.d/conda.sh"
        conda activate "$name" || exit 1
        exec "$@"
        ;;
    *)
        echo "conda: '${{1:-}}' is not available in a prepared environment" >&2
        exit 2
        ;;
esac
"""

_NVM_SH = f"""\
# Puts the prepared Node.js on PATH under nvm's command name. POSIX shell, safe under `set -u`.
export NVM_DIR={NVM_DIR}
case ":$PATH:" in
    *":{NODE_BIN}:"*) ;;
    *) export PATH="{NODE_BIN}:$PATH" ;;
esac

nvm() {{
    case "${{1:-}}" in
        current | version) node --version ;;
        use | alias | install | --version | ls) : ;;
        *)
            echo "nvm: '${{1:-}}' is not available in a prepared environment" >&2
            return 2
            ;;
    esac
}}
"""

_TOX = """\
#!/bin/sh
# Runs what comes after `--` with pytest in the current environment, the way `tox --current-env` would, with a report
# line for every test.
while [ $# -gt 0 ] && [ "$1" != "--" ]; do
    shift
done
if [ $# -gt 0 ]; then
    shift
fi
exec python -X dev -m pytest -rA --durations 25 "$@"
"""

# pip applies the value of a `no-…` option to the setting without `no-`, so `false` switches build isolation off.
_PIP_CONF = """\
[global]
no-index = true
no-build-isolation = false
disable-pip-version-check = true
root-user-action = ignore

[install]
no-deps = true
"""

EDITABLE_MODE = "editable_mode=compat"
"""Makes setuptools put the project's directory on Python's path, as in the published images. Newer setuptools would
install an import hook instead, which hides files from tools that search the path. Other build backends ignore it."""

Files = Mapping[str, tuple[str, int]]
"""Absolute path in the box → text and mode."""


def conda_files() -> Files:
    """Return the files of the conda shim. The environment itself is a virtual environment at `TESTBED_ENV`."""
    return {
        f"{CONDA_ROOT}/etc/profile.d/conda.sh": (_CONDA_SH, 0o644),
        f"{CONDA_ROOT}/bin/activate": (_ACTIVATE, 0o644),
        f"{CONDA_ROOT}/bin/conda": (_CONDA, 0o755),
    }


def offline_pip_files(*, editable: bool = False) -> Files:
    """Return the files that make pip in the environment work without a registry, with the installed packages.

    Args:
        editable: make editable installs use `EDITABLE_MODE`.
    """
    text = f"{_PIP_CONF}config-settings = {EDITABLE_MODE}\n" if editable else _PIP_CONF
    return {f"{TESTBED_ENV}/pip.conf": (text, 0o644)}


def nvm_files() -> Files:
    return {f"{NVM_DIR}/nvm.sh": (_NVM_SH, 0o644)}


def tox_files() -> Files:
    return {f"{TESTBED_ENV}/bin/tox": (_TOX, 0o755)}


def activation_files(env: Mapping[str, str]) -> Files:
    """Return the file that sets the variables ``env`` when the environment is activated."""
    if not env:
        return {}
    text = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in sorted(env.items()))
    return {f"{TESTBED_ENV}/etc/conda/activate.d/ng-env.sh": (text, 0o644)}


def shims_digest_parts() -> list[object]:
    """Return the files of this module that go into images, as plain data for content keys."""
    files = {**conda_files(), **offline_pip_files(), **nvm_files(), **tox_files()}
    return [[path, text, mode] for path, (text, mode) in sorted(files.items())]
