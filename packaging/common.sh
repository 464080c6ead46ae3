# Sourced by the build scripts: the version, and the tree that all build from.
# Usage of each: [--into DIRECTORY] [--version VERSION] [--quick]; another version than the sources'
# is for trying upgrades, --quick leaves out what looks for faults in the package.

cd "$(dirname "$0")/.."

# The system's Python builds the system's package, whatever pyenv or a user's own packages offer.
PATH=/usr/sbin:/usr/bin:/sbin:/bin
PYTHONNOUSERSITE=1
export PATH PYTHONNOUSERSITE
unset PYTHONPATH PYTHONHOME
umask 022

die() {
    echo "$(basename "$0"): $*" >&2
    exit 1
}

source_version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' nomarr_systemd/__init__.py)
[ -n "$source_version" ] || die "nomarr_systemd/__init__.py has no line __version__ = \"...\""
version=$source_version
into=
quick=
while [ $# -gt 0 ]; do
    case $1 in
        --into) into=$2 && shift ;;
        --version) version=$2 && shift ;;
        --quick) quick=yes ;;
        *) die "usage: $0 [--into DIRECTORY] [--version VERSION] [--quick]" ;;
    esac
    shift
done
mkdir -p "${into:=dist}"
into=$(realpath "$into")
# What is built elsewhere works elsewhere, too, so that two builds never meet.
case $into in
    "$PWD/dist") work=$PWD/build ;;
    *) work=$into/build ;;
esac

case $work in
    *[[:space:]]*) die "pybuild and rpmbuild fail on spaces in a path; move this: $work" ;;
esac

mkdir -p "$work"
log=$work/$(basename "$0").log
: >"$log"
echo "$(basename "$0"): version $version; the output of its tools is in $log"

# Run a command, its output into the log; show the end of that if it fails.
logged() {
    "$@" >>"$log" 2>&1 && return
    tail -n 60 "$log" >&2
    die "failed: $*; all of the output is in $log"
}

# The version is written in __init__.py; the other places must follow it, not be corrected here.
same_version() { # FILE VERSION_IN_IT
    [ "$2" = "$source_version" ] ||
        die "$1 says ${2:-nothing}, nomarr_systemd/__init__.py says $source_version; make $1 agree"
}

# Tracked files as they are now: a change can be tried before it is committed, and no cache or
# stray file of the working directory gets into a package.
export_tree() { # DIRECTORY
    mkdir -p "$1"
    git ls-files -z | xargs -0 cp -P --parents -t "$1"
    chmod -R u=rwX,go=rX "$1" # git leaves the umask of whoever cloned
    [ "$version" = "$source_version" ] ||
        sed -i "s/^__version__ = .*/__version__ = \"$version\"/" "$1/nomarr_systemd/__init__.py"
}
