"""A Kubernetes cluster on this machine, for tests, benchmarks and people.

``up`` takes the cluster that KUBECONFIG names, if it names one; else it starts etcd, API server, controller-manager,
scheduler and KWOK on loopback ports, from KUBEBUILDER_ASSETS or from programs that it builds once. Standard output is
the path of the kubeconfig and nothing else. With ``--nodes`` it also starts nodes that run pods in containers, which
takes root: ``probe`` says whether this machine can, ``load`` imports images into every node, ``node-kill`` and
``node-start`` kill and start a node's kubelet. ``path`` prints the folders of kubectl and Helm, for PATH.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

from tools.build_cache import BuildError
from tools.cluster.binaries import programs
from tools.cluster.cluster import FOLDER, build, check_machine, down, kill_node, load, start_node, status, up
from tools.cluster.servers import ServerError

CLIENTS = ("kubectl", "helm")
"""What people call."""


def main(arguments: list[str] | None = None) -> int:
    """Run one command; 1 when it failed, with the reason."""
    options = build_parser().parse_args(arguments)
    try:
        match options.command:
            case "up":
                print(up(options.folder, os.environ, nodes=options.nodes))
            case "down":
                down(options.folder)
            case "build":
                build(options.folder, os.environ)
            case "probe":
                check_machine(1)
                print("this machine can run nodes")
            case "load":
                load(options.folder, os.environ, options.archives)
            case "path":
                print(os.pathsep.join(str(path.parent) for path in programs(os.environ, CLIENTS).values()))
            case "node-kill":
                kill_node(options.folder, os.environ, options.name)
            case "node-start":
                start_node(options.folder, os.environ, options.name)
            case _:
                return status(options.folder, os.environ)
    except (BuildError, ServerError, OSError, subprocess.CalledProcessError) as error:
        print(f"cluster {options.command} failed: {error}", file=sys.stderr)
        return 1
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.cluster", description=__doc__)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    shared = argparse.ArgumentParser(add_help=False)
    # Before the command or after it; the command's own default would replace what was given before it.
    shared.add_argument("--folder", type=Path, default=argparse.SUPPRESS)
    commands = parser.add_subparsers(dest="command", required=True)
    start = commands.add_parser("up", parents=[shared])
    start.add_argument("--nodes", type=int, default=0, help="Nodes that run pods in containers.")
    for name in ("down", "status", "build", "probe", "path"):
        commands.add_parser(name, parents=[shared])
    commands.add_parser("load", parents=[shared]).add_argument("archives", type=Path, nargs="+", metavar="ARCHIVE")
    for name in ("node-kill", "node-start"):
        commands.add_parser(name, parents=[shared]).add_argument("name", metavar="NAME")
    return parser


if __name__ == "__main__":
    sys.exit(main())
