"""Copy this machine's package index settings for a root that sees nothing else of it.

Writes pip's effective configuration as one file (the argument) and prints the files and folders it
needs, one a line: those that the configuration names, name resolution, and certificate authorities.
"""

import ast
import subprocess
import sys
from configparser import RawConfigParser
from pathlib import Path

ALWAYS = ("/etc/resolv.conf", "/etc/hosts", "/etc/ssl/certs/ca-certificates.crt")


def settings() -> dict[str, str]:
    """Return pip's settings by name; what the environment sets wins over files."""
    pip = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(pip, capture_output=True, text=True, check=True).stdout
    found: dict[str, str] = {}
    for line in sorted(listed.splitlines(), key=lambda line: line.startswith(":env:")):
        name, _, value = line.partition("=")
        found[name.split(".", 1)[1]] = str(ast.literal_eval(value))
    return found


def main() -> None:
    """Write the configuration and print the paths."""
    found = settings()
    config = RawConfigParser()
    config["global"] = {name: value.replace("\n", "\n\t") for name, value in found.items()}
    with Path(sys.argv[1]).open("w") as file:
        config.write(file)
    words = " ".join(found.values()).split()
    named = [word.removeprefix("file://") for word in words]
    # The links of a simple index are relative, and may lead to a folder beside it.
    named = [name.removesuffix("/").removesuffix("/simple") for name in named]
    absolute = {name for name in (*ALWAYS, *named) if name.startswith("/")}
    paths = {name for name in absolute if Path(name).exists()}
    sys.stdout.write("".join(f"{path}\n" for path in sorted(paths)))


if __name__ == "__main__":
    main()
