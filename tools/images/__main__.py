"""The images of polyreme: build them, load them into a cluster, show their sizes.

``build`` writes an archive of each into ``build/images``; ``base`` makes the base image of machines without a registry;
``list`` prints the names of all images that an installation needs, one a line.
"""

import argparse
import os
import sys
from pathlib import Path

from tools.build_cache import BuildError
from tools.images import archive, base, engine, load
from tools.images.build import FOLDER, IMAGES, PUBLIC_BASE, BuildRequest, build, listed

MB = 1e6


def main(arguments: list[str] | None = None) -> int:
    """Run one command; 1 when it failed, with the reason."""
    options = _parser().parse_args(arguments)
    try:
        match options.command:
            case "base":
                print(*base.tar_files(os.environ).values(), sep="\n")
            case "build":
                _build(options)
            case "list":
                print(*listed(BuildRequest(prefix=options.prefix, tag=options.tag)), sep="\n")
            case "load":
                load.load(options.cluster, options.archives or load.whole(options.folder))
            case _:
                for path in sorted(options.folder.glob("*.tar")):
                    _show(path)
    except (BuildError, OSError, ValueError) as error:
        print(f"images {options.command} failed: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.images", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    building = commands.add_parser("build")
    building.add_argument("images", nargs="*", metavar="IMAGE", help=f"of {', '.join(IMAGES)}; all by default")
    building.add_argument("--thin", nargs="*", default=[], help="build these also without packages of others")
    building.add_argument("--base", default=PUBLIC_BASE, help=f"base image, or {base.LOCAL}: made by debootstrap")
    building.add_argument("--builder", help="image with pip and the base's Python; the base by default")
    building.add_argument("--engine", help="buildah or docker; the first that works by default")
    building.add_argument("--no-cache", action="store_true", help="build every layer again")
    loading = commands.add_parser("load")
    loading.add_argument("cluster", help="kind, kind-NAME, k3s or local")
    loading.add_argument("archives", nargs="*", type=Path, help="by default, those of the folder that are not thin")
    commands.add_parser("base")
    listing = commands.add_parser("list")
    for one in (building, listing):
        one.add_argument("--prefix", default="polyreme", help="registry and folder before the images' names")
        one.add_argument("--tag", default="", help="the project's version by default")
    showing = commands.add_parser("show")
    for one in (building, loading, showing):
        one.add_argument("--folder", type=Path, default=FOLDER)
    return parser


def _build(options: argparse.Namespace) -> None:
    request = BuildRequest(
        # Thin images alone, when only these are named.
        images=options.images or (() if options.thin else IMAGES),
        thin=options.thin,
        base=options.base,
        builder=options.builder,
        prefix=options.prefix,
        tag=options.tag,
        cached=not options.no_cache,
    )
    for path in build(request, engine.find(options.engine), os.environ, folder=options.folder).values():
        _show(path)


def _show(path: Path) -> None:
    try:
        image = archive.read(path)
    except ValueError:
        print(f"{path}  {path.stat().st_size / MB:.1f} MB")
        return
    layers = " + ".join(f"{layer.bytes / MB:.1f}" for layer in image.layers)
    print(f"{path}  {image.name}  {image.digest[:19]}  layers {layers} MB")


if __name__ == "__main__":
    sys.exit(main())
