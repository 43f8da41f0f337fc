"""``tonnage launch kube``: a run as Kubernetes manifests."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Literal

import typer

from tonnage.cli.parameters import ConfigFile, Overrides
from tonnage.display.terminal import say, terminal
from tonnage.errors import Problem, UserError, refusals
from tonnage.files.paths import word

WRITTEN = "# Written by tonnage launch kube, which replaces it.\n"


def launch(
    where: Annotated[Literal["kube"], typer.Argument(metavar="kube", help="Kubernetes: the only one there is.")],
    config: ConfigFile,
    overrides: Overrides = None,
    image: Annotated[str, typer.Option(help="Container image with tonnage in it, and Ray for the RayJob.")] = "",
    claim: Annotated[
        str, typer.Option(help="PersistentVolumeClaim (ReadWriteMany) with the model and data, and for the run.")
    ] = "",
    mount: Annotated[
        str, typer.Option(help="Where it is mounted; relative paths of the config start there.")
    ] = "/shared",
    memory: Annotated[str | None, typer.Option(help="Memory of a node's pod, as 64Gi.")] = None,
    namespace: Annotated[str | None, typer.Option(help="Namespace, if it is not the current one.")] = None,
    to: Annotated[str, typer.Option(metavar="DIR", help="Where to write the manifests.", parser=word)] = ".",
) -> None:
    """Write the Kubernetes manifests of a run: a RayJob for KubeRay, and an Indexed Job without Ray."""
    import yaml

    from tonnage.config import read_config
    from tonnage.files.places import begins_with, check_file
    from tonnage.files.writing import made, write_whole
    from tonnage.launch import kube
    from tonnage.planning.workers import decided_for_pods

    options = {"image": image, "claim": claim}
    missing = [Problem(f"no --{name}", "one", "tonnage launch --help") for name, value in options.items() if not value]
    if missing:
        raise UserError(*missing)
    console, pods = terminal(), kube.Pods(image, claim, mount, memory, namespace)
    kube.check_pods(pods)
    decided = decided_for_pods(read_config(config, overrides or [], check_files=False))
    directory, name = Path(to), kube.name_of(decided)
    manifests = {"rayjob": kube.ray_job(decided, pods), "job": kube.indexed_job(decided, pods)}
    texts = {
        directory / f"{name}-{kind}.yaml": WRITTEN + yaml.safe_dump_all(documents, sort_keys=False)
        for kind, documents in manifests.items()
    }
    with refusals("the manifests could not be written", directory):
        for path in texts:
            check_file(path, is_own=begins_with(WRITTEN), inputs=[config])
    new = [path for path in texts if not path.exists()]
    with refusals("the manifests could not be written", directory), made(directory):
        try:
            for path, text in texts.items():
                write_whole(path, text)
        except OSError:
            for path in new:
                path.unlink(missing_ok=True)
            raise
    for path in texts:
        say(console, f"kubectl apply -f {shlex.quote(str(path))}")
