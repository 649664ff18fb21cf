#!/usr/bin/env bash
# Installs the wheel given as argument on a system without a compiler and says which build that gives. try.sh runs it on
# a bare Debian, in an empty folder, as an unprivileged user. Fails unless the router's request path is compiled and the
# engine's kernels come prebuilt; on a processor without AVX-512 the kernels must say so, and the rest must run.
set -euo pipefail
if command -v cc gcc clang; then
    echo "cannot try the wheel: this system has a compiler" >&2
    exit 1
fi
python3 -m venv wheel-env
wheel-env/bin/python -m pip --disable-pip-version-check install -q "$1"
# Away from the checkout, whose sources would be imported instead.
cd wheel-env
bin/isochrone --help >/dev/null
bin/isochrone-router --help >/dev/null
bin/python - <<'END'
from nodeagent.engine.kernels.cpu import build as kernels
from router import build as router

facts = router.facts()
print(f"router: compiled {facts['compiled']}, Python {facts['python']}")
assert facts["compiled"] == "yes", "the wheel has no compiled request path for this Python"
prebuilt = sorted(path.name for path in kernels.PREBUILT_FOLDER.glob("*.so"))
assert len(prebuilt) == len(kernels.VARIANTS), f"the wheel lacks kernels: it has {prebuilt}"
try:
    library = kernels.kernels_library()
    assert library.parent == kernels.PREBUILT_FOLDER, f"not prebuilt: {library}"
    print(f"engine: kernels {library.name}")
except kernels.KernelsUnavailable as error:
    assert "this processor lacks" in str(error), error
    print(f"engine: {error}")
END
