# Sourced by build-deb and build-rpm: the version, and the tree that both build from.

cd "$(dirname "$0")/.."

# The system's Python builds the system's package, whatever pyenv or a user's own packages offer.
PATH=/usr/sbin:/usr/bin:/sbin:/bin
PYTHONNOUSERSITE=1
export PATH PYTHONNOUSERSITE
unset PYTHONPATH PYTHONHOME

die() {
    echo "$(basename "$0"): $*" >&2
    exit 1
}

case $PWD in
    *[[:space:]]*) die "pybuild and rpmbuild fail on spaces in a path; move this: $PWD" ;;
esac

version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' nomarr_systemd/__init__.py)
[ -n "$version" ] || die "nomarr_systemd/__init__.py has no line __version__ = \"...\""

# The version is written in __init__.py; the other places must follow it, not be corrected here.
same_version() { # FILE VERSION_IN_IT
    [ "$2" = "$version" ] ||
        die "$1 says ${2:-nothing}, nomarr_systemd/__init__.py says $version; make $1 agree"
}

# Tracked files as they are now: a change can be tried before it is committed, and no cache or
# stray file of the working directory gets into a package.
export_tree() { # DIRECTORY
    mkdir -p "$1"
    git ls-files -z | xargs -0 cp -P --parents -t "$1"
    chmod -R u=rwX,go=rX "$1" # git leaves the umask of whoever cloned
}
