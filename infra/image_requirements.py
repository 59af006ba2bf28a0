"""What pip installs into an image that brings its own torch: athanor's dependencies without it, and constraints.

    python image_requirements.py --extras s3,dask IMAGE.txt OUT     writes OUT/requirements.txt and OUT/constraints.txt
    python image_requirements.py --check BEFORE.txt AFTER.txt       fails where pip replaced what the image brought

The lists are what `pip list --format=freeze` prints. pyproject.toml and constraints.txt are read where it runs.
"""

import argparse
import re
import sys
import tomllib
from pathlib import Path

# Built for each other and for the image's CUDA: a wheel of PyPI in the place of one of them breaks the others.
OF_THE_IMAGE = re.compile(
    r"^(torch|torchvision|torchaudio|triton|pytorch-triton|apex|flash-attn|transformer-engine.*|nvidia-.*|cuda-.*)$"
)


def name_of(requirement: str) -> str:
    """The normalized name of a requirement or of a line of `pip list`."""
    name = re.match(r"[A-Za-z0-9._-]+", requirement.strip())
    return re.sub(r"[-_.]+", "-", name.group()).lower() if name else ""


def read_pins(path: Path) -> dict[str, str]:
    """The pinned lines of a file by name."""
    lines = (line.split("#")[0].strip() for line in path.read_text().splitlines())
    return {name_of(line): line for line in lines if "==" in line}


def make_lists(project: Path, constraints: Path, image: Path, extras: list[str]) -> tuple[list[str], list[str]]:
    """(requirements, constraints): without what the image brings, and with its versions of that."""
    config = tomllib.loads(project.read_text())["project"]
    wanted = list(config["dependencies"])
    for extra in extras:
        wanted += config["optional-dependencies"][extra]
    pins = {name: pin for name, pin in read_pins(constraints).items() if not OF_THE_IMAGE.match(name)}
    pins |= {name: pin for name, pin in read_pins(image).items() if OF_THE_IMAGE.match(name)}
    return [line for line in wanted if not OF_THE_IMAGE.match(name_of(line))], sorted(pins.values(), key=name_of)


def replaced(before: Path, after: Path) -> list[str]:
    """What the image brought and is not there any more, or in another version."""
    now = read_pins(after)
    brought = {name: pin for name, pin in read_pins(before).items() if OF_THE_IMAGE.match(name)}
    return [f"{pin} is now {now.get(name, 'gone')}" for name, pin in brought.items() if now.get(name) != pin]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    parser.add_argument("--extras", default="")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args(argv)
    if args.check:
        wrong = replaced(args.first, args.second)
        print("\n".join(wrong), file=sys.stderr)
        return 1 if wrong else 0
    extras = [extra for extra in args.extras.split(",") if extra]
    made = make_lists(Path("pyproject.toml"), Path("constraints.txt"), args.first, extras)
    args.second.mkdir(parents=True, exist_ok=True)
    for name, lines in zip(("requirements.txt", "constraints.txt"), made, strict=True):
        (args.second / name).write_text("".join(f"{line}\n" for line in lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
